"""A drafter's decoding steps in SGLang's triton backend with the op in it, against dense torch and against SGLang's own kernel."""

import pytest
import torch
from rig import CLOSE, IMPLS, TRANSLATES, Rig, counts, left

from flashmap.adapters import observe


def drafter(topk=4, width=16, steps=4, **options):
    """A rig with room in its table for topk branches of ``steps`` tokens."""
    return Rig("triton", topk=topk, width=width, steps=steps, draft=True, **options)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
def test_draft_decode(installed, mla, topk, impl):
    """Each step of the drafter has a backend of its own, whose lists are one key longer."""
    rig = drafter(topk, mla=mla)
    steps, batch = rig.drafting()
    steps.init_forward_metadata(batch)
    # SGLang's kernel takes DeepSeek's 576/512 alone.
    theirs = [] if mla else [rig.decode(backend, batch) for backend in steps.attn_backends]
    installed(impl, modes=["draft_decode"])
    ours = [rig.decode(backend, batch) for backend in steps.attn_backends]
    assert len(ours) == rig.steps - 1 and not torch.equal(ours[0], ours[1])
    for step, found in enumerate(ours):
        torch.testing.assert_close(found, rig.decoded(batch, step), **CLOSE)
    for found, before in zip(ours, theirs, strict=False):
        torch.testing.assert_close(found, before, **CLOSE)
    assert counts() == {(impl, "routed", ""): 3}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("page, topk", [(16, 1), (16, 4)])
def test_draft_decode_with_larger_pages(installed, page, topk, impl):
    rig = drafter(topk, width=80, page=page)  # a branch begins on a page of its own
    steps, batch = rig.drafting()
    steps.init_forward_metadata(batch)
    theirs = [rig.decode(backend, batch) for backend in steps.attn_backends]
    installed(impl, modes=["draft_decode"])
    for backend, before in zip(steps.attn_backends, theirs, strict=True):
        torch.testing.assert_close(rig.decode(backend, batch), before, **CLOSE)
    assert counts() == {(impl, "routed", ""): 3}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"kv_dtype": torch.float8_e4m3fn, "scales": (0.5, 2.0), "dtype": torch.float16}])
def test_draft_decode_with_sinks_a_soft_cap_and_scales(installed, options, impl):
    installed(impl, modes=["draft_decode"])
    rig = drafter(**options)
    sinks = torch.linspace(-2, 2, rig.heads)
    steps, batch = rig.drafting()
    steps.init_forward_metadata(batch)
    ours = rig.decode(steps.attn_backends[0], batch, sinks=sinks)
    tolerance = CLOSE if rig.dtype == torch.float32 else {"rtol": 0, "atol": 4e-3}
    torch.testing.assert_close(ours.float(), rig.decoded(batch, 0, sinks), **tolerance)
    assert counts() == {(impl, "routed", ""): 1}


@pytest.mark.skipif(not TRANSLATES, reason="0.5.17's drafter lists no keys for a window")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("topk", [1, 4])
def test_draft_decode_on_a_layer_with_a_window(installed, topk, impl):
    """SGLang lists the keys inside the window alone."""
    rig = drafter(topk, window=8)
    steps, batch = rig.drafting()
    steps.init_forward_metadata(batch)
    theirs = [rig.decode(backend, batch) for backend in steps.attn_backends]
    assert not torch.allclose(theirs[0], rig.decoded(batch, 0), atol=1e-2), "or the window would hide nothing"
    installed(impl, modes=["draft_decode"])
    for backend, before in zip(steps.attn_backends, theirs, strict=True):
        torch.testing.assert_close(rig.decode(backend, batch), before, **CLOSE)
    assert counts() == {(impl, "routed", ""): 3}


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
def test_draft_decode_captured_and_replayed(installed, monkeypatch, mla, topk):
    """The calls that a graph holds, made again on their own tensors after SGLang listed other keys there."""
    from flashmap.adapters import serving

    installed(modes=["draft_decode"])
    rig = drafter(topk, mla=mla)
    steps, batch = rig.drafting(padded=2)
    steps.init_cuda_graph_state(4, 4 * topk)
    real = batch.seq_lens.clone(), batch.req_pool_indices.clone(), batch.positions.clone()
    batch.seq_lens.fill_(1)
    batch.req_pool_indices.zero_()
    batch.positions.zero_()
    steps.init_forward_metadata_out_graph(rig.plan(batch), in_capture=True)
    calls, run = [], serving.verify_attention

    def noted(*args, **kwargs):
        calls.append((args, kwargs))
        return run(*args, **kwargs)

    monkeypatch.setattr(serving, "verify_attention", noted)
    outs = [rig.decode(backend, batch) for backend in steps.attn_backends]
    assert len(calls) == 3
    for name, value in zip(("seq_lens", "req_pool_indices", "positions"), real, strict=True):
        getattr(batch, name).copy_(value)
    steps.init_forward_metadata_out_graph(rig.plan(batch), in_capture=False)
    for step, (args, kwargs) in enumerate(calls):
        assert args[0].data_ptr() == batch.q.data_ptr()
        run(*args, **kwargs)
        torch.testing.assert_close(outs[step][: 2 * topk], rig.decoded(batch, step), **CLOSE)
        assert torch.isfinite(outs[step]).all(), "filling"


