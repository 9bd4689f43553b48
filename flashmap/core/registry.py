"""Names and what stands behind them. Registering adds a name; it neither chooses nor runs.

Other distributions register through the entry-point group ``flashmap.implementations``: an entry point's name is the
implementation's, its object an implementation or a callable without arguments that returns one. It is loaded when the
names are first asked for; one that fails to load is reported in a WARNING and left out.
"""

from __future__ import annotations

import functools
import logging
from importlib import import_module, metadata

from flashmap.core.interface import VerifyAttention

logger = logging.getLogger(__name__)
GROUP = "flashmap.implementations"

# Where each implementation of ours is, "module:NAME"; imported when first asked for.
_OURS = {
    "reference": "flashmap.core.reference:IMPLEMENTATION",
    "torch_dense": "flashmap.core.implementations.torch_dense:IMPLEMENTATION",
    "triton_splitkv": "flashmap.core.implementations.triton_splitkv:IMPLEMENTATION",
    "fa3_tail": "flashmap.core.implementations.composite:FA3_TAIL",
    "fa3": "flashmap.core.implementations.composite:FA3",
    "flashmla_tail": "flashmap.core.implementations.composite:FLASHMLA_TAIL",
    "flashinfer": "flashmap.core.implementations.flashinfer:IMPLEMENTATION",
}
_registered: dict[str, VerifyAttention] = {}
_changes = 0


def register(implementation: VerifyAttention, *, replace: bool = False) -> None:
    """Add an implementation under its ``name``. ValueError if the name is taken, unless ``replace``; TypeError if a part is missing."""
    _check_parts(implementation)
    name = implementation.name
    if not replace and name in names():
        raise ValueError(f"an implementation named {name!r} is registered already: choose another name, or pass replace=True")
    _registered[name] = implementation
    _changed()


def changes() -> int:
    """How often a name was registered or removed: what was chosen before a change may not stand."""
    return _changes


def unregister(name: str) -> None:
    """Remove a name that :func:`register` added. Names of this package, if they were replaced, come back."""
    _registered.pop(name, None)
    _changed()


def names() -> tuple[str, ...]:
    """All registered names, able to run here or not."""
    _load_entry_points()
    return tuple(dict.fromkeys((*_OURS, *_registered)))


def get(name: str) -> VerifyAttention:
    """The implementation of that name. ValueError lists the names when there is none."""
    if name not in _registered and name not in _OURS and name not in names():  # names() loads the entry points
        raise ValueError(f"no implementation is named {name!r}: registered are {', '.join(names())}")
    return _registered[name] if name in _registered else _ours(name)


def _changed() -> None:
    global _changes
    _changes += 1


@functools.cache
def _ours(name: str) -> VerifyAttention:
    module, _, attribute = _OURS[name].partition(":")
    implementation: VerifyAttention = getattr(import_module(module), attribute)
    return implementation


@functools.cache
def _load_entry_points() -> None:
    for point in metadata.entry_points(group=GROUP):
        try:
            loaded = point.load()
            implementation = loaded() if callable(loaded) and not hasattr(loaded, "run") else loaded
            if isinstance(implementation, type):
                implementation = implementation()
            _check_parts(implementation)
            if implementation.name in _OURS or implementation.name in _registered:
                raise ValueError(f"the name {implementation.name!r} is taken")
            _registered[implementation.name] = implementation
        except Exception as error:  # somebody else's code: it must not take the host process down
            logger.warning("flashmap: entry point %s = %s of group %s is left out: %s", point.name, point.value, GROUP, error)


def _check_parts(implementation: VerifyAttention) -> None:
    missing = [part for part in ("name", "capability", "why_not", "not_ready", "prepare", "run") if not hasattr(implementation, part)]
    if missing:
        kind = type(implementation).__name__
        raise TypeError(f"{kind} lacks {', '.join(missing)}: derive it from flashmap.core.interface.Implementation")
