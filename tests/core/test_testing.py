"""The conformance kit finds what is wrong: each test breaks the reference in one way and names a case that shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from flashmap.core import Capability, Declined, Implementation
from flashmap.core.inputs import Call, PagedKV
from flashmap.core.reference import IMPLEMENTATION
from flashmap.core.testing import Case, assert_conforms, build, cases, check, check_case, check_order, check_repeat

GRID = {case.name: case for case in cases(dtypes=("fp32",))}


@dataclass(frozen=True)
class Broken(Implementation):
    break_it: Callable[[Call], Call | None] = field(default=lambda call: call)

    def run(self, call: Call) -> None:
        call = self.break_it(call) or call
        IMPLEMENTATION.run(call)


def shift_lengths(call: Call) -> Call:
    """Reads one key more than is listed."""
    assert isinstance(call.kv, PagedKV)
    return replace(call, kv=replace(call.kv, kv_lens=call.kv.kv_lens + 1))


def write_behind(call: Call) -> None:
    call.out[-1] = 0


def write_between(call: Call) -> None:
    torch.as_strided(call.out, (1,), (1,), call.out.shape[-1])[:] = 0


BREAKS: dict[str, tuple[Callable[[Call], Call | None], str]] = {
    "one key too many": (shift_lengths, "gqa64 draft_kv"),
    "window off by one": (lambda call: replace(call, window=(call.window or 0) + 1), "gqa64 window"),
    "window by row": (lambda call: replace(call, positions=None), "gqa64 window tree"),
    "no mask": (lambda call: replace(call, mask=None), "gqa64 packed"),
    "no sinks": (lambda call: replace(call, sinks=None), "gqa64 sinks"),
    "no softcap": (lambda call: replace(call, softcap=0.0), "gqa64 softcap"),
    "draft K/V scaled": (lambda call: replace(call, draft_k=call.draft_k * call.k_scale), "gqa64 scales draft_kv"),
    "no v_scale": (lambda call: replace(call, v_scale=1.0), "gqa64 fp8_e4m3"),
    "no kv_start": (lambda call: replace(call, kv=replace(call.kv, kv_start=None)), "gqa64 window full"),
    "rows past the last request": (write_behind, "gqa64 chain"),
    "between the rows of out": (write_between, "gqa64 page64 strided"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_is_found(name: str) -> None:
    break_it, case = BREAKS[name]
    assert check_case("reference", GRID[case]).outcome == "ok"
    result = check_case(Broken("broken", break_it=break_it), GRID[case])
    assert result.outcome == "failed" and result.reasons, result
    with pytest.raises(AssertionError, match="allowed"):
        assert_conforms(Broken("broken", break_it=break_it), GRID[case])


def test_twice_the_error_of_eager_is_the_limit() -> None:
    case = Case("noise", dtype="fp16", query_lens=(4,), prefix_lens=(64,))

    @dataclass(frozen=True)
    class Noisy(Implementation):
        amount: float = 0.0

        def run(self, call: Call) -> None:
            IMPLEMENTATION.run(call)
            call.out[:4] += self.amount

    bound = check_case("reference", case).bound
    assert 1e-4 < bound < 1e-2
    assert check_case(Noisy("noisy", amount=bound / 4), case).outcome == "ok"
    assert check_case(Noisy("noisy", amount=bound * 1.5), case).outcome == "failed"


def test_check_reports_and_does_not_raise() -> None:
    class Raises(Implementation):
        def run(self, call: Call) -> None:
            raise RuntimeError("no luck")

    chain = Case("chain")
    (failed,) = check(Raises("raises"), grid=[chain])
    assert failed.outcome == "failed" and failed.reasons == ("RuntimeError: no luck",)
    (declined,) = check(Raises("small", Capability(dtypes=frozenset({"bf16"}))), grid=[chain])
    assert declined.outcome == "declined" and "fp32" in declined.reasons[0]
    with pytest.raises(Declined):
        assert_conforms(Raises("small", Capability(dtypes=frozenset({"bf16"}))), chain)


def test_repeat_and_order_find_what_changes() -> None:
    calls = 0

    class Wobbles(Implementation):
        def run(self, call: Call) -> None:
            nonlocal calls
            calls += 1
            IMPLEMENTATION.run(call)
            call.out[0] += calls * 1e-6

    class FirstIsSpecial(Implementation):
        def run(self, call: Call) -> None:
            IMPLEMENTATION.run(call)
            call.out[0] += 1e-6

    case = Case("two", query_lens=(2, 2), prefix_lens=(20, 9))
    assert check_repeat(Wobbles("wobbles"), case).outcome == "failed"
    assert check_order(FirstIsSpecial("first"), case).outcome == "ok"
    assert check_order(FirstIsSpecial("first"), case, bits=True).outcome == "failed"
    assert check_order("torch_dense", replace(case, prefix_lens=(20, 20))).outcome == "ok"


def test_grid_covers_what_it_promises() -> None:
    grid = list(cases())
    assert {c.dtype for c in grid} == {"fp32", "fp16", "bf16"}
    assert {(c.head_dim, c.v_head_dim or c.head_dim) for c in grid} >= {
        (64, 64),
        (80, 80),
        (96, 96),
        (128, 128),
        (192, 128),
        (256, 256),
        (576, 512),
    }
    assert {(c.mask, c.mask_indptr) for c in grid} >= {
        (None, False),
        ("full", False),
        ("full", True),
        ("qlen", False),
        ("qlen", True),
        ("packed", False),
    }
    assert {c.page_size for c in grid if c.layout == "paged"} >= {1, 16, 48, 64}
    assert {(c.layout, c.draft) for c in grid} == {
        (layout, draft) for layout in ("paged", "slots") for draft in ("cache", "slots", "dense")
    }
    assert {c.kv_dtype for c in grid} == {None, "fp8_e4m3", "fp8_e5m2"} and {c.scales for c in grid} == {"none", "host", "device"}
    assert {c.mask_bytes for c in grid if c.mask in ("full", "qlen")} == {"bool", "uint8", "int8"}
    assert max(max(c.query_lens) for c in grid) > 64 and any(0 in c.query_lens for c in grid)
    full = list(cases(size="full"))
    assert {c.heads for c in full if c.latent} == {16, 128} and any((c.heads, c.kv_heads) == (32, 8) for c in full)
    assert max(max(c.prefix_lens) for c in full) > 4000
    with pytest.raises(ValueError, match="size"):
        list(cases(size="huge"))
    with pytest.raises(ValueError, match="dtypes"):
        list(cases(dtypes=("fp8",)))


def test_same_seed_same_request_in_other_company() -> None:
    case = Case("one", query_lens=(2, 3), prefix_lens=(5, 9), ids=(4, 7))
    a, b = build(case), build(replace(case, query_lens=(3, 2), prefix_lens=(9, 5), ids=(7, 4)))
    assert torch.equal(a["q"][:2], b["q"][3:5]) and torch.equal(a["q"][2:5], b["q"][:3])
    assert not torch.equal(a["q"][:2], build(replace(case, seed=1))["q"][:2])
