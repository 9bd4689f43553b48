"""Our TRITON_ATTN, FLASH_ATTN, TRITON_MLA, FLASH_ATTN_MLA and FLASHMLA, on a CPU: each case through vLLM's builder and our ``forward``."""

import pytest

pytest.importorskip("vllm")

import torch
from rig import DENSE, ENGINE, LATENT, Rig, patch
from vllm.v1.attention.backend import AttentionCGSupport

from flashmap.adapters import observe, serving
from flashmap.adapters.vllm import gate, serve, translate
from flashmap.core import Declined, stats
from flashmap.core.interface import Reason

CLOSE = {"rtol": 0, "atol": 2e-5}
IMPLS = ["torch_dense", "triton_splitkv"]
UNIFORM = [(4, 40), (4, 100), (4, 17)]
RAGGED = [(4, 40), (1, 100), (3, 3), (2, 64)]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    patch(monkeypatch)
    for name in ("FLASHMAP_CHECK", "FLASHMAP_STRICT", "FLASHMAP_STATS_DIR", "FLASHMAP_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLASHMAP_IMPL", "torch_dense")
    gate.forget()
    serve.SERVING.forget()
    stats.reset()
    observe.reset()
    yield
    gate.forget()
    serve.SERVING.forget()


def counts():
    return {(name, outcome, code): n for (name, outcome, code), n in stats.snapshot().items() if outcome in ("routed", "left")}


def left(code, times=1):
    return {("vllm", "left", code): times}


def check(rig, impl, *, extra=0, **close):
    q, metadata = rig.query(extra), rig.build()
    stats.reset()
    out, want = rig.forward(q, metadata), rig.reference(q)
    torch.testing.assert_close(out[: len(want)].float(), want, **(close or CLOSE))
    if not rig.mla:
        assert (out[len(want) :] == 9.0).all(), "rows past the batch are left alone"
    assert counts() == {(impl, "routed", ""): 1} and ENGINE == []


# -- what goes to the op --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "requests", [UNIFORM, RAGGED, [(4, 40), (4, 64), (0, 0), (0, 0)], [(4, 4)]], ids=["uniform", "ragged", "padded", "whole"]
)
@pytest.mark.parametrize("name", DENSE + LATENT)
def test_verify_batches(monkeypatch, name, requests, impl):
    if name == "FLASHMLA" and requests is RAGGED:  # its builder gives them to prefill, see below
        requests = UNIFORM[:1]
    monkeypatch.setenv("FLASHMAP_IMPL", impl)
    check(Rig(name, requests), impl, extra=3)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("hnd", [False, True], ids=["nhd", "hnd"])
@pytest.mark.parametrize(
    "page, heads, kv_heads", [(16, 8, 2), (48, 8, 8), (528, 4, 1)]
)  # hybrid models have pages that are no power of two
@pytest.mark.parametrize("name", DENSE)
def test_layouts_of_the_cache(monkeypatch, name, page, heads, kv_heads, hnd, impl):
    monkeypatch.setenv("FLASHMAP_IMPL", impl)
    rig = Rig(name, RAGGED, page=page, heads=heads, kv_heads=kv_heads, hnd=hnd, dtype=torch.float16)
    check(rig, impl, rtol=0, atol=4e-3)
    kv = rig.impl.flashmap_kv(rig.layer, rig.cache, rig.build(), len(RAGGED))
    assert kv.k.untyped_storage().data_ptr() == rig.cache.untyped_storage().data_ptr(), "no copy"


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("name", LATENT)
def test_pages_of_latent_caches(monkeypatch, name, page):
    monkeypatch.setenv("FLASHMAP_IMPL", "triton_splitkv")
    check(Rig(name, UNIFORM, page=page, dtype=torch.float16), "triton_splitkv", rtol=0, atol=4e-3)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "features",
    [
        {"window": 5},
        {"softcap": 2.0},
        {"sinks": torch.linspace(-2, 3, 8)},
        {"window": 33, "softcap": 1.0, "sinks": torch.linspace(-1, 2, 8)},
    ],
    ids=lambda f: "-".join(f),
)
@pytest.mark.parametrize("name", DENSE)
def test_features(monkeypatch, name, features, impl):
    monkeypatch.setenv("FLASHMAP_IMPL", impl)
    check(Rig(name, RAGGED, **features), impl)


