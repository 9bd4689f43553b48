from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashmap.core.implementations import probing

OURS = ("reference", "torch_dense", "triton_splitkv")


@pytest.fixture(params=OURS)
def impl(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[torch.float32, torch.float16], ids=["fp32", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], dict[str, probing.Found]]:
    """pretend_gpu(capability): probing sees a GPU of that compute capability and has looked for nothing; gives what it will find."""

    def pretend(capability: tuple[int, int]) -> dict[str, probing.Found]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        found: dict[str, probing.Found] = {}
        monkeypatch.setattr(probing, "_found", found)
        return found

    return pretend
