"""SGLang's triton backend with the op in it, against dense torch and against its own kernel."""

import pytest
import torch
from rig import CLOSE, IMPLS, Graph, Rig, check_served, counts, left

from flashmap.adapters import observe
from flashmap.core import stats


@pytest.mark.parametrize("page, impl", [(1, "torch_dense"), (16, "torch_dense"), (64, "torch_dense"), (1, "triton_splitkv")])
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
def test_verify(installed, mla, topk, page, impl):
    rig = Rig("triton", mla=mla, topk=topk, page=page)
    batch = rig.verify()
    check_served(rig, batch, installed, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
def test_draft_extend_has_a_fixed_width_whatever_was_accepted(installed, mla, topk, impl):
    """bs > 1, fewer tokens accepted than the window has, and a window that is not steps + 1."""
    rig = Rig("triton", mla=mla, topk=topk, width=6, steps=3, draft=True)
    batch = rig.draft_extend(accepted=[1, 4])
    check_served(rig, batch, installed, impl)


@pytest.mark.parametrize("mode", ["verify", "draft_extend"])
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
def test_capture_and_replay(installed, mla, topk, mode):
    """Captured on filling alone; then batches of two sizes with other lengths: the tensors of the capture hold all that is needed."""
    installed()
    rig = Rig("triton", mla=mla, topk=topk, draft=mode == "draft_extend")
    batch = getattr(rig, mode)
    graph = Graph(rig, batch(padded=2)).capture()
    assert len(graph.calls) == 1 and torch.isfinite(graph.out).all()
    for lens in ((37, 20), (5, 60)):
        rig.lens = list(lens)
        rig._fill()
        live = batch(padded=2)
        out = graph.replay(live)
        want = rig.reference(live)
        torch.testing.assert_close(out[: len(want)], want, **CLOSE)
        assert torch.isfinite(out).all(), "filling"
        torch.testing.assert_close(out, rig.forward(live), **CLOSE)


@pytest.mark.parametrize("impl", IMPLS)
def test_one_token_a_request(installed, impl):
    """What SGLang runs when there is nothing to verify: the root alone."""
    installed(impl)
    rig = Rig("triton", width=1, steps=1)
    batch = rig.verify()
    torch.testing.assert_close(rig.forward(batch), rig.reference(batch), **CLOSE)
    assert counts() == {(impl, "routed", ""): 1}


def test_a_step_narrower_than_the_others(installed):
    """0.5.23 may verify fewer tokens than it captured: the width is the batch's."""
    installed()
    rig = Rig("triton", width=6)
    rig.width = 3
    batch = rig.verify()
    rig.backend.num_draft_tokens = 3  # where 0.5.17 takes the width from
    torch.testing.assert_close(rig.forward(batch), rig.reference(batch), **CLOSE)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("mode", ["verify", "draft_extend"])
@pytest.mark.parametrize("topk", [1, 4])
def test_sliding_windows_go_by_position(installed, topk, mode, impl):
    """Siblings of a tree share a position; SGLang's own kernel goes by the row (sgl-project/sglang#39287)."""
    installed(impl)
    rig = Rig("triton", topk=topk, window=8, draft=mode == "draft_extend", seed=3)
    batch = getattr(rig, mode)()
    torch.testing.assert_close(rig.forward(batch), rig.reference(batch), **CLOSE)
    assert counts() == {(impl, "routed", ""): 1}


@pytest.mark.parametrize("impl", IMPLS)
def test_sinks_and_soft_cap(installed, impl):
    rig = Rig("triton", softcap=2.0)
    sinks = torch.linspace(-2, 2, rig.heads)
    batch = rig.verify()
    theirs = rig.forward(batch, sinks=sinks)
    installed(impl)
    ours = rig.forward(batch, sinks=sinks)
    torch.testing.assert_close(ours, rig.reference(batch, sinks), **CLOSE)
    torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("mla, scales", [(False, (0.5, 2.0)), (True, (0.5, 0.5)), (False, None)])
def test_fp8_cache(installed, mla, scales, impl):
    installed(impl)
    rig = Rig("triton", mla=mla, kv_dtype=torch.float8_e4m3fn, scales=scales, dtype=torch.float16)
    batch = rig.verify()
    torch.testing.assert_close(rig.forward(batch).float(), rig.reference(batch), rtol=0, atol=4e-3)
    assert counts() == {(impl, "routed", ""): 1}


def test_a_captured_mask_is_uint8_and_an_eager_one_bool(installed):
    installed()
    rig = Rig("triton")
    batch = rig.verify()
    eager = rig.forward(batch)
    assert rig.backend.forward_metadata.custom_mask.dtype == torch.bool and rig.backend.forward_metadata.qo_indptr.dtype == torch.int32
    rig.backend.init_cuda_graph_state(2, 2 * rig.width)
    rig.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    assert rig.backend.forward_metadata.custom_mask.dtype == torch.uint8 and rig.backend.forward_metadata.qo_indptr.dtype == torch.int64
    torch.testing.assert_close(rig.forward(batch, metadata=False), eager, **CLOSE)


# -- what stays SGLang's ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, options", [("deterministic", {"enable_deterministic_inference": True}), ("scales", {"mla": True, "scales": (0.5, 2.0)})]
)
def test_left_by_what_the_backend_is(installed, code, options):
    rig = Rig("triton", **options)
    batch = rig.verify()
    theirs = rig.forward(batch)
    installed()
    assert torch.equal(rig.forward(batch), theirs)
    assert counts() == left(code)


