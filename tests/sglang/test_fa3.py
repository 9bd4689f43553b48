"""SGLang's fa3 backend with the op in it, against dense torch. FlashAttention 3 itself is written in torch (stubs/sgl_kernel)."""

import pytest
import torch
from rig import CLOSE, Graph, Rig, check_served, counts

from flashmap.adapters import observe


def left(code):
    return {("sglang", "left", code): 1}


@pytest.mark.parametrize("page, impl", [(1, "torch_dense"), (16, "torch_dense"), (64, "torch_dense"), (16, "triton_splitkv")])
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
def test_verify(installed, mla, topk, page, impl):
    rig = Rig("fa3", mla=mla, topk=topk, page=page)
    batch = rig.verify()
    check_served(rig, batch, installed, impl, theirs=False)


@pytest.mark.parametrize("page", [4, 16, 64])
def test_latent_trees_on_larger_pages_are_wrong_without_us(installed, page):
    """SGLang shows its kernel token slots as page ids (0.5.16 to 0.5.23): a wrong row, or one out of range."""
    rig = Rig("fa3", mla=True, page=page)
    batch = rig.verify()
    want = rig.reference(batch)
    try:
        theirs = rig.forward(batch)
    except IndexError:
        theirs = torch.full_like(want, float("inf"))
    assert (theirs - want).abs().max() > 0.1
    installed()
    torch.testing.assert_close(rig.forward(batch), want, **CLOSE)


@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
def test_a_tree_is_one_call_of_ours_and_none_of_sglangs(installed, monkeypatch, mla):
    import sgl_kernel
    from sglang.kernels.ops.attention import flash_attention
    from sglang.srt.layers.attention import flashattention_backend as module

    called = []
    monkeypatch.setattr(flash_attention, "fa3_flash_attn_with_kvcache", lambda *a, **k: called.append("kernel"))
    monkeypatch.setattr(module, "merge_state_v2", lambda *a: called.append("merge"))
    installed()
    rig = Rig("fa3", mla=mla)
    batch = rig.verify()
    torch.testing.assert_close(rig.forward(batch), rig.reference(batch), **CLOSE)
    assert called == [] and sgl_kernel and counts() == {("torch_dense", "routed", ""): 1}


@pytest.mark.parametrize("page, impl", [(1, "torch_dense"), (16, "torch_dense"), (1, "triton_splitkv")])
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
def test_draft_extend_has_a_fixed_width_whatever_was_accepted(installed, mla, topk, page, impl):
    rig = Rig("fa3", mla=mla, topk=topk, page=page, width=6, steps=3, draft=True)
    batch = rig.draft_extend(accepted=[1, 4])
    check_served(rig, batch, installed, impl)


@pytest.mark.parametrize("mode", ["verify", "draft_extend"])
@pytest.mark.parametrize("topk, page", [(1, 1), (4, 1), (4, 16)])
@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
def test_capture_and_replay(installed, mla, topk, page, mode):
    installed()
    rig = Rig("fa3", mla=mla, topk=topk, page=page, draft=mode == "draft_extend")
    batch = getattr(rig, mode)
    graph = Graph(rig, batch(padded=2)).capture()
    assert len(graph.calls) == 1 and len(graph.made) == (mode == "verify" and topk > 1)
    for lens in ((37, 20), (5, 60)):
        rig.lens = list(lens)
        rig._fill()
        live = batch(padded=2)
        out = graph.replay(live)
        want = rig.reference(live)
        torch.testing.assert_close(out[: len(want)], want, **CLOSE)
        assert torch.isfinite(out).all(), "filling"
        torch.testing.assert_close(rig.forward(live)[: len(want)], want, **CLOSE)


@pytest.mark.parametrize("order", [("verify", "draft_extend", "verify"), ("draft_extend", "verify", "draft_extend")])
@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
def test_one_modes_metadata_stays_out_of_the_other(installed, mla, order):
    """One backend, one mode after the other: whether draft tokens are in the lengths, and whether there is a tree, is the batch's."""
    installed()
    rig = Rig("fa3", mla=mla, width=6)
    for mode in order:
        batch = getattr(rig, mode)()
        torch.testing.assert_close(rig.forward(batch), rig.reference(batch), **CLOSE)
    assert counts() == {("torch_dense", "routed", ""): 3}


@pytest.mark.parametrize("mode", ["verify", "draft_extend"])
def test_windows_sinks_and_soft_cap_of_a_chain(installed, mode):
    rig = Rig("fa3", topk=1, window=8, softcap=2.0)
    sinks = torch.linspace(-2, 2, rig.heads)
    batch = getattr(rig, mode)()
    theirs = rig.forward(batch, sinks=sinks)
    installed()
    ours = rig.forward(batch, sinks=sinks)
    torch.testing.assert_close(ours, rig.reference(batch, sinks), **CLOSE)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    assert counts() == {("torch_dense", "routed", ""): 1}