@pytest.mark.parametrize("quantised", [False, True], ids=["query", "fp8 query"])
@pytest.mark.parametrize("name", [*DENSE, "TRITON_MLA"])  # FLASHMLA's metadata of an fp8 cache comes from its CUDA extension
def test_fp8_caches(name, quantised):
    check(Rig(name, UNIFORM, fp8=True, quantised=quantised), "torch_dense", rtol=0, atol=1e-4)


@pytest.mark.parametrize("length", [2, 17, 64])
@pytest.mark.parametrize("name", DENSE + LATENT)
def test_long_chains(name, length):
    check(Rig(name, [(length, 100), (length, 70)], drafts=length - 1), "torch_dense")


def test_a_draft_models_first_pass_has_one_token_more():
    check(Rig("TRITON_ATTN", [(5, 40), (5, 30)], method="draft_model"), "torch_dense")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", DENSE)
def test_of_a_mixed_batch_the_verify_requests_go_to_the_op(monkeypatch, name, impl):
    monkeypatch.setenv("FLASHMAP_IMPL", impl)
    rig = Rig(name, [*RAGGED, (90, 120), (2, 9), (70, 70)])
    q, metadata = rig.query(2), rig.build()
    stats.reset()
    out, want = rig.forward(q, metadata), rig.reference(q)
    torch.testing.assert_close(out[: len(want)], want, **CLOSE)
    assert counts() == {(impl, "routed", ""): 1} and ENGINE == ["dense"]
    assert rig.builder.reorder_batch_threshold == 4, "so that vLLM puts the verify requests first"
    (call,) = serve.SERVING._accepted
    assert (call.num_requests, call.max_query_len) == (4, 4)


@pytest.mark.parametrize("name", ["TRITON_MLA", "FLASH_ATTN_MLA"])
def test_of_a_mixed_latent_batch_vllm_hands_over_the_verify_requests(name):
    rig = Rig(name, [*RAGGED, (600, 700)])
    q, metadata = rig.query(), rig.build()
    assert metadata.num_decodes == 4 and metadata.max_query_len == 600
    stats.reset()
    torch.testing.assert_close(rig.forward(q, metadata), rig.reference(q)[:10], **CLOSE)
    assert counts() == {("torch_dense", "routed", ""): 1}


# -- what stays the engine's ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, requests, options",
    [
        ("decode", [(1, 5), (1, 40)], {}),
        ("prefill", [(9, 40), (4, 20)], {}),
        ("prefill", [(4, 40)], {"drafts": 0}),
        ("prefill", [*RAGGED, (90, 120)], {"enable_adaptive_verification": True}),
        ("prefill", [(1, 40), (90, 120)], {}),
    ],
)
@pytest.mark.parametrize("name", DENSE)
def test_left_by_lengths(name, code, requests, options):
    rig = Rig(name, requests, **options)
    q, metadata = rig.query(), rig.build()
    stats.reset()
    torch.testing.assert_close(rig.forward(q, metadata), rig.reference(q), **CLOSE)
    assert counts() == left(code) and ENGINE == ["dense"]


