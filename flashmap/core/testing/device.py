"""The same call more than once: replayed from a CUDA graph, again, in another order of requests, on two streams.

Each function returns the results that do not conform as one failed :class:`Result` with the reasons, or an "ok" one.
``check_replay`` and ``check_streams`` need a CUDA device; the others run anywhere. Declined is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from flashmap.core import registry
from flashmap.core.interface import VerifyAttention
from flashmap.core.request import Limits, VerifyRequest
from flashmap.core.testing.cases import SENTINEL, Case, build
from flashmap.core.testing.check import Result, compare, expected, run


def check_replay(impl: str | VerifyAttention, case: Case, device: torch.device | str = "cuda", *, replays: Sequence[Case] = ()) -> Result:
    """Prepare, capture ``case``, then replay it on other lengths, tables, masks and contents in the same buffers.

    ``replays``: cases of the same static shape and no larger anywhere; default: :func:`smaller_cases`. Between replays all
    buffers are overwritten, with poison where the new case lists nothing.
    """
    implementation = registry.get(impl) if isinstance(impl, str) else impl
    static = build(case, device)
    limits = Limits(len(case.query_lens) + case.padded, max(static["max_query_len"], 1), max((*case.listed, 1)))
    implementation.prepare(VerifyRequest.of(**static), limits, torch.device(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(implementation, static)
    results = []
    for replay in (case, *(replays or smaller_cases(case)), case):
        _refill(static, build(replay, device, like=case))
        static["out"].fill_(SENTINEL)
        if lse is not None:
            lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        results.append(compare(replay, static, expected(static), out, lse))
    return _worst(case, results)


def smaller_cases(case: Case) -> tuple[Case, ...]:
    """Other contents; shorter queries and prefixes; half of the requests gone, as when a batch shrinks."""
    queries, prefixes, half = case.query_lens, case.prefix_lens, len(case.query_lens) // 2
    shorter = tuple(p - p // 3 if p > 0 else p for p in prefixes)
    fewer = tuple(n if r < half else 0 for r, n in enumerate(queries))
    return (
        replace(case, seed=case.seed + 1),
        replace(case, seed=case.seed + 2, query_lens=tuple(max(n - 1, min(n, 1)) for n in queries), prefix_lens=shorter),
        replace(
            case,
            seed=case.seed + 3,
            query_lens=fewer,
            prefix_lens=tuple(p if n else min(p, 1) for p, n in zip(prefixes, fewer, strict=True)),
        ),
        replace(case, seed=case.seed + 4, query_lens=(0,) * len(queries), prefix_lens=(0,) * len(queries)),
    )


def check_repeat(impl: str | VerifyAttention, case: Case, device: torch.device | str = "cpu", *, times: int = 5) -> Result:
    """The same call gives the same bits."""
    arguments = build(case, device)
    rows = sum(case.query_lens)
    first, *others = [_bits(*run(impl, {**arguments, "out": arguments["out"].clone()}), slice(0, rows)) for _ in range(times)]
    changed = sum(not torch.equal(first, other) for other in others)
    reasons = (f"{changed} of {times - 1} repetitions gave other bits",) if changed else ()
    return Result(case, "failed" if changed else "ok", reasons=reasons)


def check_order(impl: str | VerifyAttention, case: Case, device: torch.device | str = "cpu", *, bits: bool = False) -> Result:
    """A request's rows do not depend on its company: as given, in reverse order, and each request alone.

    ``bits``: they must be the same bits; else each must conform by itself.
    """
    ids = case.ids or tuple(range(len(case.query_lens)))
    as_given, *others = [tuple(range(len(ids))), tuple(reversed(range(len(ids)))), *[(r,) for r in range(len(ids)) if case.query_lens[r]]]
    rows: dict[int, torch.Tensor] = {}
    results, reasons = [], []
    for order in (as_given, *others):
        part = replace(
            case,
            ids=tuple(ids[r] for r in order),
            query_lens=tuple(case.query_lens[r] for r in order),
            prefix_lens=tuple(case.prefix_lens[r] for r in order),
        )
        arguments = build(part, device, like=case)
        out, lse = run(impl, arguments)
        results.append(compare(part, arguments, expected(arguments), out, lse))
        start = 0
        for r in order:
            found = _bits(out, lse, slice(start, start + case.query_lens[r]))
            start += case.query_lens[r]
            if bits and not torch.equal(rows.setdefault(r, found), found):
                reasons.append(f"request {r} gives other bits in the order {order}")
    worst = _worst(case, results)
    return replace(worst, outcome="failed", reasons=(*worst.reasons, *reasons)) if reasons else worst


def check_streams(impl: str | VerifyAttention, case: Case, device: torch.device | str = "cuda", *, times: int = 20) -> Result:
    """Calls on two streams at once give the bits that they give one after the other."""
    both = [build(case, device), build(replace(case, seed=case.seed + 1), device)]
    rows = slice(0, sum(case.query_lens))
    wanted = [_bits(*run(impl, {**arguments, "out": arguments["out"].clone()}), rows) for arguments in both]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in both]  # type: ignore[no-untyped-call]  # torch's own
    wrong = 0
    for _ in range(times):
        found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for arguments, stream in zip(both, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(impl, arguments))
        torch.cuda.synchronize()
        wrong += sum(not torch.equal(_bits(*f, rows), w) for f, w in zip(found, wanted, strict=True))
    reasons = (f"{wrong} of {2 * times} calls gave other bits",) if wrong else ()
    return Result(case, "failed" if wrong else "ok", reasons=reasons)


def _refill(static: Any, fresh: Any) -> None:
    """Copy every tensor of one set of arguments into the other's memory."""
    if isinstance(static, torch.Tensor):
        if static.dtype.itemsize == 1:
            static, fresh = static.view(torch.uint8), fresh.view(torch.uint8)
        static.copy_(fresh)
    elif isinstance(static, dict):
        for key, value in static.items():
            _refill(value, fresh[key])
    elif isinstance(static, tuple):
        for a, b in zip(static, fresh, strict=True):
            _refill(a, b)
    elif is_dataclass(static):
        for field in fields(static):
            _refill(getattr(static, field.name), getattr(fresh, field.name))


def _bits(out: torch.Tensor, lse: torch.Tensor | None, rows: slice) -> torch.Tensor:
    """out and lse of some rows as they are in memory, in one tensor to compare."""
    parts = [out[rows].contiguous().view(torch.uint8).flatten()]
    if lse is not None:
        parts.append(lse[rows].contiguous().view(torch.uint8).flatten())
    return torch.cat(parts)


def _worst(case: Case, results: list[Result]) -> Result:
    failed = [result for result in results if result.outcome != "ok"]
    worst = max(results, key=lambda result: result.error / (result.bound or 1.0))
    reasons = tuple(f"{result.case} (seed {result.case.seed}): {reason}" for result in failed for reason in result.reasons)
    return Result(case, "failed" if failed else "ok", worst.error, worst.bound, reasons)
