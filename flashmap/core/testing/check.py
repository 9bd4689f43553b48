"""Does an implementation do what the reference says? ``check`` looks at a grid and reports, ``assert_conforms`` raises.

The tolerance: an error of at most twice that of an eager computation in q's dtype, both against the fp32 reference,
plus a small floor. Implementations are called directly, not through the registry, so that a new one needs no name yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashmap.core import reference, registry
from flashmap.core.inputs import Call, resolve
from flashmap.core.interface import Declined, VerifyAttention
from flashmap.core.op import on_device
from flashmap.core.request import DeviceInfo
from flashmap.core.testing.cases import SENTINEL, Case, build, cases

# Of the largest value in the result. fp16 and bf16: one unit of the last place; fp32: summation order over thousands of keys.
_FLOOR = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
_LSE_FLOOR = 1e-4  # of the largest LSE, or absolute below 1: the LSE is fp32 whatever q is


@dataclass(frozen=True, slots=True)
class Expected:
    """The reference's result in fp32, [rows of requests, Hq, Dv] and [.., Hq], and how far it may be missed."""

    out: torch.Tensor
    lse: torch.Tensor
    bound: float
    lse_bound: float


@dataclass(frozen=True, slots=True)
class Result:
    """One case. ``outcome``: "ok", "failed" or "declined"; ``error`` and ``bound`` are those of out; ``reasons`` say why not ok."""

    case: Case
    outcome: str
    error: float = 0.0
    bound: float = 0.0
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.case}: {self.outcome}, error {self.error:.2e}, allowed {self.bound:.2e}"
        return "; ".join((text, *self.reasons))


def check(
    impl: str | VerifyAttention,
    device: torch.device | str = "cpu",
    *,
    dtypes: Sequence[str] = ("fp32", "fp16", "bf16"),
    size: str = "small",
    grid: Iterable[Case] | None = None,
) -> list[Result]:
    """Run the grid (see :func:`cases`), or ``grid``. An exception of the implementation is a failure, not raised."""
    results = []
    for case in cases(device, dtypes, size) if grid is None else grid:
        try:
            results.append(check_case(impl, case, device))
        except Exception as error:  # reported with its case: the rest of the grid is still of interest
            results.append(Result(case, "failed", float("nan"), reasons=(f"{type(error).__name__}: {error}",)))
    return results


def check_case(impl: str | VerifyAttention, case: Case, device: torch.device | str = "cpu") -> Result:
    """One case, freshly built. What the implementation raises is raised."""
    arguments = build(case, device)
    wanted = expected(arguments)
    try:
        out, lse = run(impl, arguments)
    except Declined as declined:
        return Result(case, "declined", reasons=tuple(str(reason) for reason in declined.reasons))
    return compare(case, arguments, wanted, out, lse)


def assert_conforms(impl: str | VerifyAttention, case: Case, device: torch.device | str = "cpu") -> None:
    """AssertionError with error and bound where the case fails; Declined where it is not served."""
    arguments = build(case, device)
    wanted = expected(arguments)
    result = compare(case, arguments, wanted, *run(impl, arguments))
    assert result.outcome == "ok", str(result)