@pytest.mark.parametrize(
    "code, change",
    [
        ("xai_temperature", {"xai_temperature_len": 8}),
        ("score_mod", {"score_mod": lambda *a: None}),
        ("partial", {"skip_prefix": True}),
        ("argument", {"a_new_argument": 1}),
        ("non_causal", {"is_causal": False, "custom_mask": None}),
        ("draft_dtype", {"k_extend": torch.zeros(10, 2, 32, dtype=torch.float16)}),
        ("window", {"kv_indices": None}),
        ("kv_layout", {"k_buffer": torch.zeros(1, 1, 2, 32)}),
        ("query_dtype", {"q_extend": torch.zeros(10, 4, 32, dtype=torch.float64)}),
    ],
)
def test_left_by_what_the_call_is(installed, monkeypatch, code, change):
    """A call of SGLang's kernel with one argument changed: the kernel gets just that call."""
    installed()
    rig = Rig("triton")
    batch, seen = rig.verify(), []
    monkeypatch.setattr(rig.backend, "extend_attention_fwd", lambda *args, **kwargs: seen.append((args, kwargs)))
    from flashmap.adapters.sglang import triton_attn

    names = next(c for c in triton_attn.CONTRACTS if c.target.endswith(":extend_attention_fwd")).parameters[:16]
    run = triton_attn._Extend.__call__

    def changed(self, *args, **kwargs):
        given = dict(zip(names, args, strict=True)) | kwargs | change
        run(self, *(given.pop(name) for name in names), **given)

    monkeypatch.setattr(triton_attn._Extend, "__call__", changed)
    rig.forward(batch)
    ((args, kwargs),) = seen
    assert all((dict(zip(names, args, strict=True)) | kwargs)[name] is value for name, value in change.items())
    assert counts() == left(code)


def test_context_parallel_decoding_is_left(installed, monkeypatch):
    installed()
    rig = Rig("triton")
    batch = rig.verify()
    rig.backend.init_forward_metadata(batch)
    monkeypatch.setattr(rig.backend, "dcp_size", 2)
    monkeypatch.setattr(rig.backend, "_forward_extend_dcp", lambda *args: torch.zeros(10, 128), raising=False)
    rig.forward(batch, metadata=False)
    assert counts() == left("dcp")


def test_without_a_choice_a_cpu_keeps_sglangs_kernel(installed):
    rig = Rig("triton")
    batch = rig.verify()
    theirs = rig.forward(batch)
    installed(None)
    assert torch.equal(rig.forward(batch), theirs)
    assert counts() == left("engine_faster")


def test_only_the_modes_that_were_asked_for(installed):
    installed(modes=["draft_extend_v2"])
    rig = Rig("triton")
    rig.forward(rig.verify())
    assert counts() == {}
    rig.forward(rig.draft_extend())
    assert counts() == {("torch_dense", "routed", ""): 1}


def test_a_kernel_that_was_not_reached_is_told(installed, caplog):
    """Such as upstream's own for one AMD chip."""
    installed()
    rig = Rig("triton")
    batch = rig.verify()
    rig.backend.use_verify_splitkv, rig.backend.verify_splitkv_fwd = True, lambda *args, **kwargs: True
    with caplog.at_level("INFO", logger="flashmap"):
        rig.forward(batch)
    assert counts() == left("not_reached") and "another kernel" in caplog.text


def test_all_that_a_capture_needs_is_made_before_for_the_largest_batch(installed, monkeypatch):
    from flashmap.adapters import serving

    made = []
    monkeypatch.setattr(serving, "prepare", lambda request, limits, **more: made.append((request.num_requests, request.mask, limits)))
    installed()
    rig = Rig("triton")
    rig.forward(rig.verify())
    assert made == [], "no graphs, no maxima"
    rig.backend.init_cuda_graph_state(16, 16 * rig.width)
    for batch in (rig.verify(), rig.verify(), rig.draft_extend()):
        rig.forward(batch)
    limits = serving.Limits(16, rig.width, 192)
    assert made == [(1, "full", limits), (1, None, limits)]


