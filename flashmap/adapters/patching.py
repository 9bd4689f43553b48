"""What every adapter needs to change an engine with care: probes of its contract, hooks with an owner, and their undoing.

A contract names what an adapter uses of an engine, symbol by symbol and parameter by parameter. Versions are not looked
at. A broken contract is a Reason that names what is missing; the adapter then leaves that part of the engine alone.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from flashmap import env
from flashmap.core.dispatch import Policy
from flashmap.core.interface import Reason

logger = logging.getLogger(__name__)
OWNER = "flashmap"


@dataclass(frozen=True, slots=True)
class Contract:
    """``target`` ("module:Class.attribute") exists; if callable it takes ``parameters`` by name (``in_order``: so many of
    them by position, in this order); if a dataclass it has ``fields``; if a function of Python's its body refers to the names in ``uses``."""

    target: str
    parameters: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    in_order: int = 0

    def missing(self) -> tuple[str, ...]:
        """What is not there, each in one phrase that names it; empty: the contract holds. Imports the module."""
        module, _, path = self.target.partition(":")
        try:
            found = import_module(module)
        except Exception as error:  # a module of the engine that cannot be imported here is a part that cannot be used
            return (f"{module} cannot be imported ({type(error).__name__}: {error})",)
        for name in filter(None, path.split(".")):
            if not hasattr(found, name):
                return (f"{self.target} is missing",)
            found = getattr(found, name)
        lacking = tuple(f"{self.target} takes no {name!r}" for name in self.parameters if not _takes(found, name))
        if not lacking and not _begins_with(found, self.parameters[: self.in_order]):
            lacking = (f"{self.target} takes its parameters in another order",)
        return (
            *lacking,
            *(f"{self.target} has no field {name!r}" for name in self.fields if name not in _fields(found)),
            *(f"{self.target} no longer uses {name!r}" for name in self.uses if name not in _names_in(found)),
        )


def probe(contracts: Iterable[Contract]) -> tuple[str, ...]:
    """All that is missing from ``contracts``."""
    return tuple(phrase for contract in contracts for phrase in contract.missing())


def broken(part: str, missing: tuple[str, ...]) -> Reason:
    """The Reason for a part that is left alone because its contract does not hold."""
    return Reason(
        "contract", f"{part}: {'; '.join(missing)}", "use a version of the engine that FlashMap was tested with, or update FlashMap"
    )


def _takes(function: object, name: str) -> bool:
    if not callable(function):
        return False
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # no signature to be had: nothing says that it would not work
        return True
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _begins_with(function: Any, names: tuple[str, ...]) -> bool:
    try:
        return tuple(inspect.signature(function).parameters)[: len(names)] == names
    except (TypeError, ValueError):
        return True


def _names_in(function: object) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return code.co_names if code is not None else ()


def _fields(cls: object) -> set[str]:
    return {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()


@dataclass(frozen=True, slots=True)
class Hook:
    """One change of an engine: what was changed, to what, by whom and why. ``undo`` restores what was there before."""

    target: str
    replacement: str
    owner: str
    why: str
    undo: Callable[[], None] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.target} -> {self.replacement}"


@dataclass(frozen=True, slots=True)
class Installation:
    """What an adapter did in this process: the hooks it set, and what it left alone with the reasons."""

    engine: str
    hooked: tuple[Hook, ...] = ()
    declined: tuple[Reason, ...] = ()
    _removed: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    def remove(self) -> None:
        """Restore the engine as it was before, last change first. A second call does nothing."""
        for hook in reversed(self.hooked):
            hook.undo()
        self._removed()


# -- changes ------------------------------------------------------------------------------------------------------------

_NOTHING = object()


def wrap(target: str, around: Callable[..., Any], why: str) -> Hook:
    """Call ``around(original, *args, **kwargs)`` in place of the function at ``target`` ("module:Class.attribute").

    ``undo`` puts back what was there. Where somebody wrapped ours since, ours stays below theirs and only passes calls on.
    """
    module, _, path = target.partition(":")
    *holders, name = path.split(".")
    holder = functools.reduce(getattr, holders, import_module(module))
    before, original, active = vars(holder).get(name, _NOTHING), getattr(holder, name), True

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs) if active else original(*args, **kwargs)

    def undo() -> None:
        nonlocal active
        active = False
        if vars(holder).get(name) is not wrapper:
            return
        if before is _NOTHING:
            delattr(holder, name)
        else:
            setattr(holder, name, before)

    setattr(holder, name, wrapper)
    return Hook(target, _name(around), OWNER, why, undo)


def _name(function: Any) -> str:
    function = getattr(function, "func", function)  # of a functools.partial
    return f"{function.__module__}.{function.__qualname__}"


def when_imported(module: str, then: Callable[[], None], why: str) -> Hook:
    """Call ``then`` once ``module`` has been imported by whoever needs it. Nothing is imported here."""
    watch = _Watch(module, then)
    sys.meta_path.insert(0, watch)
    return Hook(module, "hooked as soon as the engine imports it", OWNER, why, watch.stop)


class _Watch:
    """A finder that finds nothing by itself: it adds ``then`` to what the module's own loader does."""

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self._module, self._then, self._asking = module, then, False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._module or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(found: ModuleType) -> None:
                del loader.exec_module  # the loader is as it was before the module runs
                execute(found)
                if self in sys.meta_path:
                    self.stop()
                    self._then()

            loader.exec_module = exec_module
        return spec

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def set_for_children(variable: str, names: Iterable[str]) -> Hook:
    """Set an environment variable, which the processes that the engine starts inherit: there the entry point reads what to hook."""
    before = os.environ.get(variable)
    os.environ[variable] = ",".join(names)

    def undo() -> None:
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before

    return Hook(f"environment variable {variable}", os.environ[variable], OWNER, "the processes that the engine starts hook the same", undo)


def load(title: str, install: Callable[[], object]) -> None:
    """What an engine's entry point does: ``install``, without raising into the engine except under FLASHMAP_STRICT=1."""
    try:
        install()
    except Exception as error:
        if strict():
            raise
        logger.warning("flashmap is not active in %s, which runs as without it: %s", title, error)


def check_environment() -> None:
    """ValueError for a FLASHMAP_* variable that is not understood: when an adapter installs, and not in the middle of a request."""
    for variable in env.VARIABLES:
        env.get(variable)
    Policy.from_env()  # a FLASHMAP_IMPL that names nothing


def strict() -> bool:
    """Whether FLASHMAP_STRICT is set, where a value that is not understood must not raise."""
    try:
        return bool(env.get("FLASHMAP_STRICT"))
    except ValueError:
        return False
