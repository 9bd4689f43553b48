from __future__ import annotations

import pytest
import torch

OURS = ("reference", "torch_dense", "triton_splitkv")


@pytest.fixture(params=OURS)
def impl(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[torch.float32, torch.float16], ids=["fp32", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
