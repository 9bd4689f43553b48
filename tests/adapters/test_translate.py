"""The vLLM adapter's translation, without vLLM."""

from types import SimpleNamespace

import pytest
import torch

from flashmap.adapters.vllm import translate
from flashmap.core import verify_attention


def dense(**changes):
    fields = dict(
        num_heads=4, num_kv_heads=2, head_size=8, scale=0.5, alibi_slopes=None, sliding_window=-1, logits_soft_cap=0, attn_type="decoder",
        kv_cache_dtype="auto", sinks=None,
    )  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def metadata(**changes):
    fields = dict(
        max_query_len=3, causal=True, seq_lens=torch.tensor([5, 9], dtype=torch.int32), max_seq_len=9,
        block_table=torch.tensor([[3, 1, -1], [0, 2, 4]], dtype=torch.int32),
    )  # fmt: skip
    return SimpleNamespace(**(fields | changes))


Q = torch.zeros(6, 4, 8)
CACHE = torch.zeros(5, 2, 4, 16)


@pytest.mark.parametrize(
    "code, impl, meta, scale",
    [
        (None, {}, {}, None),
        (None, {"sliding_window": 5, "logits_soft_cap": 3.0, "sinks": torch.zeros(4)}, {}, None),
        ("attn_type", {"attn_type": "encoder_only"}, {}, None),
        ("chunked", {"chunk_lookback": 2}, {}, None),
        (None, {"chunk_lookback": -1}, {}, None),
        ("non_causal", {}, {"causal": False}, None),
        ("non_causal", {}, {"causal": torch.tensor([True])}, None),
        ("non_causal", {}, {"dynamic_causal": torch.tensor([True])}, None),
        ("alibi", {"alibi_slopes": torch.ones(4)}, {}, None),
        ("dcp", {"dcp_world_size": 2}, {}, None),
        ("output_scale", {}, {}, torch.ones(1)),
        ("kv_dtype", {"kv_cache_dtype": "fp8_e5m2"}, {}, None),
    ],
)
def test_why_a_dense_call_is_left(code, impl, meta, scale):
    assert translate.dense_reason(dense(**impl), Q, CACHE, metadata(**meta), Q, scale) == code


@pytest.mark.parametrize(
    "code, length, lengths",
    [
        ("decode", 1, None), (None, 2, None), (None, 64, None), ("prefill", 65, None), ("prefill", 2, ()), (None, 4, (4,)), ("prefill", 5, (4,)),
        (None, 5, (4, 5)), ("prefill", 6, (4, 5)),
    ],
)  # fmt: skip
def test_lengths_that_are_left(code, length, lengths):
    assert translate.length_reason(length, lengths) == code


@pytest.mark.parametrize(
    "lengths, config",
    [
        ((), None), ((), {"num_speculative_tokens": None}), ((4,), {"num_speculative_tokens": 3, "method": "mtp"}), ((64,), {"num_speculative_tokens": 63}),
        ((4, 5), {"num_speculative_tokens": 3, "method": "draft_model"}), ((4, 7), {"num_speculative_tokens": 3, "parallel_drafting": True}),
        ((), {"num_speculative_tokens": 64}),
    ],
)  # fmt: skip
def test_the_lengths_of_verify_batches(lengths, config):
    assert translate.lengths(config and SimpleNamespace(**config)) == lengths


def test_a_batch_is_shown_with_one_of_few_bounds():
    assert [translate.bound(n, (4, 7)) for n in range(1, 9)] == [4, 4, 4, 4, 7, 7, 7, None]
    assert [translate.bound(n, None) for n in (3, 64, 65)] == [3, 64, None]


@pytest.mark.parametrize(
    "widths, part",
    [
        ([4, 1, 3, 90, 2], (3, 8, 4, 100)), ([90, 4], None), ([1, 1, 90], None), ([4, 4], None), ([4, 0, 90], (2, 4, 4, 94)), ([2, 5], (1, 2, 2, 7)),
    ],
)  # fmt: skip
def test_the_verify_requests_of_a_mixed_batch(widths, part):
    starts = torch.tensor([0, *widths]).cumsum(0)
    assert translate.Part.of(starts, (4,)) == (part and translate.Part(*part))


