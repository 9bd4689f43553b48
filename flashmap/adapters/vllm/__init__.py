"""vLLM: its plugin entry point, and the same by hand. Speculative decoding's verify batches go to the op.

vLLM loads ``register`` in every process that it starts (entry point ``flashmap_verify`` of ``vllm.general_plugins``).
It overrides vLLM's backends by subclasses that are registered under the same name; what they do not serve stays with the
class that they are derived from. Those for CUDA are registered by paths that import nothing before vLLM selects one (gate.py): most of
its processes run no attention. Nothing here may raise into the engine, unless FLASHMAP_STRICT=1.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from typing import Any

from flashmap import env
from flashmap.adapters import observe
from flashmap.adapters.patching import OWNER, Hook, Installation, broken, check_environment, load, probe, set_for_children, strict
from flashmap.adapters.vllm import gate
from flashmap.adapters.vllm.contracts import COMMON, CONTRACTS
from flashmap.core.interface import Reason

logger = logging.getLogger(__name__)

# Our class for each backend of vLLM's, by the path that vLLM's registry imports, and by the platform that has the backend.
CPU = {
    "CPU_ATTN": "flashmap.adapters.vllm.cpu_attn.FlashMapCPUAttentionBackend",
    "CPU_MLA": "flashmap.adapters.vllm.cpu_mla.FlashMapCPUMLABackend",
}
CUDA = {name: f"{gate.__name__}.{name}" for name in (*gate.OURS, *gate.NAMED)}
BACKENDS = CPU | CUDA

_installation: Installation | None = None
_decided: set[str] = set()  # the backends that are hooked, or were declined


def register() -> None:
    """The entry point: :func:`install` with what the environment says. Raises only under FLASHMAP_STRICT=1."""
    load("vLLM", install)


def install(backends: Iterable[str] | None = None) -> Installation:
    """Hook FlashMap into vLLM in this process. Idempotent: what is hooked stays, and is listed again.

    Args:
        backends: names of vLLM backends, keys of ``BACKENDS``, of which FLASHMAP and FLASHMAP_MLA are new names (CUDA, vLLM from
            0.32); None: FLASHMAP_VLLM_BACKENDS, or else all that this platform and version have. Given here, they also become the choice of the processes that vLLM starts, where the entry point installs.

    Returns:
        What was hooked, what was declined and why. Install before the model is built: vLLM chooses a layer's backend
        when it makes the layer.

    Raises:
        ValueError: an unknown backend, or a FLASHMAP_* variable with a bad value. RuntimeError: under FLASHMAP_STRICT=1, when
            something cannot be hooked.
    """
    global _installation
    env.configure_logging()
    if env.get("FLASHMAP_DISABLE"):
        return Installation("vllm", declined=(Reason("disabled", "FLASHMAP_DISABLE is set", "unset FLASHMAP_DISABLE"),))
    wanted = tuple(dict.fromkeys(backends if backends is not None else env.get("FLASHMAP_VLLM_BACKENDS") or _of(_platform())))
    unknown = [name for name in wanted if name not in BACKENDS]
    if unknown:
        raise ValueError(f"no vLLM backend {unknown[0]!r} can be hooked: choose among {', '.join(BACKENDS)}")
    check_environment()
    before = _installation or Installation("vllm")
    new = [name for name in wanted if name not in _decided]
    if not new and _installation is not None:
        return _installation
    made = [_hook(name) for name in new]
    hooked = [hook for hook in made if isinstance(hook, Hook)]
    declined = [reason for reason in made if isinstance(reason, Reason)]
    _tell(hooked, declined)
    if backends is not None:
        hooked.append(set_for_children("FLASHMAP_VLLM_BACKENDS", wanted))
    observe.start()
    _decided.update(new)
    _installation = Installation("vllm", (*before.hooked, *hooked), (*before.declined, *declined), _forget)
    return _installation


def _hook(name: str) -> Hook | Reason:
    """Override one backend by ours, or say why not."""
    platform = _platform()
    if name in gate.NAMED and platform == "cuda" and not _takes_names():
        return Reason("platform", f"{name}: this vLLM takes no new backend names", f"hook {gate.NAMED[name]}, and choose that")
    if name not in _of(platform):
        return Reason("platform", f"{name}: vLLM runs on {platform}, which has no such backend for FlashMap to serve")
    missing = probe((*COMMON, *(CONTRACTS[name] if name in CPU else ())))  # a CUDA backend is probed once vLLM imports it
    if missing:
        return broken(name, missing)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    path = BACKENDS[name]
    if name in gate.NAMED:
        if gate.named(name).get_path() != path:
            return _overridden(name, gate.named(name).get_path())
        return Hook(
            _target(name), path, OWNER, f"{gate.NAMED[name]} with FlashMap's op, by a name of its own", functools.partial(_unname, name)
        )
    member = AttentionBackendEnum[name]
    before = member.get_path() if member.is_overridden() else None
    if before is not None and before != path:
        return _overridden(name, before)
    register_backend(member, path)
    _forget_selection()
    return Hook(
        _target(name),
        path,
        OWNER,
        "verify batches of speculative decoding go to FlashMap's op",
        functools.partial(_restore, member, before),
    )


def _overridden(name: str, by: str) -> Reason:
    return Reason("overridden", f"{name} is overridden by {by}, which stays", "remove the other plugin, or choose with VLLM_PLUGINS")


def _platform() -> str:
    """ "cpu", "cuda", or what else vLLM runs on."""
    from vllm.platforms import current_platform

    return "cpu" if current_platform.is_cpu() else "cuda" if current_platform.is_cuda() else str(current_platform.device_type)


def _of(platform: str) -> dict[str, str]:
    found = {"cpu": CPU, "cuda": CUDA}.get(platform, {})
    return {name: path for name, path in found.items() if name not in gate.NAMED or _takes_names()}


def _takes_names() -> bool:
    """vLLM 0.32 and later: ``register_backend`` makes a member of a new name. Before, there is one slot for all plugins, CUSTOM."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return hasattr(AttentionBackendEnum, "register")


