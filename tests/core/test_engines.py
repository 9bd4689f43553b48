"""Where an engine's own kernel is preferred: the table, and what dispatch makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashmap.core import dispatch, engines, tables
from flashmap.core.dispatch import Policy
from flashmap.core.request import DeviceInfo, VerifyRequest

H200 = DeviceInfo.known("sm90")
TABLE = tables.checked_in(H200.name)
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "2026-12-01-h200-tune.jsonl"
OURS = "ours:triton_splitkv"


def left(kernel: str, request: VerifyRequest, device: DeviceInfo = H200) -> bool:
    """Whether the call stays with the engine's ``kernel``."""
    table = TABLE if device == H200 else None
    return engines.faster(kernel, "triton_splitkv", request, device, table) is not None


def measured(peer: str = "fa3") -> list[tuple[VerifyRequest, float, float]]:
    """(request, µs of ours, µs of the peer) of each point where both were measured."""
    times: dict[tuple[object, ...], dict[str, float]] = {}
    for line in RESULTS.read_text().splitlines():
        r = json.loads(line)
        if r.get("us") and r["kv"] == "bf16" and r["lens"] == "uniform":
            times.setdefault((r["shape"], r["bs"], r["L"], r["ctx"], r["mask"]), {})[r["who"]] = r["us"]
    found = []
    for (shape, requests, length, _, mask), who in times.items():
        theirs = who.get(peer if mask == "chain" else f"{peer}_cascade")
        if theirs is None or OURS not in who:
            continue
        latent = shape.startswith("mla")
        heads, kv_heads = (int(shape[3:]), 1) if latent else map(int, shape[3:].split("/"))
        dims = (576, 512) if latent else (128, 128)
        request = VerifyRequest(
            heads, kv_heads, *dims, num_requests=requests, max_query_len=length, latent=latent, mask=None if mask == "chain" else "qlen"
        )
        found.append((request, who[OURS], theirs))
    return found


def test_what_goes_to_ours_was_not_slower_anywhere_in_the_results() -> None:
    points = measured()
    assert len(points) > 50
    routed = [(ours, theirs) for request, ours, theirs in points if not left("sglang.fa3", request)]
    assert len(routed) >= 20, "the table says something"
    assert all(ours <= 1.01 * theirs for ours, theirs in routed)


@pytest.mark.parametrize(
    ("kernel", "peer", "latent", "fewest"),
    [("vllm.fa3", "fa3", False, 0), ("vllm.fa3", "fa3", True, 0), ("vllm.flashmla", "flashmla", True, 6)],
)
def test_chains_that_go_to_ours_in_vllm(kernel: str, peer: str, latent: bool, fewest: int) -> None:
    points = [p for p in measured(peer) if p[0].latent == latent and p[0].mask is None]
    assert len(points) >= 16
    routed = [(ours, theirs) for request, ours, theirs in points if not left(kernel, request)]
    assert len(routed) == fewest
    assert all(ours <= 1.01 * theirs for ours, theirs in routed)


@pytest.mark.parametrize(
    ("kernel", "arch", "faster"),
    [
        ("sglang.fa3", "sm90", True),
        ("sglang.fa3", "sm100", True),
        ("sglang.triton", "sm90", False),
        ("vllm.triton_attn", "sm90", False),
        ("vllm.triton_mla", "sm90", False),
        ("vllm.fa3", "sm90", True),
        ("vllm.flashmla", "sm100", True),
    ],
)
def test_which_kernels_and_devices(kernel: str, arch: str, faster: bool) -> None:
    chain = VerifyRequest(16, 1, 576, 512, max_query_len=4, latent=True)
    assert left(kernel, chain, DeviceInfo.known(arch)) == faster


@pytest.mark.parametrize("feature", [{"window": 8}, {"kv_dtype": "fp8_e4m3"}], ids=str)
def test_what_was_not_measured_stays_with_the_engine(feature: dict[str, Any]) -> None:
    tree = {"heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "max_query_len": 8, "mask": "qlen"}
    assert not left("sglang.fa3", VerifyRequest(**tree))
    assert left("sglang.fa3", VerifyRequest(**tree, **feature))
    assert left("sglang.fa3", VerifyRequest(**tree), replace(H200, name="NVIDIA H100 80GB HBM3")), "a GPU without a table"


def chain_of(tokens: int, requests: int = 1, kv_heads: int = 1) -> VerifyRequest:
    return VerifyRequest(8 * kv_heads, kv_heads, 128, 128, max_query_len=tokens, num_requests=requests)


def test_chains_of_one_kv_head_stay_with_fa3_where_a_length_says_so() -> None:
    text = engines.faster("vllm.fa3", "triton_splitkv", chain_of(4), H200, TABLE)
    assert text is not None and "cached took" in text
    assert all(left("vllm.fa3", chain_of(t, requests=n)) for t in (4, 17) for n in (1, 2, 8, 32, 64))


def test_chains_of_several_kv_heads_stay_with_fa3_as_whole_engines_showed() -> None:
    text = engines.faster("vllm.fa3", "triton_splitkv", chain_of(4, kv_heads=8), H200, TABLE)
    assert text is not None and "vllm-steps.jsonl" in text
    assert dispatch.choose(chain_of(4, kv_heads=8), H200, Policy()).winner == "triton_splitkv", "where no engine asks"


def test_dispatch_leaves_it_to_the_engine_unless_a_name_is_given() -> None:
    chain = VerifyRequest(16, 1, 576, 512, max_query_len=4, latent=True)
    decision = dispatch.choose(chain, H200, Policy(engine_kernel="sglang.fa3"), table=TABLE)
    assert decision.winner is None and [r.code for r in decision.reasons] == ["engine_faster"]
    assert "no whole engine" in decision.reasons[0].text
    assert dispatch.choose(chain, H200, Policy()).winner == "triton_splitkv", "where the engine's is wrong, none is named"
    assert dispatch.choose(chain, H200, Policy("torch_dense", engine_kernel="sglang.fa3")).winner == "torch_dense"