def test_metadata_that_is_not_known_is_left():
    from dataclasses import make_dataclass

    known = make_dataclass(
        "Metadata", ["max_query_len", "causal", ("mm_ranges", object, None), ("use_it", bool, False), ("seq_threshold_3D", int, 9)]
    )
    assert translate.dense_reason(dense(), Q, CACHE, known(3, True), Q, None) is None
    assert translate.dense_reason(dense(), Q, CACHE, known(3, True, mm_ranges={0: [1]}), Q, None) == "argument"
    assert translate.dense_reason(dense(), Q, CACHE, known(3, True, use_it=True), Q, None) == "argument"


def test_dtypes_that_are_left():
    half, fp8, e5m2, raw = torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8
    for code, dtypes in (
        (None, (half, half, half, "auto")), (None, (half, half, raw, "fp8")), (None, (fp8, half, fp8, "fp8_e4m3")), (None, (half, half, half, "float16")),
        ("query_dtype", (fp8, half, half, "auto")), ("query_dtype", (fp8, fp8, fp8, "fp8")), ("query_dtype", (half, torch.float32, half, "auto")),
        ("kv_dtype", (half, half, torch.bfloat16, "bfloat16")), ("kv_dtype", (half, half, e5m2, "fp8_e5m2")), ("kv_dtype", (half, half, raw, "fp8_per_token_head")),
        ("kv_dtype", (half, half, half, "int8_per_token_head")),
    ):  # fmt: skip
        assert translate.dtype_reason(*dtypes) == code, dtypes


def test_a_quantised_query_is_multiplied_out():
    q = torch.linspace(-4, 4, 12).view(3, 4).to(torch.float8_e4m3fn)
    torch.testing.assert_close(translate.plain_query(q, torch.float32, torch.tensor(0.25)), q.float() / 4)
    assert translate.plain_query(Q, torch.float32, torch.tensor(0.25)) is Q


@pytest.mark.parametrize("size, distance", [(None, None), (-1, None), (1, 0), (4096, 4095), ((-1, -1), None), ((127, 0), 127)])
def test_window(size, distance):
    assert translate.window(dense(sliding_window=size)) == distance


def test_the_request_of_a_dense_call_is_what_the_op_sees():
    impl, meta = dense(sliding_window=4, logits_soft_cap=2.0, sinks=torch.zeros(4)), metadata()
    assert translate.window(impl, metadata(sliding_window=(-1, -1))) is None, "the metadata's is the one that the kernel takes"
    request = translate.dense_request(
        impl, Q.dtype, num_requests=2, max_query_len=3, page_size=4, max_kv_len=12, window=translate.window(impl, meta)
    )
    assert (request.heads, request.kv_heads, request.head_dim, request.num_requests, request.max_query_len) == (4, 2, 8, 2, 3)
    assert (request.page_size, request.max_kv_len, request.window, request.draft) == (4, 12, 3, "cache")
    assert set(request.features()) == {"window", "sinks", "softcap"}


def stored(order):
    """A writer of pages with K and V at ``order`` (a permutation of a page's elements), like an engine's."""

    def write(key, value, pages, slots):
        rows, heads, columns = key.shape
        content = torch.zeros(2, heads, rows, columns, dtype=key.dtype)
        content[0, :, slots], content[1, :, slots] = key.transpose(0, 1), value.transpose(0, 1)
        pages.view(-1)[order] = content.reshape(-1)

    return write