def test_draft_decode_counts_requests_where_a_graph_finds_them_again(monkeypatch):
    """What a capture makes holds nothing before the replay, and what a graph points at stays when a larger batch comes."""
    from flashmap.adapters.sglang import triton_attn

    cpu, known = torch.device("cpu"), triton_attn.DeviceInfo.of(torch.device("cpu"))
    monkeypatch.setattr(triton_attn, "_counted", {})
    monkeypatch.setattr(triton_attn.DeviceInfo, "of", lambda device: type(known)("cuda", capturing=True))
    assert triton_attn._one_each(3, cpu).tolist() == [0, 1, 2, 3] and triton_attn._counted == {cpu: []}
    monkeypatch.setattr(triton_attn.DeviceInfo, "of", lambda device: known)
    captured = triton_attn._one_each(3, cpu).data_ptr()
    assert triton_attn._one_each(1023, cpu).data_ptr() == captured
    assert len(triton_attn._one_each(1024, cpu)) == 1025 and len(triton_attn._one_each(5000, cpu)) == 5001
    (first, _, last) = triton_attn._counted[cpu]
    assert first.data_ptr() == captured and triton_attn._one_each(3, cpu).data_ptr() == last.data_ptr()


def test_draft_decode_with_more_arguments_than_are_known(installed, monkeypatch):
    from flashmap.adapters.sglang import triton_attn

    installed(modes=["draft_decode"])
    seen = []
    kernel = triton_attn._Decode(lambda *args: seen.append(args), None, None, None, "draft decode")
    kernel(*range(22))
    assert seen == [tuple(range(22))] and counts() == left("argument")


def test_draft_decode_prepares_for_every_branch(installed, monkeypatch):
    from flashmap.adapters import serving

    made = []
    monkeypatch.setattr(serving, "prepare", lambda request, limits, **more: made.append((request.num_requests, request.draft, limits)))
    installed(modes=["draft_decode"])
    rig = drafter()
    steps, batch = rig.drafting()
    steps.init_cuda_graph_state(16, 64)
    steps.init_forward_metadata(batch)
    for backend in steps.attn_backends:
        rig.decode(backend, batch)
    assert made == [(1, "cache", serving.Limits(64, 1, 192))]


@pytest.mark.parametrize("modes, routed", [(None, True), (["target_verify", "draft_extend_v2"], False)])
def test_draft_decode_is_routed_unless_others_are_asked_for(installed, modes, routed):
    installed(modes=modes)
    rig = drafter()
    steps, batch = rig.drafting()
    steps.init_forward_metadata(batch)
    rig.decode(steps.attn_backends[0], batch)
    assert counts() == ({("torch_dense", "routed", ""): 1} if routed else {})


def test_a_target_that_decodes_is_left_alone(installed):
    """Without speculation: no verification, and not ours to count."""
    installed(modes=["draft_decode"])
    rig = Rig("triton")
    _, batch = rig.drafting()
    batch.q, batch.spec_info = batch.q[: len(rig.lens)], None
    rig.backend.init_forward_metadata(batch)
    rig.decode(rig.backend, batch)
    assert counts() == {}


@pytest.mark.parametrize(
    "code, change",
    [
        ("xai_temperature", {"xai_temperature_len": 8}),
        ("score_mod", {"score_mod": lambda *a: None}),
        ("argument", {"a_new_argument": 1}),
        ("window", {"kv_indices": None}),
        ("kv_layout", {"k_buffer": torch.zeros(1, 1, 2, 32)}),
        ("query_dtype", {"q": torch.zeros(8, 4, 32, dtype=torch.float64)}),
        ("scales", {"k_buffer": (latent := torch.zeros(8, 1, 48)), "v_buffer": latent[..., :32], "k_scale": 2.0}),
    ],
)
def test_draft_decode_left_by_what_the_call_is(installed, monkeypatch, code, change):
    """SGLang's kernel gets just that call."""
    from flashmap.adapters.sglang import triton_attn

    installed(modes=["draft_decode"])
    rig, seen = drafter(), []
    steps, batch = rig.drafting()
    steps.init_forward_metadata(batch)
    backend, names, run = steps.attn_backends[0], triton_attn.translate.DECODE_PARAMETERS, triton_attn._Decode.__call__
    monkeypatch.setattr(backend, "decode_attention_fwd", lambda **kwargs: seen.append(kwargs))
    monkeypatch.setattr(
        triton_attn._Decode, "__call__", lambda self, *args, **kwargs: run(self, **dict(zip(names, args, strict=False)) | kwargs | change)
    )
    rig.decode(backend, batch)
    (given,) = seen
    assert all(given[name] is value for name, value in change.items())
    assert counts() == left(code)


def test_draft_decode_is_compared(installed, monkeypatch):
    installed(modes=["draft_decode"])
    monkeypatch.setenv("FLASHMAP_CHECK", "1")
    observe.reset()
    rig = drafter()
    steps, batch = rig.drafting()
    steps.init_forward_metadata(batch)
    rig.decode(steps.attn_backends[0], batch)
    (found,) = observe.here().layers.values()
    assert list(observe.here().layers) == ["layer 0 (draft decode)"] and found.calls == 1 and 0 < found.largest < 1e-5
    observe.reset()
