"""Sizes of blocks, which Triton wants as powers of two. No torch, no triton."""

from __future__ import annotations

from flashmap.core.request import VerifyRequest


def head_split(request: VerifyRequest) -> tuple[int, int, int, int]:
    """(span, d1, d2, dv): the head dimension in two products, of the first ``span`` columns and of the rest (d2 0: none), and V's.

    d1, d2 and dv are padded to what a product takes. A head dimension is never padded to the next power of two: 576 is
    512 + 64, 80 is 64 + 16.
    """
    dk, dv = request.head_dim, request.v_head_dim
    if request.latent:  # the first product takes the columns that are V too, so that one tile serves both
        span, d1 = dv, max(16, power_of_two(dv))
    else:
        d1 = max(16, 1 << (dk.bit_length() - 1))
        span = min(dk, d1)
    rest = dk - span
    return span, d1, max(16, power_of_two(rest)) if rest else 0, max(16, power_of_two(dv))


def power_of_two(n: int) -> int:
    """The smallest one that is not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()
