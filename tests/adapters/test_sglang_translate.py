"""The SGLang adapter's translation of a drafter's decoding step, without SGLang."""

import pytest
import torch

from flashmap.adapters.sglang import translate
from flashmap.core import verify_attention

CLOSE = {"rtol": 0, "atol": 1e-5}


def step(latent=False, **changes):
    """A call of ``decode_attention_fwd``: three tokens, each with a key list of its own."""
    draw = torch.Generator().manual_seed(0)
    k = torch.randn(32, 1, 24, generator=draw) if latent else torch.randn(32, 2, 16, generator=draw)
    v = k[..., :16] if latent else torch.randn(32, 2, 16, generator=draw)
    indptr = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    call = {
        "q": torch.randn(3, 4, k.shape[-1], generator=draw), "k_buffer": k, "v_buffer": v, "o": torch.zeros(3, 4, 16), "kv_indptr": indptr,
        "kv_indices": torch.randperm(32, generator=draw)[:20], "attn_logits": torch.zeros(1), "attn_lse": torch.zeros(1),
        "num_kv_splits": torch.ones(1), "max_kv_splits": 8, "sm_scale": 0.25, "k_scale": 1.0, "v_scale": 1.0, "logit_cap": 0.0, "sinks": None,
        "xai_temperature_len": -1, "has_mla": latent, "use_pdl": False, "page_size": 1, "score_mod": None, "aux_tensors": None,
    }  # fmt: skip
    return call | changes


def dense(call):
    outs = []
    for q, begin, end in zip(call["q"], call["kv_indptr"], call["kv_indptr"][1:], strict=False):
        slots = call["kv_indices"][begin:end].long()
        group = 4 // call["k_buffer"].shape[1]
        k, v = (
            (call[name][slots] * call[scale]).repeat_interleave(group, 1)
            for name, scale in (("k_buffer", "k_scale"), ("v_buffer", "v_scale"))
        )
        outs.append(torch.einsum("hk,khd->hd", (torch.einsum("hd,khd->hk", q, k) * call["sm_scale"]).softmax(-1), v))
    return torch.stack(outs)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_indptr": torch.tensor([0, 5, 6, 15, 16, 17])},  # of a larger batch, and int64
        {"k_scale": 0.5, "v_scale": 2.0},
        {"logit_cap": -1.0, "xai_temperature_len": None},
        {"enable_lean": True, "lean_locks": torch.zeros(1), "uneven_batch": False},  # 0.5.23: how its kernel shall run
    ],
)
def test_each_token_sees_its_own_list(changes):
    call = step(**changes)
    batch = translate.decode(call, torch.arange(4, dtype=torch.int32))
    torch.testing.assert_close(verify_attention(batch.q, batch.kv, **batch.arguments, impl="torch_dense"), dense(call)[:3], **CLOSE)


def test_a_latent_row_is_scaled_once():
    call = step(latent=True, k_scale=0.5, v_scale=0.5)
    batch = translate.decode(call, torch.arange(4, dtype=torch.int32))
    torch.testing.assert_close(verify_attention(batch.q, batch.kv, **batch.arguments, impl="torch_dense"), dense(call), **CLOSE)


def test_no_token():
    call = step(q=torch.zeros(0, 4, 16))
    batch = translate.decode(call, torch.arange(1, dtype=torch.int32))
    assert verify_attention(batch.q, batch.kv, **batch.arguments, impl="torch_dense").shape == (0, 4, 16)


@pytest.mark.parametrize(
    "code, changes",
    [
        ("score_mod", {"score_mod": abs}), ("argument", {"a_new_argument": 1}), ("xai_temperature", {"xai_temperature_len": 8}),
        ("query_dtype", {"q": torch.zeros(3, 4, 16, dtype=torch.float64)}), ("kv_layout", {"k_buffer": torch.zeros(4, 8, 2, 16)}),
        ("window", {"kv_indices": None}), ("scales", {"latent": True, "k_scale": 2.0}),
    ],
)  # fmt: skip
def test_why_a_step_is_left(code, changes):
    assert translate.decode(step(**changes), torch.arange(4, dtype=torch.int32)) == code