def test_what_a_capture_lacks_is_no_error(installed, monkeypatch, caplog):
    from dataclasses import replace

    from flashmap.adapters import serving
    from flashmap.core import Declined
    from flashmap.core.interface import Reason

    rig = Rig("triton")
    batch = rig.verify()
    theirs = rig.forward(batch)

    def lacks(*args, **kwargs):
        raise Declined("triton_splitkv", (Reason("scratch", "no scratch"),))

    known = serving.DeviceInfo.of(torch.device("cpu"))
    monkeypatch.setattr(serving, "verify_attention", lacks)
    installed("triton_splitkv")
    with pytest.raises(Declined):
        rig.forward(batch)
    monkeypatch.setattr(serving.DeviceInfo, "of", lambda device: replace(known, capturing=True))
    stats.reset()
    assert torch.equal(rig.forward(batch), theirs)
    assert counts() == left("scratch") and "no scratch" in caplog.text


# -- what an operator asks for ------------------------------------------------------------------------------------------


def test_check_records_the_difference(installed, monkeypatch):
    installed()
    monkeypatch.setenv("FLASHMAP_CHECK", "1")
    observe.reset()
    rig = Rig("triton")
    batch = rig.verify()
    ours = rig.forward(batch)
    (found,) = observe.here().layers.values()
    assert list(observe.here().layers) == ["layer 0 (target verify)"] and found.calls == 1 and 0 < found.largest < 1e-5
    torch.testing.assert_close(ours, rig.reference(batch), **CLOSE)
    observe.reset()


def test_the_log_says_once_who_serves_which_role(installed, caplog):
    with caplog.at_level("INFO", logger="flashmap"):
        installed()
        rig = Rig("triton")
        for batch in (rig.verify(), rig.verify(), rig.draft_extend()):
            rig.forward(batch)
    lines = [r.getMessage() for r in caplog.records if r.name == "flashmap.adapters.serving"]
    assert [line.split(": GQA")[0] for line in lines] == ["flashmap: sglang.triton, target verify", "flashmap: sglang.triton, draft extend"]
    assert all(line.endswith("-> torch_dense") for line in lines)


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
def test_qlen_masks(installed, monkeypatch, mla, topk):
    monkeypatch.setenv("FLASHMAP_SGLANG_QLEN_MASK", "1")
    installed()
    rig = Rig("triton", mla=mla, topk=topk)
    graph = Graph(rig, rig.verify(padded=2, qlen=True))
    mask = rig.backend.verify_mask
    assert mask.mode.name == "QLEN_ONLY" and mask.buffer.shape == (4 * (rig.width + 1) * rig.width,) and mask.fits(4) and not mask.fits(5)
    live = rig.verify(padded=2, qlen=True)
    out = graph.capture().replay(live)
    torch.testing.assert_close(out[: 2 * rig.width], rig.reference(live), **CLOSE)
    torch.testing.assert_close(rig.forward(live)[: 2 * rig.width], rig.reference(live), **CLOSE)


def test_qlen_masks_that_nobody_can_read(installed, monkeypatch):
    monkeypatch.setenv("FLASHMAP_SGLANG_QLEN_MASK", "1")
    installed(None)  # on a CPU nothing of ours is chosen
    rig = Rig("triton")
    rig.backend.init_cuda_graph_state(2, 2 * rig.width)
    with pytest.raises(RuntimeError, match="QLEN_ONLY"):
        rig.forward(rig.verify(qlen=True))


@pytest.mark.parametrize("server", [{"speculative_algorithm": "NGRAM"}, {"enable_deterministic_inference": True}])
def test_qlen_masks_only_where_every_consumer_agrees(installed, monkeypatch, caplog, server):
    monkeypatch.setenv("FLASHMAP_SGLANG_QLEN_MASK", "1")
    installed()
    rig = Rig("triton", **server)
    rig.backend.init_cuda_graph_state(2, 2 * rig.width)
    assert rig.backend.verify_mask.mode.name == "FULL_MASK"
    assert "FLASHMAP_SGLANG_QLEN_MASK does nothing here" in caplog.text


def test_declined_under_strict(installed, monkeypatch):
    from flashmap.core import Declined

    monkeypatch.setenv("FLASHMAP_STRICT", "1")
    installed("triton_splitkv")
    rig = Rig("triton", dtype=torch.bfloat16, kv_dtype=torch.bfloat16)  # which the interpreter cannot do
    with pytest.raises(Declined, match="bf16"):
        rig.forward(rig.verify())