def run(impl: str | VerifyAttention, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse) of one implementation. Raises Declined with its reasons."""
    implementation = registry.get(impl) if isinstance(impl, str) else impl
    call = resolve(**arguments)
    with on_device(call.q.device):
        device = DeviceInfo.of(call.q.device)
        reasons = implementation.why_not(call.request, device)
        if device.capturing and not reasons:
            reasons = implementation.not_ready(call)
        if reasons:
            raise Declined(implementation.name, reasons)
        if call.max_query_len > 0 and call.request.num_requests > 0 and call.q.shape[0] > 0:  # as the op
            implementation.run(call)
    return call.out, call.lse


def expected(arguments: dict[str, Any]) -> Expected:
    """What the reference says in fp32, and how far an eager computation in q's dtype is from it."""
    call = resolve(**{**arguments, "out": None})
    outs, lses, errors, lse_errors = [call.out[:0].float()], [call.q[:0, :, 0].float()], [0.0], [0.0]
    for request in reference.requests_of(call):
        out, lse = reference.attend(call, request)
        eager_out, eager_lse = eager(call, request)
        outs.append(out)
        lses.append(lse)
        errors.append(_distance(eager_out, out))
        lse_errors.append(_distance(eager_lse, lse))
    out, lse = torch.cat(outs), torch.cat(lses)
    floor = _FLOOR[call.q.dtype] * float(out.abs().amax() if out.numel() else 0.0)
    finite = lse[lse.isfinite()].abs()
    lse_floor = _LSE_FLOOR * max(1.0, float(finite.amax()) if finite.numel() else 0.0)
    return Expected(out, lse, 2 * max(errors) + floor, 2 * max(lse_errors) + lse_floor)


def eager(call: Call, request: reference.Request) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) as model code without a fused kernel has it: products in q's dtype, softmax in fp32, weights rounded."""
    dtype, rows = call.q.dtype, request.visible.shape[0]
    keys = request.keys.to(dtype).repeat_interleave(call.request.group, dim=1)
    values = request.values.to(dtype).repeat_interleave(call.request.group, dim=1)
    logits = torch.einsum("thd,nhd->htn", call.q[request.rows], keys) * call.scale
    if call.softcap:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    logits = logits.float().masked_fill(~request.visible, float("-inf"))
    if call.sinks is not None:
        logits = torch.cat((logits, call.sinks.float()[:, None, None].expand(-1, rows, 1)), dim=-1)
        values = torch.cat((values, values.new_zeros(1, *values.shape[1:])))
    weights = torch.softmax(logits, dim=-1).nan_to_num(0.0).to(dtype)
    return torch.einsum("htn,nhd->thd", weights, values).float(), torch.logsumexp(logits, dim=-1).T


def compare(case: Case, arguments: dict[str, Any], wanted: Expected, out: torch.Tensor, lse: torch.Tensor | None) -> Result:
    """The result of a call that has been made on ``arguments``."""
    rows, reasons = wanted.out.shape[0], []
    error = _distance(out[:rows].float(), wanted.out)
    if not error <= wanted.bound:
        reasons.append(f"out is off by {error:.3e}, allowed is {wanted.bound:.3e}")
    if lse is not None:
        lse_error = _distance(lse[:rows], wanted.lse)
        if not lse_error <= wanted.lse_bound:
            reasons.append(f"lse is off by {lse_error:.3e}, allowed is {wanted.lse_bound:.3e}")
    sentinel = torch.tensor(SENTINEL, dtype=out.dtype)
    touched = (out[rows:].cpu() != sentinel).flatten(1).any(1).nonzero().flatten()
    if touched.numel():
        reasons.append(f"rows {(touched + rows).tolist()} lie past the last request and were written")
    if out.data_ptr() != arguments["out"].data_ptr():
        reasons.append("the result is not in the out that was given")
    elif not _gaps_untouched(arguments["out"], sentinel):
        reasons.append("memory between the rows of a strided out was written")
    return Result(case, "failed" if reasons else "ok", error, wanted.bound, tuple(reasons))


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; NaN if any; infinities must be equal."""
    if not a.numel():
        return 0.0
    return float(torch.where(a == b, torch.zeros_like(b), (a - b).abs()).amax())


def _gaps_untouched(out: torch.Tensor, sentinel: torch.Tensor) -> bool:
    """Whether a strided out's buffer still holds the sentinel behind each row's Dv columns."""
    wide = out.stride(1)
    if wide == out.shape[-1] or not out.shape[0]:
        return True
    buffer = out.as_strided((*out.shape[:2], wide), out.stride(), 0)
    return bool((buffer[..., out.shape[-1] :].cpu() == sentinel).all())
