"""Counters of what was run and what was not, per (implementation, outcome, reason code).

Outcomes: "run" (the op launched it), "declined" (asked and refused), and an adapter's "routed" and "left"
(a call that went to the op, a call left to the engine). Plain integers of this process; cheap enough for every call.
"""

from __future__ import annotations

from collections import Counter

_counts: Counter[tuple[str, str, str]] = Counter()


def count(implementation: str, outcome: str, code: str = "", times: int = 1) -> None:
    _counts[(implementation, outcome, code)] += times


def snapshot() -> dict[tuple[str, str, str], int]:
    """A copy: {(implementation, outcome, reason code): times}."""
    return dict(_counts)


def reset() -> None:
    _counts.clear()
