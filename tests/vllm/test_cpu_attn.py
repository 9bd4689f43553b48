"""Our CPU_ATTN against vLLM's own, class against class on random batches: no engine, so every feature is cheap to cover."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends import cpu_attn as engine

from flashmap.adapters import observe
from flashmap.adapters.vllm import cpu_attn as ours
from flashmap.core import stats

BLOCK = 32
RAGGED = [(3, 3), (1, 40), (4, 100), (2, 2), (7, 64)]  # (query tokens, all tokens) of each request


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(engine, "get_current_vllm_config", lambda: SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16)))
    monkeypatch.setenv("FLASHMAP_IMPL", "torch_dense")
    for name in ("FLASHMAP_CHECK", "FLASHMAP_STRICT", "FLASHMAP_STATS_DIR"):
        monkeypatch.delenv(name, raising=False)
    stats.reset()
    observe.reset()


def batch(dtype, *, heads=8, kv_heads=2, dim=64, requests=RAGGED, causal=True, seed=0, **impl):
    """Both implementations and the arguments of one call, K and V written to the cache by vLLM."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw).to(dtype)

    arguments = {"alibi_slopes": None, "sliding_window": None, "logits_soft_cap": None, "kv_cache_dtype": "auto", **impl}
    made = [
        cls(heads, dim, 1.5 * dim**-0.5, kv_heads, **arguments) for cls in (engine.CPUAttentionBackendImpl, ours.FlashMapCPUAttentionImpl)
    ]
    layer = SimpleNamespace(isa=engine._get_attn_isa(dtype, BLOCK, dim), layer_name="layer", _k_scale_float=1.0, _v_scale_float=1.0)

    lens = [n for _, n in requests]
    width = -(-max(lens) // BLOCK) + 1
    blocks = 1 + sum(-(-n // BLOCK) for n in lens)
    cache = torch.full((blocks, kv_heads, BLOCK, 2 * dim), 7.0, dtype=dtype)
    free = (1 + torch.randperm(blocks - 1, generator=draw)).tolist()
    table = torch.zeros(len(lens), width, dtype=torch.int32)
    for r, n in enumerate(lens):
        for i in range(-(-n // BLOCK)):
            table[r, i] = free.pop()
        position = torch.arange(n)
        slots = table[r].long()[position // BLOCK] * BLOCK + position % BLOCK
        made[0].do_kv_cache_update(layer, normal(n, kv_heads, dim), normal(n, kv_heads, dim), cache, slots)

    starts = torch.tensor([0, *(q for q, _ in requests)]).cumsum(0).int()
    window = arguments["sliding_window"]
    metadata = engine.CPUAttentionMetadata(
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(q for q, _ in requests),
        query_start_loc=starts,
        max_seq_len=max(lens),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        causal=causal,
        scheduler_metadata=ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lens), num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, seq_lens=torch.tensor(lens, dtype=torch.int32),
            dtype=dtype, query_start_loc=starts, causal=causal, sliding_window_size=-1 if window is None else window, isa=layer.isa,
            enable_kv_split=True,
        ),
    )  # fmt: skip
    rows = int(starts[-1]) + 3  # vLLM pads
    return made, (layer, normal(rows, heads, dim), None, None, cache, metadata)


def both(made, call, **more):
    _, query, *_ = call
    results = []
    for impl in made:
        out = torch.full_like(query, 9.0)
        assert impl.forward(*call, out, **more) is out
        results.append(out)
    return results


def counted():
    return {(outcome, code): n for (_, outcome, code), n in stats.snapshot().items() if outcome in ("routed", "left")}


TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", [32, 64, 80, 128])
@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 2), (4, 1)])
def test_agrees_with_vllm(dtype, dim, heads, kv_heads):
    made, call = batch(dtype, dim=dim, heads=heads, kv_heads=kv_heads)
    want, got = both(made, call)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[dtype])
    assert counted() == {("routed", ""): 1}


@pytest.mark.parametrize(
    "features",
    [
        {"sliding_window": 1},
        {"sliding_window": 4},
        {"sliding_window": 33},
        {"logits_soft_cap": 2.0},
        {"sinks": torch.linspace(-2, 3, 8)},
        {"sinks": torch.linspace(-2, 3, 8).bfloat16()},
        {"sliding_window": 16, "logits_soft_cap": 1.0, "sinks": torch.linspace(-1, 2, 8)},
    ],
    ids=lambda f: "-".join(f"{k}={v}" if not isinstance(v, torch.Tensor) else f"{k}-{v.dtype}" for k, v in f.items()),
)
def test_features_mean_what_they_mean_in_vllm(features):
    made, call = batch(torch.float32, **features)
    want, got = both(made, call)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert counted() == {("routed", ""): 1}
    plain, call = batch(torch.float32)
    assert not torch.allclose(both(plain, call)[0], want, atol=1e-2), "the feature changes nothing here: the test shows nothing"


@pytest.mark.parametrize(
    "code, arguments, more",
    [
        ("decode", {"requests": [(1, 5), (1, 40)]}, {}),
        ("prefill", {"requests": [(65, 70), (1, 40)]}, {}),
        ("alibi", {"alibi_slopes": [0.1] * 8}, {}),
        ("non_causal", {"causal": False}, {}),
    ],
)
def test_what_is_left_to_vllm(code, arguments, more):
    made, call = batch(torch.float32, **arguments)
    want, got = both(made, call, **more)
    assert torch.equal(got, want)
    assert counted() == {("left", code): 1}


def test_profiling_has_no_metadata():
    made, call = batch(torch.float32)
    both(made, (*call[:5], None))
    assert counted() == {("left", "metadata"): 1}


def test_fused_quantisation_stays_vllms_and_so_does_its_error():
    made, call = batch(torch.float32)
    with pytest.raises(NotImplementedError, match="quantization"):
        made[1].forward(*call, torch.empty_like(call[1]), output_scale=torch.ones(1))
    assert counted() == {("left", "output_scale"): 1}


def test_without_a_choice_a_cpu_keeps_vllms_kernel(monkeypatch):
    monkeypatch.delenv("FLASHMAP_IMPL")
    made, call = batch(torch.float32)
    want, got = both(made, call)
    assert torch.equal(got, want)
    assert counted() == {("left", "engine_faster"): 1}


def test_check_records_the_difference_and_leaves_the_answer(monkeypatch):
    monkeypatch.setenv("FLASHMAP_CHECK", "1")
    made, call = batch(torch.bfloat16)
    want, got = both(made, call)
    found = observe.here().layers["layer"]
    assert found.calls == 1 and found.steps == [found.largest]
    rows = call[5].num_actual_tokens
    assert found.largest == float((got[:rows].float() - want[:rows].float()).abs().max())
    assert found.largest <= TOLERANCE[torch.bfloat16]
    assert found.scale > 0.5


def test_rows_past_the_batch_are_left_alone():
    made, call = batch(torch.float32)
    _, got = both(made, call)
    assert (got[call[5].num_actual_tokens :] == 9.0).all()


def test_a_layout_that_cannot_be_made_out_is_left_to_vllm(monkeypatch):
    monkeypatch.setattr(ours, "_layouts", {})
    monkeypatch.setattr(ours.translate.PageLayout, "measure", classmethod(lambda cls, page, write: None))
    made, call = batch(torch.float32)
    want, got = both(made, call)
    assert torch.equal(got, want)
    assert counted() == {("left", "kv_layout"): 1}