def orders():
    heads, rows, columns = 2, 4, 8
    number = torch.arange(2 * heads * rows * columns)
    per_head = number.view(heads, 2, rows, columns).transpose(0, 1)  # each head: its K, then its V
    transposed = per_head.clone()
    transposed[0] = number.view(heads, 2, columns, rows).transpose(0, 1)[0].transpose(-1, -2)  # K with tokens side by side
    return {
        "plain": number,
        "per head": per_head.reshape(-1),
        "K transposed": transposed.reshape(-1),
        "packed": torch.randperm(number.numel()),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", orders())
def test_a_page_layout_is_measured(name, dtype):
    write = stored(orders()[name] if name != "packed" else torch.randperm(128, generator=torch.Generator().manual_seed(0)))
    layout = translate.PageLayout.measure(torch.zeros(1, 2, 4, 16, dtype=dtype), write)
    assert layout is not None
    key, value = torch.randn(2, 4, 2, 8).to(dtype)
    page = torch.zeros(1, 128, dtype=dtype)
    write(key, value, page, torch.arange(4))
    for got, want in ((layout.keys(page), key), (layout.values(page), value)):
        assert torch.equal(got[0], want) and got.stride(-1) == 1


def test_a_large_page_is_measured_exactly_in_bf16():
    order = torch.randperm(2 * 4 * 128 * 128, generator=torch.Generator().manual_seed(1))
    layout = translate.PageLayout.measure(torch.zeros(1, 4, 128, 256, dtype=torch.bfloat16), stored(order))
    assert layout is not None and torch.equal(layout.k.index.reshape(-1), order[: order.numel() // 2])


def test_a_writer_that_loses_something_has_no_layout():
    def write(key, value, pages, slots):
        pages.fill_(1)

    assert translate.PageLayout.measure(torch.zeros(1, 2, 4, 16), write) is None


def test_the_pages_of_a_batch_are_gathered_and_stale_entries_followed_nowhere():
    write = stored(orders()["K transposed"])
    layout = translate.PageLayout.measure(torch.zeros(1, 2, 4, 16), write)
    cache = torch.full((5, 2, 4, 16), float("nan"))
    k, v = torch.randn(5, 4, 2, 8), torch.randn(5, 4, 2, 8)
    for page in range(5):
        write(k[page], v[page], cache[page : page + 1], torch.arange(4))
    meta = metadata()
    kv = translate.gathered_kv(cache, layout, meta.block_table, meta.seq_lens, meta.max_seq_len)
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    q = torch.randn(5, 4, 8)
    got = verify_attention(q, kv, cu_seqlens_q=starts, max_query_len=3, impl="reference")
    from flashmap.core import PagedKV

    want = verify_attention(q, PagedKV(k, v, meta.block_table, meta.seq_lens), cu_seqlens_q=starts, max_query_len=3, impl="reference")
    assert torch.equal(got, want)


LATENT = SimpleNamespace(num_heads=2, kv_lora_rank=6, qk_rope_head_dim=2, scale=0.3, kv_cache_dtype="auto", dcp_world_size=1)


def latent_metadata(**changes):
    decode = SimpleNamespace(
        block_table=torch.tensor([[2, 0], [1, -1]], dtype=torch.int32), seq_lens=torch.tensor([6, 3], dtype=torch.int32)
    )
    fields = dict(
        max_query_len=3,
        num_decodes=2,
        num_decode_tokens=5,
        causal=True,
        decode=decode,
        query_start_loc=torch.tensor([0, 3, 5, 90]),
        prefill=None,
    )
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize(
    "code, impl, changes",
    [
        (None, {}, {}),
        ("non_causal", {}, {"causal": False}),
        ("dcp", {"dcp_world_size": 2}, {}),
        ("lse", {"need_to_return_lse_for_decode": True}, {}),
    ],
)
def test_why_a_latent_call_is_left(code, impl, changes):
    impl = SimpleNamespace(**(vars(LATENT) | impl))
    assert translate.latent_reason(impl, torch.float32, torch.float32, torch.zeros(3, 4, 8), latent_metadata(**changes)) == code
    before = latent_metadata()
    del before.causal  # vLLM 0.26
    assert translate.latent_reason(LATENT, torch.float32, torch.float32, torch.zeros(3, 4, 8), before) is None


def test_the_bound_of_the_requests_that_are_decoded():
    assert translate.latent_bound(latent_metadata(max_query_len=90), 4) == 4
    assert translate.latent_bound(latent_metadata(max_query_len=3), 512) == 3
    mixed = latent_metadata(max_query_len=90)
    mixed.decode.max_query_len = 3  # FLASH_ATTN_MLA
    assert translate.latent_bound(mixed, 512) == 3


def test_row_by_row_is_the_same_batch_with_one_token_a_request():
    meta = latent_metadata()
    cache, q = torch.randn(3, 4, 8), torch.randn(5, 2, 8)
    starts = meta.query_start_loc[:3]
    want = verify_attention(q, translate.latent_kv(LATENT, cache, meta.decode), cu_seqlens_q=starts, max_query_len=3, impl="reference")
    table, lens = translate.row_by_row(meta, 5)
    assert lens.tolist() == [4, 5, 6, 2, 3] and lens.dtype == torch.int32
    assert translate.row_by_row(meta, 8)[1].tolist() == [4, 5, 6, 2, 3, 0, 0, 0], "a graph's filling"
    single = SimpleNamespace(block_table=table, seq_lens=lens)
    kv = translate.latent_kv(LATENT, cache, single)
    got = verify_attention(q, kv, cu_seqlens_q=torch.arange(6), max_query_len=1, impl="reference")
    torch.testing.assert_close(got, want)
