"""Engines that engine_bench.py measures, one a file; each has ``start(args)``, which gives an Engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Request = tuple[list[int], int]  # prompt tokens, and how many new ones


@dataclass(frozen=True, slots=True)
class Generated:
    """``tokens`` are the new ones of each request; ``steps`` the verify steps of all requests together."""

    seconds: float
    tokens: list[list[int]]
    steps: int


class Engine(Protocol):
    """Greedy, and never ending before the last new token."""

    version: str

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Generated:
        """All prompts at once."""
        ...

    def serve(self, requests: list[Request], batch: int) -> Generated:
        """In order, ``batch`` of them in flight."""
        ...

    def memory(self) -> int:
        """Bytes of the GPU in use: the engine's where it can tell, else everybody's."""
        ...

    def profile(self, prompt: list[int], folder: Path) -> None:
        """A torch profiler trace of a few steps."""
        ...

    def close(self) -> None: ...