def test_sinks_and_soft_cap_of_a_tree(installed):
    installed()
    rig = Rig("fa3", softcap=2.0)
    sinks = torch.linspace(-2, 2, rig.heads)
    batch = rig.verify()
    torch.testing.assert_close(rig.forward(batch, sinks=sinks), rig.reference(batch, sinks), **CLOSE)


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
def test_one_token_a_request(installed, mla, topk):
    installed()
    rig = Rig("fa3", mla=mla, topk=topk, width=1, steps=1)
    batch = rig.verify()
    torch.testing.assert_close(rig.forward(batch), rig.reference(batch), **CLOSE)
    assert counts() == {("torch_dense", "routed", ""): 1}


# -- what stays SGLang's ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, change, options",
    [
        ("fa_version", lambda rig, batch: setattr(rig.backend, "fa_impl_ver", 5), {}),
        ("deterministic", lambda rig, batch: setattr(rig.backend, "num_splits", 1), {}),
        ("cp", lambda rig, batch: setattr(batch, "attn_cp_metadata", object()), {}),
        ("uno", lambda rig, batch: setattr(batch, "spec_algorithm", _Uno()), {}),
        ("metadata", lambda rig, batch: delattr(rig.backend.forward_metadata_spec_decode_expand, "flashmap_tree"), {}),
        ("window", lambda rig, batch: None, {"window": 8}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_left_by_what_the_backend_and_the_batch_are(installed, monkeypatch, code, change, options):
    from sglang.srt.layers.attention import flashattention_backend as module

    installed()
    rig = Rig("fa3", **options)
    batch = rig.verify()
    rig.backend.init_forward_metadata(batch)
    change(rig, batch)
    monkeypatch.setattr(module.FlashAttentionBackend.forward_extend.__wrapped__, "__code__", _same.__code__)
    rig.forward(batch, metadata=False)
    assert counts() == left(code)


class _Uno:
    def is_uno(self):
        return True


def _same(self, q, k, v, layer, forward_batch, save_kv_cache=True, q_rope=None, k_rope=None, sinks=None, *a, **kw):
    return q


@pytest.mark.parametrize(
    "code, change",
    [
        ("argument", {"rel_bias": 1}),
        ("non_causal", {"causal": False}),
        ("query_dtype", {"q": torch.zeros(10, 4, 32).to(torch.float8_e4m3fn)}),
        ("scales", {"k_descale": torch.ones(2, 2)}),
        ("kv_layout", {"k_cache": torch.zeros(1, 2, 32)}),
        ("score_mod", {"score_mod": print}),
        ("max_query_len", {"max_seqlen_q": torch.tensor(5)}),
    ],
)
def test_left_by_what_the_call_is(code, change):
    from flashmap.adapters.sglang import translate

    call = {"q": torch.zeros(10, 4, 32), "k_cache": torch.zeros(9, 1, 2, 32), "v_cache": torch.zeros(9, 1, 2, 32), "causal": True, "max_seqlen_q": 5,
            "page_table": torch.zeros(2, 9).int(), "cache_seqlens": torch.ones(2).int(), "cu_seqlens_q": torch.tensor([0, 5, 10]).int(),
            "softmax_scale": 1.0, "window_size": (-1, -1), "softcap": 0.0, "num_splits": 0, "ver": 3, "out": None, "cu_seqlens_k_new": None}  # fmt: skip
    assert isinstance(translate.paged(call, None), translate.Batch)
    assert translate.paged(call | change, None) == code


def test_without_a_choice_a_cpu_keeps_sglangs_kernel(installed):
    rig = Rig("fa3")
    batch = rig.verify()
    theirs = rig.forward(batch)
    installed(None)
    assert torch.equal(rig.forward(batch), theirs)
    assert counts() == left("engine_faster")


def test_without_a_choice_what_sglang_gets_wrong_is_ours(installed):
    installed(None)
    rig = Rig("fa3", mla=True, page=16)
    batch = rig.verify()
    torch.testing.assert_close(rig.forward(batch), rig.reference(batch), **CLOSE)
    assert counts() == {("torch_dense", "routed", ""): 1}


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
def test_check_records_the_difference(installed, monkeypatch, mla, topk):
    installed()
    monkeypatch.setenv("FLASHMAP_CHECK", "1")
    observe.reset()
    rig = Rig("fa3", mla=mla, topk=topk)
    batch = rig.verify()
    torch.testing.assert_close(rig.forward(batch), rig.reference(batch), **CLOSE)
    (found,) = observe.here().layers.values()
    assert found.calls == 1 and 0 < found.largest < 1e-5
    observe.reset()
