"""The op's two entry points. Everything they do is: check, choose, run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from flashmap.core import dispatch, registry, stats
from flashmap.core.inputs import KVCache, TreeMask, resolve
from flashmap.core.interface import Declined
from flashmap.core.request import DeviceInfo, Limits, VerifyRequest


def verify_attention(
    q: torch.Tensor,
    kv: KVCache,
    *,
    cu_seqlens_q: torch.Tensor,
    max_query_len: int,
    draft_kv: Sequence[torch.Tensor | None] | None = None,
    draft_slots: torch.Tensor | None = None,
    mask: TreeMask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's draft tokens over its cached prefix and, under a mask, over each other.

    Args:
        q: [T, Hq, Dk] in fp32, fp16 or bf16: the rows of all requests, request by request.
        kv: the cache, a PagedKV or a SlotKV. With draft_kv or draft_slots it lists the prefix alone, with neither the
            last L_r tokens that it lists are the draft tokens.
        cu_seqlens_q: int32 or int64 [R + 1] on the device: request r has rows cu_seqlens_q[r] to cu_seqlens_q[r + 1].
        max_query_len: an upper bound of every L_r, on the host. 0: nothing is launched.
        draft_kv: (k [T, Hkv, Dk], v [T, Hkv, Dv]) in q's dtype: the draft tokens' own K/V. A latent cache's v is not read.
        draft_slots: int32 or int64 [T]: the draft tokens' slots in the cache, page * page_size + offset.
        mask: None, a causal chain, or a TreeMask.
        scale: of the logits, default Dk ** -0.5.
        softcap: c > 0: c * tanh(x / c) on the scaled logits.
        window: W >= 0: the key at position p is visible to the query at i if i - p <= W.
        sinks: floating [Hq]: one more logit per head in the denominator.
        positions: int32 or int64 [T], default kv_start + prefix + row; needed for a window with a TreeMask.
        k_scale, v_scale: dequantisation of the cache, floats or one-element device tensors.
        out: [T, Hq, Dv] in q's dtype, written in place. Rows past cu_seqlens_q[-1] are left alone.
        return_lse: also return the log-sum-exp.
        impl: the name of an implementation, which then runs or raises Declined; None: chosen automatically.

    Returns:
        out, or (out, lse) with lse fp32 [T, Hq] (natural logarithm). A row that sees nothing gives 0 and -inf. Neither has
        a gradient.

    Raises:
        TypeError, ValueError: bad input, named, before anything is launched.
        Declined: the named implementation, or under graph capture any, cannot serve the call; has ``.reasons``.

    Source: split-KV decoding with log-sum-exp merge as in Flash-Decoding (Dao et al., 2023); tree attention as in
    Medusa (Cai et al., 2024) and EAGLE (Li et al., 2024); latent attention as in DeepSeek-V2 (2024).
    """
    call = resolve(
        q, kv, cu_seqlens_q=cu_seqlens_q, max_query_len=max_query_len, draft_kv=draft_kv, draft_slots=draft_slots,
        mask=mask, scale=scale, softcap=softcap, window=window, sinks=sinks, positions=positions, k_scale=k_scale,
        v_scale=v_scale, out=out, return_lse=return_lse,
    )  # fmt: skip
    with on_device(call.q.device):
        implementation = dispatch.select(call, impl)
        if call.max_query_len > 0 and call.request.num_requests > 0 and call.q.shape[0] > 0:
            implementation.run(call)
            stats.count(implementation.name, "run")
    return call.out if call.lse is None else (call.out, call.lse)


def prepare(request: VerifyRequest, limits: Limits, *, device: torch.device | str = "cuda", impl: str | None = None) -> str:
    """Compile and allocate all that calls like ``request`` within ``limits`` need, so that they can be captured.

    Args:
        request: of one such call, from ``VerifyRequest.of(q, kv, **arguments)``.
        limits: the engine's maxima.
        device: where the calls will run.
        impl: as in :func:`verify_attention`.

    Returns:
        The name of the implementation that serves ``limits.max_requests`` requests. Where others serve smaller batches, they
        are prepared too.

    Raises:
        Declined: none may serve the request. ValueError: ``impl`` is not registered.
    """
    where = torch.device(device)
    with on_device(where):
        policy, info = dispatch.Policy.from_env(impl), DeviceInfo.of(where)
        decision = dispatch.decide(replace(request, num_requests=limits.max_requests), info, policy)
        if decision.winner is None:
            raise Declined(policy.impl or "prepare", decision.reasons)
        sizes = {decision.winner: limits.max_requests}
        if policy.impl is None:
            sizes = {
                dispatch.decide(replace(request, num_requests=n), info, policy).winner or "": n for n in range(1, limits.max_requests + 1)
            }
        for name, most in sizes.items():
            if name:
                registry.get(name).prepare(replace(request, num_requests=most), replace(limits, max_requests=most), where)
    return decision.winner


_HERE = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes the device current: Triton launches on the current one, and it is its stream that may be under capture."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return _HERE
    return torch.cuda.device(device)