@pytest.mark.parametrize(
    "code, change",
    [
        ("non_causal", lambda rig, m: setattr(m, "causal", False)),
        ("non_causal", lambda rig, m: setattr(m, "causal", torch.tensor([True] * 3))),
        ("argument", lambda rig, m: setattr(m, "rswa_prefix_lens", torch.tensor([1] * 3))),
        ("dcp", lambda rig, m: setattr(rig.impl, "dcp_world_size", 2)),
        ("chunked", lambda rig, m: setattr(rig.impl, "chunk_lookback", 1)),
        ("alibi", lambda rig, m: setattr(rig.impl, "alibi_slopes", torch.ones(8))),
        ("batch_invariant", lambda rig, m: setattr(rig.impl, "flashmap_invariant", True)),
        ("contract", lambda rig, m: setattr(rig.impl, "flashmap_missing", ("scale",))),
        ("kv_dtype", lambda rig, m: setattr(rig, "cache", rig.cache.half())),
        ("input", lambda rig, m: setattr(m, "query_start_loc", m.query_start_loc.float())),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("name", DENSE)
def test_left_by_what_the_layer_and_the_batch_are(monkeypatch, name, code, change):
    rig = Rig(name, UNIFORM)
    metadata = rig.build()
    change(rig, metadata)
    monkeypatch.setattr(rig.backend.get_impl_cls().__mro__[2], "forward", lambda self, *a: a[6])
    stats.reset()
    rig.forward(rig.query(), metadata)
    assert counts() == left(code)


@pytest.mark.parametrize("name", DENSE)
def test_profiling_has_no_metadata(name):
    rig = Rig(name, UNIFORM)
    stats.reset()
    assert (rig.forward(rig.query(), None) == 0).all() and counts() == left("metadata")


@pytest.mark.parametrize(
    "code, requests, change",
    [
        ("decode", [(1, 5), (1, 40)], lambda rig, m: None),
        ("dcp", UNIFORM, lambda rig, m: setattr(rig.impl, "dcp_world_size", 2)),
        ("lse", UNIFORM, lambda rig, m: setattr(rig.impl, "need_to_return_lse_for_decode", True)),
        ("non_causal", UNIFORM, lambda rig, m: setattr(m, "causal", False)),
        ("batch_invariant", UNIFORM, lambda rig, m: setattr(rig.impl, "flashmap_invariant", True)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("name", LATENT)
def test_latent_batches_that_are_left(monkeypatch, name, code, requests, change):
    rig = Rig(name, requests)
    metadata = rig.build()
    change(rig, metadata)
    theirs = []
    monkeypatch.setattr(rig.backend.get_impl_cls().__mro__[2], "forward_mqa", lambda self, q, *a: theirs.append(len(q[0])) or (q[0], None))
    stats.reset()
    rig.forward(rig.query(), metadata)
    assert counts() == left(code) and sum(theirs) == sum(q for q, _ in requests)


@pytest.mark.parametrize("name", LATENT)
def test_vllms_latent_kernels_give_the_same(monkeypatch, name):
    """Also TRITON_MLA's, made for one token a request and with scratch for a few, once decode takes any lengths."""
    rig = Rig(name, UNIFORM if name == "FLASHMLA" else RAGGED, seqs=4)
    q, metadata = rig.query(), rig.build()
    rig.impl.flashmap_invariant = True
    torch.testing.assert_close(rig.forward(q, metadata), rig.reference(q), **CLOSE)
    assert len(ENGINE) == (3 if name == "TRITON_MLA" else 1)


def test_flashmla_keeps_ragged_batches():
    """Its kernel takes one length, so its builder gives the others to prefill: as without us."""
    metadata = Rig("FLASHMLA", RAGGED).build()
    assert (metadata.num_decodes, metadata.num_prefills) == (1, 3)


@pytest.mark.parametrize("name", DENSE + LATENT)
def test_without_a_choice_a_cpu_keeps_vllms_kernels(monkeypatch, name):
    monkeypatch.delenv("FLASHMAP_IMPL")
    rig = Rig(name, UNIFORM)
    q, metadata = rig.query(), rig.build()
    stats.reset()
    if name == "TRITON_MLA":
        want = type(rig.builder).__mro__[3].query_len_support
        assert rig.builder.query_len_support is want, "vLLM's builder is as without us"
    torch.testing.assert_close(rig.forward(q, metadata), rig.reference(q), **CLOSE)
    assert counts() == left("engine_faster") and ENGINE


# -- graphs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DENSE + LATENT)
def test_what_builders_declare(monkeypatch, name):
    rig = Rig(name, UNIFORM)
    support = rig.builder_cls.get_cudagraph_support
    assert support(rig.config, rig.spec) is AttentionCGSupport.UNIFORM_BATCH
    assert rig.builder_cls.get_varlen_cudagraph_max_query_len(rig.config, rig.spec) == 4
    theirs = rig.builder_cls.__mro__[2] if name not in ("TRITON_MLA", *DENSE) else rig.builder_cls.__mro__[3]
    for speculative, impl in ((None, "torch_dense"), (rig.config.speculative_config, None)):
        rig.config.speculative_config = speculative
        monkeypatch.delenv("FLASHMAP_IMPL") if impl is None else monkeypatch.setenv("FLASHMAP_IMPL", impl)
        assert support(rig.config, rig.spec) is theirs.get_cudagraph_support(rig.config, rig.spec), "where nothing is ours"
        assert rig.builder_cls.get_varlen_cudagraph_max_query_len(rig.config, rig.spec) is None


def test_triton_mla_verifies_as_decode():
    rig = Rig("TRITON_MLA", RAGGED)
    assert rig.builder.query_len_support.name == "VARLEN" and rig.builder.reorder_batch_threshold == 4
    metadata = rig.build()
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (4, 10, 0)


@pytest.mark.parametrize("name", DENSE + LATENT)
def test_all_that_a_capture_needs_is_made_by_the_builder(monkeypatch, name):
    made = []
    monkeypatch.setattr(serving, "prepare", lambda request, limits, **more: made.append((request, limits)))
    monkeypatch.setenv("FLASHMAP_IMPL", "triton_splitkv")
    rig = Rig(name, UNIFORM, model_len=512, seqs=8)
    ((request, limits),) = made
    assert (limits.max_requests, limits.max_query_len, limits.max_kv_len) == (8, 4, 512)
    rig.forward(rig.query(), rig.build())
    (asked,) = serve.SERVING._accepted
    from dataclasses import replace

    assert replace(asked, num_requests=1, max_kv_len=512) == request, "what is prepared is what is called"
    assert len(made) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_preparing_that_fails_leaves_the_engine_its_own(monkeypatch, caplog, strict):
    def fails(*args, **kwargs):
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(serving, "prepare", fails)
    if strict:
        monkeypatch.setenv("FLASHMAP_STRICT", "1")
        with pytest.raises(RuntimeError, match="shared memory"):
            Rig("TRITON_MLA", RAGGED)
        return
    rig = Rig("TRITON_MLA", RAGGED)
    q, metadata = rig.query(), rig.build()
    stats.reset()
    torch.testing.assert_close(rig.forward(q, metadata), rig.reference(q), **CLOSE)
    assert counts() == left("contract") and "out of shared memory" in caplog.text


@pytest.mark.parametrize("name", DENSE + LATENT)
def test_a_capture_has_lengths_of_one_and_a_replay_reads_the_devices(monkeypatch, name):
    """vLLM captures with seq_len 1 < L and an empty table, and replays with other lengths at the same addresses and padded requests."""
    noted = []
    run = serving.verify_attention
    monkeypatch.setattr(serving, "verify_attention", lambda *a, **k: noted.append((a, k)) or run(*a, **k))
    rig = Rig(name, [(4, 40), (4, 64), (4, 21), (0, 0)])
    q = rig.query(4)
    live = rig.common()
    captured = rig.common(capture=True)
    captured.query_start_loc = captured.query_start_loc_cpu = torch.tensor([0, 4, 8, 12, 16], dtype=torch.int32)
    captured.num_actual_tokens, captured.seq_lens = 16, torch.ones(4, dtype=torch.int32)
    captured.slot_mapping = torch.zeros(16, dtype=torch.int64)
    captured.block_table_tensor = torch.zeros_like(rig.table)
    metadata = rig.builder.build_for_cudagraph_capture(captured)
    rig.content.nan_to_num_(0.0)
    rig.cache.nan_to_num_(0.0)
    rig.forward(q, metadata)
    ((args, kwargs),) = noted
    assert kwargs["max_query_len"] == 4 and torch.isfinite(kwargs["out"]).all()
    captured.query_start_loc.copy_(live.query_start_loc)
    captured.seq_lens.copy_(live.seq_lens)
    captured.block_table_tensor.copy_(live.block_table_tensor)
    args[0].copy_(q[:16])
    run(*args, **kwargs)
    torch.testing.assert_close(kwargs["out"][:12], rig.reference(q)[:12], **CLOSE)


@pytest.mark.parametrize("name", DENSE + LATENT)
def test_what_a_capture_lacks_is_no_error(monkeypatch, name):
    from dataclasses import replace

    rig = Rig(name, UNIFORM)
    q, metadata = rig.query(), rig.build()

    def lacks(*args, **kwargs):
        raise Declined("torch_dense", (Reason("scratch", "no scratch"),))

    monkeypatch.setattr(serving, "verify_attention", lacks)
    with pytest.raises(Declined):
        rig.forward(q, metadata)
    known = serving.DeviceInfo.of(torch.device("cpu"))
    monkeypatch.setattr(serving.DeviceInfo, "of", lambda device: replace(known, capturing=True))
    monkeypatch.setattr(serve.SERVING, "choose", lambda *a: "torch_dense")
    stats.reset()
    torch.testing.assert_close(rig.forward(q, metadata), rig.reference(q), **CLOSE)
    assert counts() == left("scratch")


@pytest.mark.parametrize("name", DENSE + LATENT)
def test_no_device_value_is_read_on_the_host(monkeypatch, name):
    rig = Rig(name, UNIFORM)
    q, metadata = rig.query(), rig.build()
    monkeypatch.setattr(serving, "verify_attention", lambda *a, **k: None)
    rig.forward(q, metadata)
    for method in ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "numpy"):
        monkeypatch.setattr(torch.Tensor, method, lambda *a, **k: pytest.fail("a device value is read"))
    rig.forward(q, metadata)


# -- what an operator asks for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DENSE + LATENT)
def test_check_records_the_difference(monkeypatch, name):
    monkeypatch.setenv("FLASHMAP_CHECK", "1")
    rig = Rig(name, UNIFORM)
    q = rig.query()
    torch.testing.assert_close(rig.forward(q, rig.build()), rig.reference(q), **CLOSE)
    found = observe.here().layers["layer"]
    assert found.calls == 1 and 0 < found.largest < 1e-5 and found.scale > 0.1 and ENGINE


def test_the_bound_is_that_of_the_configuration_so_that_nothing_compiles_while_serving():
    rig = Rig("TRITON_ATTN", [(2, 40), (1, 30)])
    rig.forward(rig.query(), rig.build())
    assert [request.max_query_len for request in serve.SERVING._accepted] == [4]
    assert translate.bound(2, (4,)) == 4


@pytest.mark.parametrize("dim", [36, 40, 72, 80, 104])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("name", DENSE)
def test_heads_whose_values_begin_anywhere(monkeypatch, name, fp8, dim):
    """K and V of a row lie side by side: V begins at a multiple of 16 bytes for some head dimensions alone."""
    made = []
    monkeypatch.setattr(serving, "prepare", lambda request, limits, **more: made.append(request))
    monkeypatch.setenv("FLASHMAP_IMPL", "torch_dense")
    rig = Rig(name, UNIFORM, dim=dim, fp8=fp8)
    check(rig, "torch_dense", rtol=0, atol=1e-4)
    assert made and {request.aligned for request in made} == {rig.impl.flashmap_aligned(rig.layer, rig.cache)}


def test_each_implementation_that_serves_some_batches_is_prepared(monkeypatch):
    """A table may prefer one for few requests and another for many."""
    made = []
    monkeypatch.setattr(serving, "prepare", lambda request, limits, impl, **more: made.append((impl, limits.max_requests)))
    winner = serve._winner
    monkeypatch.setattr(
        serve, "_winner", lambda impl, request, device: "reference" if request.num_requests <= 3 else winner(impl, request, device)
    )
    monkeypatch.setenv("FLASHMAP_IMPL", "torch_dense")
    Rig("TRITON_ATTN", UNIFORM, seqs=8)
    assert made == [("reference", 3), ("torch_dense", 8)]
