"""Device memory for partial results: one buffer a stream, plus one in reserve for the next stream that is captured.

A captured graph points at its buffer for ever, so one that was taken during a capture is retired, never freed, when a
larger one replaces it. Calls on different streams use different buffers. Graphs captured on one stream share one, as
they replay in turn.
"""

from __future__ import annotations

import logging
import threading

import torch

from flashmap.core.implementations.triton_shared.arguments import current_stream
from flashmap.core.inputs import Call
from flashmap.core.interface import Reason
from flashmap.core.request import DeviceInfo

logger = logging.getLogger(__name__)
COUNTERS = 1024  # int32 before each buffer: 0 when it is taken for the first time, and whoever counts there leaves 0


class Scratch:
    """The buffers of one device. Sizes are in fp32 elements."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._by_stream: dict[int, torch.Tensor] = {}
        self._captured: set[int] = set()  # streams whose buffer a graph points at
        self._reserve: torch.Tensor | None = None
        self._retired: list[torch.Tensor] = []

    def take(self, size: int, stream: int, *, capturing: bool) -> torch.Tensor | None:
        """A buffer for a call on ``stream``; None when one would have to be allocated during a capture."""
        buffer = self._by_stream.get(stream)
        if buffer is not None and buffer.numel() >= size and not capturing:
            return buffer
        with self._lock:
            buffer, reserve = self._by_stream.get(stream), self._reserve
            if buffer is None or buffer.numel() < size:
                if not capturing:
                    buffer = self._allocate(size)
                elif reserve is None or reserve.numel() < size:
                    return None
                else:
                    buffer, self._reserve = reserve, None
                self._replace(stream, buffer)
            if capturing:
                self._captured.add(stream)
            return buffer

    def holds(self, size: int, stream: int) -> bool:
        """Whether ``take`` would succeed under capture."""
        buffer, reserve = self._by_stream.get(stream), self._reserve
        return any(b is not None and b.numel() >= size for b in (buffer, reserve))

    def reserve(self, size: int) -> None:
        """See that the next stream to be captured finds a buffer of ``size``."""
        reserve = self._reserve
        if reserve is None or reserve.numel() < size:
            with self._lock:
                if self._reserve is None or self._reserve.numel() < size:
                    self._reserve = self._allocate(size)  # nobody has used the old one

    def bytes(self) -> int:
        """All that is held, retired buffers included."""
        held = [*self._by_stream.values(), *self._retired, *([] if self._reserve is None else [self._reserve])]
        return sum(b.untyped_storage().nbytes() for b in held)

    def _replace(self, stream: int, buffer: torch.Tensor) -> None:
        """A buffer that no graph points at is freed: torch's allocator hands its memory on in the order of the stream."""
        if stream in self._captured:
            self._captured.remove(stream)
            self._retired.append(self._by_stream[stream])
        self._by_stream[stream] = buffer

    def _allocate(self, size: int) -> torch.Tensor:
        logger.info("flashmap: taking %.1f MB of scratch on %s", size * 4 / 1e6, self._device)
        memory = torch.empty(COUNTERS + size, dtype=torch.float32, device=self._device)
        memory[:COUNTERS].zero_()
        return memory[COUNTERS:]


def take(call: Call, size: int) -> torch.Tensor:
    """The buffer of ``call``'s stream. Allocates only when the stream first needs this much, which ``lacking`` rules out under capture."""
    device, scratch = DeviceInfo.of(call.q.device), scratch_of(call.q.device)
    buffer = scratch.take(size, current_stream(call.q.device), capturing=device.capturing)
    assert buffer is not None, "select() asks not_ready() before a call under capture"
    if not device.capturing:
        scratch.reserve(size)
    return buffer


def lacking(call: Call, size: int) -> tuple[Reason, ...]:
    """What a captured call of ``size`` lacks: a buffer, or nothing."""
    if scratch_of(call.q.device).holds(size, current_stream(call.q.device)):
        return ()
    text = f"a graph is being captured and the stream has no scratch of {size * 4} bytes"
    return (Reason("scratch", text, "call prepare(), or the op once with the same shapes, before the capture"),)


_scratch: dict[torch.device, Scratch] = {}
_create = threading.Lock()


def scratch_of(device: torch.device) -> Scratch:
    found = _scratch.get(device)
    if found is None:
        with _create:
            found = _scratch.setdefault(device, Scratch(device))
    return found
