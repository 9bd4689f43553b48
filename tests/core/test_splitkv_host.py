"""The host side of triton_splitkv: what is planned, compiled beforehand and kept, with launches that are only recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashmap.core import DeviceInfo, Limits, VerifyRequest, registry, verify_attention
from flashmap.core.dispatch import Policy, choose
from flashmap.core.implementations.triton_shared.scratch import COUNTERS, Scratch
from flashmap.core.implementations.triton_splitkv import launch
from flashmap.core.implementations.triton_splitkv.config import config_for, overrides
from flashmap.core.testing import Case, build

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends to have a GPU")
H200 = replace(DeviceInfo.known("sm90"), triton="3.6.0")
GQA = VerifyRequest(32, 8, 128, 128, max_query_len=4, page_size=16, max_kv_len=8192)
MLA = VerifyRequest(16, 1, 576, 512, max_query_len=4, page_size=64, max_kv_len=8192, latent=True)


class Recorder:
    """Stands for a kernel. ``launches``: what Triton compiles a kernel for."""

    def __init__(self, name: str) -> None:
        self.name, self.launches = name, set()  # type: ignore[var-annotated]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            kinds = [x.dtype if isinstance(x, torch.Tensor) else type(x) for x in arguments]
            self.launches.add((self.name, *kinds, *constants.items()))

        return launch


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Recorder, Recorder]]:
    """(split, merge), on CPU tensors that are planned for as if they were on an H200."""
    split, merge = Recorder("split"), Recorder("merge")
    monkeypatch.setattr(launch, "_split_kernel", lambda name, aligned: split)
    monkeypatch.setattr(launch.kernels, "merge_kernel", merge)
    monkeypatch.setattr(DeviceInfo, "of", lambda device: H200)
    launch._plan.cache_clear()
    yield split, merge
    launch._plan.cache_clear()


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("features", [{}, {"sinks": True, "mask": "qlen", "draft": "dense", "dtype": "fp16"}])
def test_prepare_compiles_all_that_calls_within_the_limits_launch(
    recorders: tuple[Recorder, Recorder], page_size: int, features: dict[str, Any]
) -> None:
    def arguments(requests: int) -> dict[str, Any]:
        case = Case("call", query_lens=(3,) * requests, prefix_lens=(20,) * requests, page_size=page_size, **features)
        return build(case)

    split, merge = recorders
    registry.get("triton_splitkv").prepare(VerifyRequest.of(**arguments(2)), Limits(70, 3, 20000), torch.device("cpu"))
    prepared = split.launches | merge.launches
    assert merge.launches
    split.launches.clear()
    merge.launches.clear()
    for requests in (1, 2, 16, 17, 33, 64, 65, 70):
        verify_attention(**arguments(requests), impl="triton_splitkv")
    assert split.launches | merge.launches <= prepared


def test_prepare_of_a_batch_that_needs_no_merge(recorders: tuple[Recorder, Recorder]) -> None:
    """256 heads and many tokens fill the GPU without splits."""
    arguments = build(Case("wide", heads=256, kv_heads=1, dtype="fp16", query_lens=(64,), prefix_lens=(20,)))
    split, merge = recorders
    registry.get("triton_splitkv").prepare(VerifyRequest.of(**arguments), Limits(1, 64, 20000), torch.device("cpu"))
    prepared = set(split.launches)
    split.launches.clear()
    verify_attention(**arguments, impl="triton_splitkv")
    assert split.launches <= prepared and not merge.launches


def test_an_odd_latent_cache_does_not_get_the_kernel_that_copies_16_bytes_at_a_time() -> None:
    def request(k: torch.Tensor) -> VerifyRequest:
        arguments = build(Case("mla", heads=16, kv_heads=1, head_dim=576, v_head_dim=512, latent=True, dtype="bf16"))
        return VerifyRequest.of(**{**arguments, "kv": replace(arguments["kv"], k=k)})

    def pool(width: int, first: int = 0) -> torch.Tensor:
        return torch.zeros(12 * 16 * width + first, dtype=torch.bfloat16)[first:].view(12, 16, 1, width)[..., :576]

    for k, kernel in ((pool(576), "latent_sm90"), (pool(1152), "latent_sm90"), (pool(577), "split"), (pool(576, 1), "split")):
        config = config_for(request(k), H200)
        assert config is not None and config.kernel == kernel
    odd = launch.empty_call(replace(MLA, aligned=False), torch.device("cpu"))
    assert not odd.request.aligned, "prepare compiles for such a cache"


def test_choosing_does_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMAP_SPLITKV_BLOCK_N", "4096")
    assert choose(GQA, H200, Policy()).winner == "triton_splitkv"
    assert overrides() == {"block_n": 4096}
    with pytest.raises(ValueError, match="FLASHMAP_SPLITKV_BLOCK_N=4096 needs more than the 227 KiB of shared memory"):
        launch._plan.__wrapped__(GQA, H200)
    monkeypatch.setenv("FLASHMAP_SPLITKV_BLOCK_N", "32")
    assert launch._plan.__wrapped__(GQA, H200).config.block_n == 32


def test_scratch_that_no_graph_points_at_is_freed() -> None:
    scratch = Scratch(torch.device("cpu"))
    for size in (100, 200, 300):
        assert scratch.take(size, 1, capturing=False) is scratch.take(10, 1, capturing=False)
        scratch.reserve(size)
    assert scratch.bytes() == 4 * 2 * (COUNTERS + 300)


def test_scratch_that_a_graph_points_at_is_kept() -> None:
    scratch = Scratch(torch.device("cpu"))
    assert scratch.take(100, 1, capturing=True) is None and not scratch.holds(100, 1)
    scratch.reserve(100)
    captured = scratch.take(100, 1, capturing=True)
    eager = scratch.take(100, 2, capturing=False)
    assert captured is not None and eager is not captured, "a buffer a stream"
    assert scratch.take(50, 2, capturing=True) is eager, "warmed up on its stream"
    for stream in (1, 2):
        scratch.take(500, stream, capturing=False)
    assert {id(b) for b in scratch._retired} == {id(captured), id(eager)}
    scratch.take(900, 2, capturing=False)
    assert len(scratch._retired) == 2, "no graph was captured with the second"
    scratch.reserve(1000)
    assert scratch.take(950, 1, capturing=True) is not None and scratch.take(950, 3, capturing=True) is None


def test_fp8_latent_caches_go_to_the_hopper_kernel() -> None:
    """But for draft tokens that are not in the cache: bf16 may not fit into fp16."""
    fp8 = replace(MLA, kv_dtype="fp8_e4m3", scales="device")
    found = [config_for(r, H200) for r in (fp8, replace(fp8, draft="slots"), replace(fp8, draft="dense"))]
    assert [config and config.kernel for config in found] == ["latent_sm90", "latent_sm90", "split"]


@pytest.mark.parametrize(
    ("change", "pairs"),
    [
        ({}, True),
        ({"kv_dtype": "fp8_e5m2", "dtype": "fp16"}, True),
        ({"kv_dtype": "bf16"}, False),
        ({"dtype": "fp32"}, False),
        ({"aligned": False}, False),
        ({"head_dim": 80}, False),  # 64 + 16, and half of 16 columns are too few for a product
        ({"head_dim": 96, "v_head_dim": 65}, False),
        ({"head_dim": 96}, True),
        ({"head_dim": 16, "v_head_dim": 16}, False),
    ],
)
def test_which_fp8_caches_are_read_in_pairs_of_columns(change: dict[str, Any], pairs: bool) -> None:
    request = replace(GQA, **{"kv_dtype": "fp8_e4m3", **change})
    found = config_for(request, H200)
    assert found is not None and found.pairs is pairs
    elsewhere = config_for(request, DeviceInfo.known("sm89"))
    assert elsewhere is not None and not elsewhere.pairs, "of GPUs on Hopper alone"