def examine() -> Installation:
    """What will be hooked once vLLM selects its backends: installs, and probes their contracts. For ``flashmap doctor``."""
    installation = install()
    of = {hook: gate.NAMED.get(name := hook.target.removeprefix(_TARGET), name) for hook in installation.hooked}
    lost = {}
    for name in gate.OURS:
        if name not in of.values():
            continue
        try:
            getattr(gate, name)
        except Exception as error:  # not for this machine: vLLM will not choose it here either
            lost[name] = Reason("platform", f"{name}: it cannot be imported here ({type(error).__name__}: {error})")
    lost |= gate.declined
    hooked = tuple(hook for hook in installation.hooked if of[hook] not in lost)
    return replace(installation, hooked=hooked, declined=(*installation.declined, *lost.values()))


def _restore(member: Any, before: str | None) -> None:
    """Take our override away, if it is still ours."""
    from vllm.v1.attention.backends.registry import register_backend

    if not member.is_overridden() or member.get_path() != BACKENDS[member.name]:
        return
    if before is None:
        member.clear_override()
    else:
        register_backend(member, before)
    _forget_selection()


def _unname(name: str) -> None:
    """Take a member of our own away. vLLM can add one, but not remove it: this undoes ``AttentionBackendEnum.register``."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    member = AttentionBackendEnum.__members__.get(name)
    if member is not None and member.get_path() == BACKENDS[name]:
        _forget_member(name)


def _forget_member(name: str) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    member = AttentionBackendEnum[name]
    member.clear_override()
    del AttentionBackendEnum._member_map_[name], AttentionBackendEnum._value2member_map_[member.value]
    AttentionBackendEnum._member_names_.remove(name)
    delattr(AttentionBackendEnum, name)
    _forget_selection()


def _forget_selection() -> None:
    """vLLM caches which class it selected; a layer made from now on must see the change."""
    selector = sys.modules.get("vllm.v1.attention.selector")
    clear = getattr(getattr(selector, "_cached_get_attn_backend", None), "cache_clear", None)
    if clear is not None:
        clear()


def _tell(hooked: list[Hook], declined: list[Reason]) -> None:
    """One line on what is active; one WARNING on what should be and is not."""
    _share_handlers()
    lost = [r for r in declined if r.code != "platform"]
    if lost:
        text = "flashmap leaves a part of vLLM alone: " + "; ".join(map(str, lost))
        if strict():
            for hook in hooked:
                hook.undo()
            raise RuntimeError(text)
        logger.warning("%s", text)
    if hooked:
        logger.info("flashmap is active in vLLM (process %d): %s", os.getpid(), "; ".join(map(str, hooked)))
    elif not lost:
        logger.info("flashmap is not active in vLLM: %s", "; ".join(map(str, declined)) or "it has nothing for this platform")


def _share_handlers() -> None:
    """Show our lines where vLLM's appear, unless the application set up logging itself. vLLM sets up its own logger alone."""
    ours = logging.getLogger("flashmap")
    if ours.handlers or logging.getLogger().handlers:
        return
    ours.addHandler(_AsVllm())
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)


class _AsVllm(logging.Handler):
    """Passes records to the handlers of vLLM's logger. vLLM may set them up after it loads plugins: until then INFO waits."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        handlers = logging.getLogger("vllm").handlers
        if handlers:
            for one in (*map(_made_anew, self._waiting), record):
                for handler in handlers:
                    handler.handle(one)
            self._waiting.clear()
        elif record.levelno >= logging.WARNING and logging.lastResort is not None:
            logging.lastResort.handle(record)
        elif len(self._waiting) < 20:
            self._waiting.append(record)


def _made_anew(r: logging.LogRecord) -> logging.LogRecord:
    """The same record from today's factory: vLLM's adds what its format shows."""
    return logging.getLogRecordFactory()(r.name, r.levelno, r.pathname, r.lineno, r.msg, r.args, r.exc_info, r.funcName)


def _forget() -> None:
    global _installation
    _installation = None
    _decided.clear()
    gate.forget()
    if "flashmap.adapters.vllm.serve" in sys.modules:
        import_module("flashmap.adapters.vllm.serve").SERVING.forget()


_TARGET = "vLLM backend "


def _target(name: str) -> str:
    return _TARGET + name
