"""Where an engine's own kernel is the faster one: what dispatch.choose asks before it prefers ours. Pure.

The table of measured times (flashmap/core/tables/) decides for FlashAttention 3 and FlashMLA; what was not measured stays with the
engine. The engines' Triton kernels are in no table: ours is preferred to them.
"""

from __future__ import annotations

from flashmap.core.request import DeviceInfo, VerifyRequest
from flashmap.core.tables import Table

_COMPARED = ("fa3", "flashmla")


def faster(kernel: str, impl: str, request: VerifyRequest, device: DeviceInfo, table: Table | None) -> str | None:
    """One sentence if the engine's ``kernel`` is faster than ``impl`` for ``request``, or not known to be slower; else None.

    ``kernel``: as "vllm.fa3", of which the part behind the dot counts: an adapter says whose kernel its engine runs. ``table``: that of
    ``device``, None where there is none.
    """
    library = kernel.rpartition(".")[2]
    if library not in _COMPARED or device.type != "cuda":
        return None
    if table is None:
        return f"no table has times of {device.name}, where {kernel} keeps its calls until `flashmap bench --tune` was run"
    why = table.against(library, impl, request)
    if why is None:
        return None
    kind = f"{'MLA' if request.latent else 'GQA'} {'trees' if request.mask else 'chains'}"
    rows = request.group * request.max_query_len
    return (
        f"the engine's own kernel ({kernel}) is the faster one, or not known to be slower, for {kind} with {rows} rows a KV head "
        f"in batches of {request.num_requests}: {why}"
    )
