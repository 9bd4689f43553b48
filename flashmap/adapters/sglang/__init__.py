"""SGLang: its plugin entry point, and the same by hand. Verify batches of speculative decoding go to the op.

SGLang loads ``register`` in every process that it starts (entry point ``flashmap_verify`` of ``sglang.srt.plugins``), most of
which run no attention. So a backend is hooked when SGLang itself imports it, and not before: its HookRegistry would import it
everywhere. Nothing here may raise into the engine, unless FLASHMAP_STRICT=1.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterable
from importlib import import_module

from flashmap import env
from flashmap.adapters import observe
from flashmap.adapters.patching import Hook, Installation, broken, check_environment, load, probe, set_for_children, strict, when_imported
from flashmap.core.interface import Reason

logger = logging.getLogger(__name__)

MODES = ("target_verify", "draft_extend_v2", "draft_decode")
# SGLang's module of each backend, ours that hooks it, and the modes that it serves.
BACKENDS = {
    "triton": ("sglang.srt.layers.attention.triton_backend", "flashmap.adapters.sglang.triton_attn", MODES),
    "fa3": (
        "sglang.srt.layers.attention.flashattention_backend",
        "flashmap.adapters.sglang.fa3_attn",
        ("target_verify", "draft_extend_v2"),
    ),
}

_waiting: dict[str, Hook] = {}  # by backend: the hook that waits for its import
_hooked: dict[str, tuple[Hook, ...]] = {}
_declined: dict[str, Reason] = {}
_environment: list[Hook] = []
_installation: Installation | None = None


def register() -> None:
    """The entry point: :func:`install` with what the environment says. Raises only under FLASHMAP_STRICT=1."""
    load("SGLang", install)


def install(backends: Iterable[str] | None = None, modes: Iterable[str] | None = None) -> Installation:
    """Hook FlashMap into SGLang in this process. Idempotent: what is hooked stays, and is listed again.

    Args:
        backends: "triton", "fa3"; None: FLASHMAP_SGLANG_BACKENDS, or else both.
        modes: "target_verify", "draft_extend_v2", "draft_decode" (of triton alone); None: FLASHMAP_SGLANG_MODES, or else all three. What
            is given here also becomes the choice of the processes that SGLang starts, where the entry point installs. A backend keeps the
            modes with which it was hooked first.

    Returns:
        What is hooked so far, or waits for SGLang to import it, and what was declined and why. Install before CUDA graphs are captured.

    Raises:
        ValueError: an unknown backend or mode, or a FLASHMAP_* variable with a bad value. RuntimeError: under FLASHMAP_STRICT=1, when
            something cannot be hooked.
    """
    env.configure_logging()
    if env.get("FLASHMAP_DISABLE"):
        return Installation("sglang", declined=(Reason("disabled", "FLASHMAP_DISABLE is set", "unset FLASHMAP_DISABLE"),))
    wanted = _names("backend", backends, "FLASHMAP_SGLANG_BACKENDS", tuple(BACKENDS), tuple(BACKENDS))
    served = _names("mode", modes, "FLASHMAP_SGLANG_MODES", MODES, MODES)
    check_environment()
    for name in wanted:
        if name in _waiting or name in _hooked or name in _declined:
            continue
        module, _, able = BACKENDS[name]
        its = tuple(mode for mode in served if mode in able)
        if not its:
            text = f"{name} has nothing of {', '.join(served)} to serve"
            _declined[name] = Reason("mode", text, f"name one of {', '.join(able)}, or leave this backend out")
            logger.info("flashmap leaves SGLang's backend alone: %s", _declined[name])
            continue
        if module in sys.modules:
            _hook(name, its)
        else:
            _waiting[name] = when_imported(module, functools.partial(_hook, name, its), f"{name}: {', '.join(its)}")
    for given, variable, names in ((backends, "FLASHMAP_SGLANG_BACKENDS", wanted), (modes, "FLASHMAP_SGLANG_MODES", served)):
        if given is not None and all(not hook.target.endswith(variable) for hook in _environment):
            _environment.append(set_for_children(variable, names))
    observe.start()
    return _current()


def examine() -> Installation:
    """What will be hooked once SGLang imports its backends: installs, and imports them. For ``flashmap doctor``."""
    install()
    for name in tuple(_waiting):
        try:
            import_module(BACKENDS[name][0])
        except Exception as error:  # not for this machine: SGLang will not choose it here either
            _waiting.pop(name).undo()
            _declined[name] = Reason("platform", f"{name}: {BACKENDS[name][0]} cannot be imported here ({type(error).__name__}: {error})")
    return _current()


def _hook(name: str, modes: tuple[str, ...]) -> None:
    """Hook a backend that has been imported, or leave it alone with one WARNING. Runs inside SGLang's import of it."""
    _waiting.pop(name, None)
    try:
        ours = import_module(BACKENDS[name][1])
        missing = probe(ours.CONTRACTS)
        if not missing:
            _hooked[name] = ours.hook(modes)
    except Exception as error:
        missing = (f"hooking failed ({type(error).__name__}: {error})",)
    if not missing:
        roles = ", ".join(ours.serve.MODES[mode][1] for mode in modes)
        logger.info("flashmap is active in SGLang's %s backend (process %d): %s", name, os.getpid(), roles)
        return
    _declined[name] = broken(name, missing)
    text = f"flashmap leaves SGLang's backend alone: {_declined[name]}"
    if strict():
        raise RuntimeError(text)
    logger.warning("%s", text)


def _names(what: str, given: Iterable[str] | None, variable: str, known: tuple[str, ...], default: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(given if given is not None else env.get(variable) or default))
    for name in names:
        if name not in known:
            raise ValueError(f"no SGLang {what} {name!r} can be hooked: choose among {', '.join(known)}")
    return names


def _current() -> Installation:
    """The installation as it is now; the same object as long as nothing changed."""
    global _installation
    hooked = (*_waiting.values(), *(hook for hooks in _hooked.values() for hook in hooks), *_environment)
    now = Installation("sglang", hooked, tuple(_declined.values()), _forget)
    if _installation is None or (now.hooked, now.declined) != (_installation.hooked, _installation.declined):
        _installation = now
    return _installation


def _forget() -> None:
    """Undo all, also what was hooked after the Installation was handed out."""
    global _installation
    for hook in reversed((*_waiting.values(), *(hook for hooks in _hooked.values() for hook in hooks), *_environment)):
        hook.undo()
    if _hooked:
        import_module("flashmap.adapters.sglang.serve").forget()
    for state in (_waiting, _hooked, _declined, _environment):
        state.clear()
    _installation = None
