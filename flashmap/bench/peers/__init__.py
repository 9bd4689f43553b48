"""Who is timed: our op and the kernels it is measured against, each in a file of its own.

A peer is a class without arguments whose constructor imports what it needs (an absent package ends there) and whose
`bind(problem)` gives `call(layer) -> out [T, Hq, Dv]`, launching on the current stream, capturable after one call. What a
peer cannot do it says by raising Skip. `load` turns every failure to import into a reason: nothing here is a dependency.

Peers without a package, and reduced packages (pack_peers.py), come from the folder that FLASHMAP_PEERS names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Protocol, cast

import torch

from flashmap import env
from flashmap.bench.problem import Problem

Call = Callable[[int], torch.Tensor]

# In the order of the table's columns. The first five are the default.
PEERS = {
    "seed": "seed:Seed",
    "fa3": "fa3:Fa3",
    "fa3_cascade": "fa3:Fa3Cascade",
    "flashmla": "flashmla:FlashMla",
    "flashinfer": "flashinfer_peer:FlashInfer",
    "fa3_meta": "fa3:Fa3Planned",
    "sglang_extend": "sglang_triton:Extend",
    "sglang_verify": "sglang_triton:Verify",
    "vllm_unified": "vllm_unified:Unified",
}
DEFAULT = tuple(PEERS)[:5]


class Skip(Exception):
    """Why a peer does not run, here or on this point."""


class Peer(Protocol):
    """What the benchmark needs of a participant."""

    version: str

    def bind(self, problem: Problem) -> Call: ...


def load(name: str) -> Peer:
    """The named peer, or Skip with the reason why it is not available."""
    folder = look_in_folder()
    module, cls = PEERS[name].split(":")
    try:
        return cast(Peer, getattr(importlib.import_module(f"flashmap.bench.peers.{module}"), cls)())
    except Skip:
        raise
    except Exception as error:  # a peer's import may fail in any way; the benchmark goes on without it
        where = "" if folder else "; FLASHMAP_PEERS is not set"
        raise Skip(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}{where}") from error


def look_in_folder() -> str | None:
    """Put the folder that FLASHMAP_PEERS names on the import path, last: an installed engine comes first. None: it names none."""
    folder: str | None = env.get("FLASHMAP_PEERS")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    return folder


def require(condition: bool, reason: str) -> None:
    """Skip with a reason unless the condition holds."""
    if not condition:
        raise Skip(reason)
