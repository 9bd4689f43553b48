"""Where an engine's own kernel is the faster one: what dispatch.choose asks before it prefers ours. Pure.

From benchmarks/results/2026-11-30-h200-op.jsonl, bf16 on one H200: FlashAttention 3 and FlashMLA against ours for chains, and for
trees against what SGLang's fa3 backend does with them (two calls and a merge). A batch's lengths are not known when a choice is
made, so a class of shapes is ours only where it won at every length that was measured. What was not measured stays with the engine.

The engines' Triton kernels are not in those results and not in this table: ours is preferred to them.
"""

from __future__ import annotations

from flashmap.core.request import DeviceInfo, VerifyRequest


def faster(kernel: str, request: VerifyRequest, device: DeviceInfo) -> str | None:
    """One sentence if the engine's ``kernel`` is the faster one for ``request``, else None.

    ``kernel``: "engine.library", of which the library counts: an adapter says whose kernel its engine runs.
    """
    library = kernel.rpartition(".")[2]
    if library not in _COMPARED or device.type != "cuda":
        return None
    if device.capability[0] != 9:
        return f"{kernel} was compared on compute capability 9.0 alone, this is {'.'.join(map(str, device.capability))}"
    rows = request.group * request.max_query_len
    if request.window is not None or request.kv_dtype != request.dtype:
        ours = False  # not measured
    elif library == "flashmla":
        ours = request.mask is None and request.num_requests == 1 and rows <= 64
    elif request.mask is None:
        ours = not request.latent and request.num_requests == 1 and rows <= (136 if request.kv_heads == 1 else 32)
    elif request.latent:
        ours = rows <= 64 or (request.num_requests == 1 and request.max_query_len <= 8)
    else:
        ours = rows <= (136 if request.kv_heads == 1 else 64)
    if ours:
        return None
    kind = f"{'trees' if request.mask else 'chains'} with {rows} rows a KV head in batches of {request.num_requests}"
    return (
        f"the engine's own kernel ({kernel}) is the faster one, or not known to be slower, for {'MLA' if request.latent else 'GQA'} {kind}"
    )


_COMPARED = ("fa3", "flashmla")
