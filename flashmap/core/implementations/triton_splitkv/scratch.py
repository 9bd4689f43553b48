"""Device memory for partial results: one buffer a stream, plus one in reserve for the next stream that is captured.

A captured graph points at its buffer for ever, so a buffer that is replaced by a larger one is retired, never freed.
Calls on different streams use different buffers. Graphs captured on one stream share one, as they replay in turn.
"""

from __future__ import annotations

import logging
import threading

import torch

logger = logging.getLogger(__name__)


class Scratch:
    """The buffers of one device. Sizes are in fp32 elements."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._by_stream: dict[int, torch.Tensor] = {}
        self._reserve: torch.Tensor | None = None
        self._retired: list[torch.Tensor] = []

    def take(self, size: int, stream: int, *, capturing: bool) -> torch.Tensor | None:
        """A buffer for a call on ``stream``; None when one would have to be allocated during a capture."""
        buffer = self._by_stream.get(stream)
        if buffer is not None and buffer.numel() >= size:
            return buffer
        with self._lock:
            reserve = self._reserve
            if capturing:
                if reserve is None or reserve.numel() < size:
                    return None
                self._reserve = None
                return self._keep(stream, reserve)
            return self._keep(stream, self._allocate(size))

    def holds(self, size: int, stream: int) -> bool:
        """Whether ``take`` would succeed under capture."""
        buffer, reserve = self._by_stream.get(stream), self._reserve
        return any(b is not None and b.numel() >= size for b in (buffer, reserve))

    def reserve(self, size: int) -> None:
        """See that the next stream to be captured finds a buffer of ``size``."""
        with self._lock:
            if self._reserve is None or self._reserve.numel() < size:
                if self._reserve is not None:
                    self._retired.append(self._reserve)
                self._reserve = self._allocate(size)

    def bytes(self) -> int:
        """All that is held, retired buffers included."""
        held = [*self._by_stream.values(), *self._retired, *([] if self._reserve is None else [self._reserve])]
        return sum(4 * b.numel() for b in held)

    def _keep(self, stream: int, buffer: torch.Tensor) -> torch.Tensor:
        old = self._by_stream.get(stream)
        if old is not None:
            self._retired.append(old)
        self._by_stream[stream] = buffer
        return buffer

    def _allocate(self, size: int) -> torch.Tensor:
        logger.info("flashmap: triton_splitkv takes %.1f MB of scratch on %s", size * 4 / 1e6, self._device)
        return torch.empty(size, dtype=torch.float32, device=self._device)


_scratch: dict[torch.device, Scratch] = {}
_create = threading.Lock()


def scratch_of(device: torch.device) -> Scratch:
    found = _scratch.get(device)
    if found is None:
        with _create:
            found = _scratch.setdefault(device, Scratch(device))
    return found
