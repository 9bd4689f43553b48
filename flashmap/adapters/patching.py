"""What every adapter needs to change an engine with care: probes of its contract, hooks with an owner, and their undoing.

A contract names what an adapter uses of an engine, symbol by symbol and parameter by parameter. Versions are not looked
at. A broken contract is a Reason that names what is missing; the adapter then leaves that part of the engine alone.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module

from flashmap.core.interface import Reason


@dataclass(frozen=True, slots=True)
class Contract:
    """``target`` ("module:Class.attribute") exists; if callable it takes ``parameters`` by name; if a dataclass it has ``fields``."""

    target: str
    parameters: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()

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
        return (
            *(f"{self.target} takes no {name!r}" for name in self.parameters if not _takes(found, name)),
            *(f"{self.target} has no field {name!r}" for name in self.fields if name not in _fields(found)),
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
