"""FlashAttention 3's paged call in torch, request by request: bottom-right causal, one window to the left, rows without keys are 0."""

import math

import torch


def flash_attn_with_kvcache(
    q, k_cache, v_cache, *, qv=None, page_table, cache_seqlens, cu_seqlens_q, softmax_scale, causal=False, window_size=(-1, -1), softcap=0.0,
    sinks=None, k_descale=None, v_descale=None, return_softmax_lse=False, out=None, **_,
):  # fmt: skip
    out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[-1]) if out is None else out
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf)
    starts, page_size = cu_seqlens_q.tolist(), k_cache.shape[1]
    for r, keys in enumerate(cache_seqlens.tolist()):
        rows = slice(starts[r], starts[r + 1])
        index = torch.arange(keys)
        page, offset = page_table[r, index // page_size].long(), index % page_size
        k, v = k_cache[page, offset].float(), v_cache[page, offset].float()
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        x = torch.einsum("qhd,khd->hqk", q[rows].float(), k)
        if qv is not None:
            x += torch.einsum("qhd,khd->hqk", qv[rows].float(), v)
        x *= softmax_scale
        if softcap:
            x = softcap * torch.tanh(x / softcap)
        position = torch.arange(rows.stop - rows.start)[:, None] + keys - (rows.stop - rows.start)
        if causal:
            x = x.masked_fill(index > position, -math.inf)
        if window_size[0] >= 0:
            x = x.masked_fill(position - index > window_size[0], -math.inf)
        if sinks is not None:
            x = torch.cat((x, sinks.float()[:, None, None].expand(-1, x.shape[1], 1)), -1)
            v = torch.cat((v, torch.zeros_like(v[:1]) if keys else v.new_zeros(1, *v.shape[1:])))
        lse[:, rows] = x.logsumexp(-1) if x.shape[-1] else -math.inf
        out[rows] = torch.einsum("hqk,khd->qhd", x.softmax(-1).nan_to_num(), v).to(out.dtype)
    return (out, lse) if return_softmax_lse else out


def flash_attn_varlen_func(*args, **kwargs):
    raise NotImplementedError


def get_scheduler_metadata(*args, **kwargs):
    return None
