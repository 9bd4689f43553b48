"""Kernels of other libraries: looked for once a process, by whoever first asks on a GPU, and never while a graph is captured.

Imported by the implementations that run such kernels. What is looked for, and what makes an answer right, they know themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashmap.core.interface import Reason
from flashmap.core.request import DeviceInfo

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # gives (out, log-sum-exp fp32), in the library's own shapes


@dataclass(frozen=True, slots=True)
class Found:
    """``attend`` None: not available, for ``reasons``, of which "not_probed" is of graphs that are being captured alone."""

    attend: Attend | None
    reasons: tuple[Reason, ...] = ()


_found: dict[str, Found] = {}
_lock = threading.Lock()


def once(name: str, look: Callable[[torch.device], Found], serves: Callable[[tuple[int, int]], bool], device: DeviceInfo) -> Found:
    """What ``look`` finds on this process's GPU, if ``serves`` is true of its compute capability. Kept under ``name``."""
    found = _found.get(name)
    if found is not None:
        return found
    if not torch.cuda.is_available():
        text = f"{name} is found by running it, and this process sees no CUDA device"
        return Found(None, (Reason("library", text, "ask on the machine that it is for"),))
    if not serves(torch.cuda.get_device_capability()):
        return Found(None, (Reason("library", f"{name} is found by running it, and this process is on a {torch.cuda.get_device_name()}"),))
    if device.capturing or torch.cuda.is_current_stream_capturing():
        text = f"a graph is being captured, and {name} has not been tried in this process"
        return Found(None, (Reason("not_probed", text, "call prepare(), or the op once with the same shapes, before the capture"),))
    with _lock:
        if name not in _found:
            _found[name] = look(torch.device("cuda", torch.cuda.current_device()))
    return _found[name]


def failed(title: str, error: Exception) -> Reason:
    """The reason that an exception of somebody else's code is: it is then not used, and must not take the process down."""
    first = str(error).strip().splitlines()[:1]
    return Reason("library_probe", f"{title} failed: {type(error).__name__}: {''.join(first)}")
