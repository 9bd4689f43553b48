"""One adapter per engine: it translates the engine's metadata into the op's arguments and installs itself.

``install("vllm")`` is what the engine's plugin mechanism does by itself once FlashMap is installed beside it.
Adapters never import each other; an engine is imported when its adapter installs, not before.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from flashmap.adapters.patching import Hook, Installation

ENGINES = ("vllm", "sglang")

__all__ = ["ENGINES", "Hook", "Installation", "install"]


def install(engine: str, **options: Any) -> Installation:
    """Hook FlashMap into ``engine`` in this process. The options are those of that adapter's own ``install``.

    Raises ValueError for an engine without an adapter. What could not be hooked is listed in the Installation.
    """
    if engine not in ENGINES:
        raise ValueError(f"no adapter for the engine {engine!r} in this version: choose one of {', '.join(map(repr, ENGINES))}")
    installation: Installation = import_module(f"flashmap.adapters.{engine}").install(**options)
    return installation
