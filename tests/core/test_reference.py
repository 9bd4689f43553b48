"""The specification: a test for each sentence on the op's semantics, with numbers that can be checked by hand.

``slow_attention`` is a second, independent account of the op: one row and one head at a time in float64. What it sees
is spelled out by the test. Hand-made numbers run for every implementation; see mean_case.py for how they come about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from mean_case import DIM, NAN, attend, bits, mean_case, near, rows, tokens, tree_mask

from flashmap.core import PagedKV, SlotKV, TreeMask, verify_attention

INF = float("inf")


def slow_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sees: Sequence[Sequence[int]],
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Sequence[float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, Hq, Dk], k [n, Hkv, Dk], v [n, Hkv, Dv]; row t sees the keys sees[t]. (out [T, Hq, Dv], lse [T, Hq]) in float64."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -INF, dtype=torch.float64)
    for t, keys in enumerate(sees):
        for h in range(q.shape[1]):
            logits = [scale * sum(a * b for a, b in zip(q[t, h].tolist(), k[j, h // group].tolist(), strict=True)) for j in keys]
            if softcap:
                logits = [softcap * math.tanh(x / softcap) for x in logits]
            total = sum(math.exp(x) for x in logits) + (math.exp(sinks[h]) if sinks else 0.0)
            for x, j in zip(logits, keys, strict=True):
                out[t, h] += math.exp(x) / total * v[j, h // group].double()
            lse[t, h] = math.log(total) if total else -INF
    return out, lse


def one_request(rows: int, prefix: int, *, heads: int = 4, kv_heads: int = 2, dk: int = 16, dv: int = 8) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows + prefix)
    return torch.randn(rows, heads, dk), torch.randn(prefix + rows, kv_heads, dk), torch.randn(prefix + rows, kv_heads, dv)


def listed(k: torch.Tensor, v: torch.Tensor | None, **more: Any) -> SlotKV:
    n = k.shape[0]
    return SlotKV(k, v, torch.tensor([0, n]), torch.arange(n), **more)


def call(q: torch.Tensor, kv: PagedKV | SlotKV, **more: Any) -> dict[str, Any]:
    return {"q": q, "kv": kv, "cu_seqlens_q": torch.tensor([0, q.shape[0]]), "max_query_len": q.shape[0], "return_lse": True, **more}


def close(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(found[0].double().cpu(), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].double().cpu(), wanted[1], rtol=1e-5, atol=1e-5)


# -- against the independent account --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reference", "torch_dense"])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("sinks", [None, [0.5, -1.0, 3.0, 0.0]])
def test_causal_chain(name: str, softcap: float, sinks: list[float] | None) -> None:
    q, k, v = one_request(3, 5)
    wanted = slow_attention(q, k, v, [range(6), range(7), range(8)], scale=16**-0.5, softcap=softcap, sinks=sinks)
    arguments = call(q, listed(k, v), softcap=softcap, sinks=None if sinks is None else torch.tensor(sinks))
    close(attend(name, arguments), wanted)


@pytest.mark.parametrize("name", ["reference", "torch_dense"])
def test_tree_with_a_window_and_positions(name: str) -> None:
    q, k, v = one_request(4, 6)
    tree = bits("1000 1100 1010 1011")[0]  # positions 26, 27, 27, 28; the prefix is at 20 to 25; a window of 4
    sees = [[2, 3, 4, 5, 6], [3, 4, 5, 6, 7], [3, 4, 5, 6, 8], [4, 5, 6, 8, 9]]
    wanted = slow_attention(q, k, v, sees, scale=0.3)
    kv = listed(k, v, kv_start=torch.tensor([20]))
    for layout in ("full", "qlen", "packed"):
        mask = tree_mask([tree], layout, [26], noise=1)
        close(attend(name, call(q, kv, mask=mask, window=4, positions=torch.tensor([26, 27, 27, 28]), scale=0.3)), wanted)


@pytest.mark.parametrize("name", ["reference", "torch_dense"])
def test_latent(name: str) -> None:
    """v=None with v_head_dim: V is the first columns of K, and k_scale serves both."""
    q, k, _ = one_request(2, 5, heads=3, kv_heads=1, dk=24)
    wanted = slow_attention(q, k * 0.5, k[..., :16] * 0.5, [range(6), range(7)], scale=24**-0.5)
    close(attend(name, call(q, listed(k, None, v_head_dim=16), k_scale=0.5)), wanted)
    for draft_v in (None, torch.full((2, 1, 16), NAN)):  # the draft tokens' own V equals those columns and is not read
        draft = (k[5:] * 0.5, draft_v)
        close(attend(name, call(q, listed(k[:5], None, v_head_dim=16), k_scale=torch.tensor([0.5]), draft_kv=draft)), wanted)


# -- visibility -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["cache", "slots", "dense"])
@pytest.mark.parametrize("layout", ["paged", "slots"])
def test_a_query_sees_the_prefix_and_the_drafts_up_to_itself(impl: str, device: str, draft: str, layout: str) -> None:
    arguments = mean_case([[2, 4], []], [[6, 8], [3, 5]], draft=draft, layout=layout, device=device)
    assert rows(attend(impl, arguments)) == near([4, 5, 3, 4])


@pytest.mark.parametrize(
    ("layout", "where"),
    [("packed", "in order"), *[(layout, where) for layout in ("full", "qlen") for where in ("in order", "R entries", "R + 1 entries")]],
)
def test_masks(impl: str, device: str, layout: str, where: str) -> None:
    """A row that does not see itself, one that sees a later token, one that sees no draft token."""
    mask = tree_mask(bits("01 10", "000 111 010"), layout, [1, 2], device=device)
    if where != "in order":
        first, second = bits("01 10", "000 111 010")
        if layout == "full":
            first, second = torch.cat((torch.ones(2, 1), first), 1), torch.cat((torch.zeros(3, 2), second), 1)
        data = torch.cat((torch.ones(4), second.flatten(), torch.ones(3), first.flatten())).to(torch.int8) * -1
        start = 4 + second.numel() + 3
        mask = TreeMask(data.to(device), layout, torch.tensor([start, 4, 0][: 2 + (where == "R + 1 entries")], device=device))
    arguments = mean_case([[1], [10, 20]], [[2, 3], [30, 40, 80]], mask=mask, device=device)
    assert rows(attend(impl, arguments)) == near([2, 1.5, 15, 36, 70 / 3])


def test_full_blocks_follow_one_another_by_the_lengths_and_starts(impl: str, device: str) -> None:
    """Rows have kv_start + prefix + L entries: with kv_start 3 and 0, prefix 2 and 1."""
    mask = tree_mask(bits("10 01", "10 01"), "full", [5, 1], noise=1, device=device)
    arguments = mean_case([[1, 2], [4]], [[3, 7], [6, 10]], mask=mask, device=device)
    kv = arguments["kv"]
    arguments["kv"] = SlotKV(kv.k, kv.v, kv.indptr, kv.indices, kv_start=torch.tensor([3, 0], device=device))
    assert rows(attend(impl, arguments)) == near([2, 10 / 3, 5, 7])


def test_qlen_blocks_may_be_flat_more_than_needed_and_wider_than_a_request(impl: str, device: str) -> None:
    data = torch.full((4, 5, 5), 7, dtype=torch.uint8)
    data[0, :2, :2], data[1, :1, :1] = torch.tensor([[0, 1], [1, 0]]), 0
    for form in (data, data.flatten(), data.bool()):
        arguments = mean_case([[1], [10]], [[3, 5], [30]], mask=TreeMask(form.to(device), "qlen"), device=device)
        arguments["max_query_len"] = 5
        assert rows(attend(impl, arguments)) == near([3, 2, 10])


def test_packed_bits_behind_the_request_are_ignored(impl: str, device: str) -> None:
    words = torch.tensor([[0b1111, -1], [0b10, -1]], device=device)
    arguments = mean_case([[1]], [[3, 5]], mask=TreeMask(words, "packed"), device=device)
    assert rows(attend(impl, arguments)) == near([3, 3])


def test_packed_words_beyond_the_first(impl: str, device: str) -> None:
    """Draft token 64 is bit 0 of word 1, 63 the sign bit of word 0."""
    words = torch.zeros(65, 2, dtype=torch.int64)
    words[:, 0] = 1
    words[64] = torch.tensor([-(2**63), 1])
    arguments = mean_case([[]], [[float(i) for i in range(65)]], mask=TreeMask(words.to(device), "packed"), device=device)
    assert rows(attend(impl, arguments)) == near([0] * 64 + [63.5])


# -- positions and windows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "wanted"), [(0, [16, 32]), (1, [12, 24]), (2, [28 / 3, 56 / 3]), (3, [7.5, 15]), (None, [31 / 5, 63 / 6])]
)
def test_a_window_has_w_plus_one_keys(impl: str, device: str, window: int | None, wanted: list[float]) -> None:
    values = ([[1, 2, 4, 8]], [[16, 32]])
    assert rows(attend(impl, mean_case(*values, window=window, device=device))) == near(wanted)


def test_listed_keys_start_at_kv_start(impl: str, device: str) -> None:
    """Query at position 9 by its own account: keys at 5, 6, 7 and itself, window 3: 6, 7 and itself."""
    for dtype in (torch.int32, torch.int64):
        arguments = mean_case([[1, 2, 4]], [[8]], window=3, positions=torch.tensor([9], dtype=dtype, device=device), device=device)
        kv = arguments["kv"]
        arguments["kv"] = SlotKV(kv.k, kv.v, kv.indptr, kv.indices, kv_start=torch.tensor([5], dtype=dtype, device=device))
        assert rows(attend(impl, arguments)) == near([14 / 3])
    del arguments["positions"]  # by default at kv_start + prefix: 8, which sees 5, 6, 7 and itself
    assert rows(attend(impl, arguments)) == near([15 / 4])


def test_a_draft_key_is_at_its_own_querys_position(impl: str, device: str) -> None:
    """Positions 3, 4, 9: with window 5 the last sees the draft token at 4 but not the one at 3, nor the prefix."""
    arguments = mean_case([[1, 2, 3]], [[4, 5, 6]], window=5, positions=torch.tensor([3, 4, 9], device=device), device=device)
    assert rows(attend(impl, arguments)) == near([2.5, 3, 5.5])


# -- sinks, softcap, empty rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.float16])
def test_sinks_are_one_more_logit_in_the_denominator(impl: str, device: str, sink_dtype: torch.dtype) -> None:
    """A sink of log 2 counts as two keys of value 0, and is part of the LSE."""
    sinks = torch.tensor([math.log(2)], dtype=sink_dtype, device=device)
    out, lse = attend(impl, mean_case([[4, 8]], [[12]], sinks=sinks, return_lse=True, device=device))
    assert rows(out) == pytest.approx([24 / 5], rel=1e-3)
    assert lse[0].tolist() == pytest.approx([math.log(5)], rel=1e-3)


def test_a_row_that_sees_only_its_sink(impl: str, device: str) -> None:
    mask = tree_mask(bits("00 10"), "packed", device=device)
    out, lse = attend(impl, mean_case([[]], [[4, 6]], sinks=torch.tensor([0.25], device=device), mask=mask, return_lse=True, device=device))
    assert rows(out)[0] == 0 and lse[0].tolist() == pytest.approx([0.25])
    assert rows(out)[1] == pytest.approx(4 / (1 + math.exp(0.25)))


def test_softcap_is_on_the_scaled_score_before_masking_and_not_on_sinks(impl: str, device: str) -> None:
    """q . k = 32 and scale 1/8 give 4; capped at 2: 2 tanh 2. The masked key stays masked; a sink of 3 stays 3."""
    arguments = mean_case(
        [[]], [[1, 2]], softcap=2.0, scale=0.125, sinks=torch.tensor([3.0], device=device), return_lse=True, device=device
    )
    arguments["q"].fill_(1)
    arguments["kv"].k.fill_(1)
    x = 2 * math.tanh(2)
    out, lse = attend(impl, arguments)
    assert lse[:, 0].tolist() == near([math.log(math.exp(x) + math.exp(3)), math.log(2 * math.exp(x) + math.exp(3))])
    total = 2 * math.exp(x) + math.exp(3)
    assert rows(out) == near([math.exp(x) / (math.exp(x) + math.exp(3)), 3 * math.exp(x) / total])


def test_a_row_with_nothing_to_see(impl: str, device: str) -> None:
    """out 0 and lse -inf, never NaN; also behind a window that hides the whole prefix."""
    mask = tree_mask(bits("00 11"), "packed", device=device)
    for prefix, more in (([], {}), ([5, 5, 5], {"window": 2, "positions": torch.tensor([9, 9], device=device)})):
        out, lse = attend(impl, mean_case([prefix], [[4, 6]], mask=mask, return_lse=True, device=device, **more))
        assert rows(out) == near([0, 5])
        assert lse[:, 0].tolist() == [-INF, pytest.approx(math.log(2))]


def test_the_lse_is_natural_and_fp32(impl: str, device: str) -> None:
    out, lse = attend(impl, mean_case([[1] * 6], [[1, 1]], return_lse=True, dtype=torch.float16, device=device))
    assert lse.dtype == torch.float32 and out.dtype == torch.float16
    assert lse[:, 0].tolist() == near([math.log(7), math.log(8)])


def test_the_default_scale(impl: str, device: str) -> None:
    """Dk ** -0.5: q . k = 32 over two keys, 32 / sqrt(32) apart."""
    arguments = mean_case([[0]], [[1]], return_lse=True, device=device)
    arguments["q"].fill_(1)
    arguments["kv"].k[2].fill_(1)
    weight = 1 / (1 + math.exp(-(32**0.5)))
    assert rows(attend(impl, arguments)[0]) == near([weight])


# -- what is left alone ---------------------------------------------------------------------------------------------------


def test_rows_past_the_last_request_are_left_alone(impl: str, device: str) -> None:
    arguments = mean_case([[1]], [[3]], draft="dense", device=device)
    arguments["q"] = torch.cat((arguments["q"], torch.full((2, 1, DIM), NAN, device=device)))
    arguments["draft_kv"] = tuple(torch.cat((x, torch.full((2, 1, DIM), NAN, device=device))) for x in arguments["draft_kv"])
    arguments["out"] = torch.full((3, 1, DIM), 77.0, device=device)
    assert rows(attend(impl, arguments)) == near([2, 77, 77])


@pytest.mark.parametrize("what", ["max_query_len 0", "no requests", "no rows"])
def test_nothing_to_do_launches_nothing(impl: str, device: str, what: str) -> None:
    from flashmap.core import stats

    prefixes: list[list[float]] = [] if what == "no requests" else [[1], []]
    arguments = mean_case(prefixes, [[] for _ in prefixes], device=device)
    if what != "no rows":
        arguments["q"] = torch.zeros(2, 1, DIM, device=device)
    arguments["max_query_len"] = 0 if what == "max_query_len 0" else 2
    arguments["out"] = torch.full_like(arguments["q"], 77)
    assert attend(impl, arguments) is arguments["out"]
    assert (arguments["out"] == 77).all()
    assert (impl, "run", "") not in stats.snapshot()


def test_every_request_empty(impl: str, device: str) -> None:
    arguments = mean_case([[1], []], [[], []], device=device)
    arguments |= {"q": torch.zeros(2, 1, DIM, device=device), "max_query_len": 2, "out": torch.full((2, 1, DIM), 77.0, device=device)}
    assert rows(attend(impl, arguments)) == [77, 77]


# -- lengths --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", ["paged", "slots"])
def test_kv_len_below_l(impl: str, device: str, layout: str, masked: bool) -> None:
    """Length 1 and L 3: no prefix; draft token 0 is in the cache, 1 and 2 are not; masks may hide it too."""
    mask = tree_mask(bits("111 011 100"), "packed", device=device) if masked else None
    arguments = mean_case([[]], [[5, 6, 7]], layout=layout, mask=mask, return_lse=True, device=device)
    kv = arguments["kv"]
    used = kv.v[kv.block_table[0, 0], 0] if layout == "paged" else kv.v[kv.indices[0]]
    assert (used == 5).all()
    if layout == "paged":
        kv.kv_lens.fill_(1)
        kv.block_table[0, 1:] = -1
    else:
        kv.indptr[1] = 1
        kv.indices[1:] = 2**31 - 1
    kv.v[kv.v > 5] = NAN
    out, lse = attend(impl, arguments)
    assert rows(out) == near([5, 0, 5] if masked else [5, 5, 5])
    assert lse[:, 0].tolist() == ([0, -INF, 0] if masked else [0, 0, 0])


def test_kv_len_past_the_table_is_clamped(impl: str, device: str) -> None:
    """A table of two pages of 2 lists 4 tokens whatever the length says: 2 of prefix, 2 draft tokens."""
    arguments = mean_case([[1, 3]], [[5, 7]], layout="paged", device=device)
    kv = arguments["kv"]
    for length in (4, 5, 1000):
        short = PagedKV(kv.k, kv.v, kv.block_table[:, :2].contiguous(), torch.tensor([length], dtype=torch.int32, device=device))
        assert rows(attend(impl, {**arguments, "kv": short})) == near([3, 4])
    apart = {**arguments, "draft_kv": (torch.zeros(2, 1, DIM, device=device), tokens([9, 11]).to(device)), "kv": short}
    assert rows(attend(impl, apart)) == near([5, 6])


def test_l_above_max_query_len_is_an_error_where_lengths_are_read() -> None:
    arguments = mean_case([[1], [2]], [[3], [5, 6]])
    arguments |= {"max_query_len": 1, "out": torch.full((3, 1, DIM), 77.0)}
    for name in ("reference", "torch_dense"):
        with pytest.raises(ValueError, match="request 1 has 2 query tokens, more than max_query_len 1"):
            verify_attention(**arguments, impl=name)
    assert (arguments["out"] == 77).all()


# -- dtypes, scales, addresses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", [(2.0, 0.5), "fp32", "fp64", "fp16"])
@pytest.mark.parametrize("draft", ["cache", "slots", "dense"])
def test_the_cache_is_dequantised_and_draft_kv_is_not(impl: str, device: str, draft: str, scales: Any) -> None:
    arguments = mean_case([[4, 8]], [[12]], draft=draft, device=device)
    k_scale, v_scale = 2.0, 0.5
    if isinstance(scales, str):
        dtype = {"fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16}[scales]
        shape = (1, 1, 1, 1) if scales == "fp64" else (1,)
        k_scale, v_scale = (torch.full(shape, x, dtype=dtype, device=device) for x in (2.0, 0.5))  # type: ignore[assignment]
    out = attend(impl, {**arguments, "k_scale": k_scale, "v_scale": v_scale})
    assert rows(out) == near([6 if draft == "dense" else 4]) and out.dtype == torch.float32


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_caches(impl: str, dtype: torch.dtype, device: str, fp8: torch.dtype) -> None:
    arguments = mean_case([[4, 8]], [[12, 2]], layout="paged", dtype=dtype, device=device)
    kv = arguments["kv"]
    arguments["kv"] = PagedKV(kv.k.to(fp8), kv.v.to(fp8), kv.block_table, kv.kv_lens)
    assert rows(attend(impl, {**arguments, "v_scale": 0.25})) == near([2, 26 / 16], dtype)


@pytest.mark.parametrize("layout", ["paged", "slots"])
def test_addresses_are_64_bit(impl: str, device: str, layout: str) -> None:
    """A pool of more than 2^31 elements, of which three tokens at the far end are listed (and the rest never touched)."""
    pages, size, dim = 2**31 // (16 * 32) + 2, 16, 32
    pool = torch.empty(pages, size, 1, dim, dtype=torch.uint8, device=device).view(torch.float8_e5m2)
    assert pool.numel() > 2**31
    raw = pool.view(torch.uint8)
    far = torch.tensor([pages - 1], device=device)
    raw[far, :3] = torch.tensor([1.0, 2.0, 6.0]).to(torch.float8_e5m2).view(torch.uint8).view(1, 3, 1, 1).to(device)
    cu = torch.tensor([0, 1], dtype=torch.int32, device=device)
    kv: PagedKV | SlotKV = PagedKV(pool, pool, far.int().view(1, 1), torch.tensor([3], dtype=torch.int32, device=device))
    if layout == "slots":
        slots = (far * size + torch.arange(3, device=device)).int()
        kv = SlotKV(pool.view(-1, 1, dim), pool.view(-1, 1, dim), torch.tensor([0, 3], device=device), slots)
    q = torch.zeros(1, 1, dim, dtype=torch.float16, device=device)
    assert rows(attend(impl, {"q": q, "kv": kv, "cu_seqlens_q": cu, "max_query_len": 1})) == near([3], torch.float16)


@pytest.mark.parametrize("poison", ["out", "q", "k", "v"])
def test_strides_are_free(impl: str, device: str, poison: str) -> None:
    """Views of wider buffers: what lies between the rows is neither read nor written."""

    def wide(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.full((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 3), NAN, device=device)
        buffer[..., :-1, :-3] = x
        return buffer[..., :-1, :-3]

    arguments = mean_case([[2, 4]], [[6, 8]], layout="paged", device=device)
    kv = arguments["kv"]
    arguments["out"] = torch.zeros(2, 1, DIM, device=device)
    if poison in ("q", "out"):
        arguments[poison] = wide(arguments[poison])
    else:
        k, v = (wide(x) if poison == name else x for name, x in (("k", kv.k), ("v", kv.v)))
        arguments["kv"] = PagedKV(k, v, kv.block_table, kv.kv_lens)
    assert rows(attend(impl, arguments)) == near([4, 5])
    if poison == "out":
        base = arguments["out"]._base
        assert base is not None and base[:, -1].isnan().all() and base[..., -3:].isnan().all()
