"""The benchmark's points: shapes, batches and what no kernel can beat on an H200. No torch, no GPU.

`run.py` times them. A point is one call of the op: `bs` requests with `ctx` cached tokens and `length` query tokens each.
`TABLE` is the main table, `SWEEPS` goes along one axis after another, `TUNE` are the classes that a table of measured times is made of;
`features()` are pairs of points whose ratio says what a property of the input costs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

# Ceilings of one H200: a device copy moves 4.26 TB/s, a read 4.39; a large bf16 product runs at 770 to 800 TFLOP/s.
BYTES_PER_US = 4.3e6
FLOPS_PER_US = 780e6
CONTEXT_OF_THE_SHORT = 64  # "one-long": every request but the first has this many cached tokens
RAGGED = (0.25, 1.75, 1.0, 1.0, 0.5, 1.5, 0.75, 1.25)  # "ragged": query tokens of request r, in units of `length`; mean 1


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads and head sizes of one layer on one GPU. `latent`: one KV head whose V is the first columns of K (MLA)."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    latent: bool = False

    @property
    def values_per_key(self) -> int:
        """Elements that the cache holds per token."""
        return self.kv_heads * (self.head_dim if self.latent else self.head_dim + self.v_head_dim)

    @classmethod
    def named(cls, name: str) -> Shape:
        """The shape of a name such as "gqa32/8" (d128), "gqa64/8d256" or "mla16". Raises ValueError for any other."""
        found = re.fullmatch(r"mla(\d+)|gqa(\d+)/(\d+)(?:d(\d+))?", name)
        if found is None:
            raise ValueError(f"shape {name!r} is not understood: write it like gqa32/8, gqa64/8d256 or mla16")
        latent_heads, heads, kv_heads, head_dim = (int(number) if number else 0 for number in found.groups())
        if latent_heads:
            return cls(name, latent_heads, 1, 576, 512, latent=True)
        if not kv_heads or not heads or heads % kv_heads:
            raise ValueError(f"shape {name!r}: {heads} heads are no multiple of {kv_heads} KV heads")
        return cls(name, heads, kv_heads, head_dim or 128, head_dim or 128)


SHAPES = GQA_32_8, GQA_8_1, MLA_16, MLA_128 = tuple(map(Shape.named, ("gqa32/8", "gqa8/1", "mla16", "mla128")))


@dataclass(frozen=True, slots=True)
class Point:
    """One call. `kv` is the cache's dtype ("bf16" or "fp8"), `spread` one of "uniform", "ragged" and "one-long"."""

    shape: Shape
    bs: int
    length: int
    ctx: int
    tree: bool = False
    page: int = 64
    kv: str = "bf16"
    spread: str = "uniform"

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Point:
        """The point of a results file's record."""
        facts = (record["bs"], record["L"], record["ctx"], record["mask"] == "tree", record["page"], record["kv"], record["lens"])
        return cls(Shape.named(record["shape"]), *facts)

    @property
    def mask(self) -> str:
        return "tree" if self.tree else "chain"

    @property
    def label(self) -> str:
        """What --points matches, and the table's first column."""
        extra = [f"page{self.page}" if self.page != 64 else "", self.kv if self.kv != "bf16" else ""]
        extra.append(self.spread if self.spread != "uniform" else "")
        return " ".join([self.shape.name, f"bs{self.bs}", f"L{self.length}", f"ctx{self.ctx}", self.mask, *filter(None, extra)])

    @property
    def query_lens(self) -> list[int]:
        if self.spread != "ragged":
            return [self.length] * self.bs
        return [max(1, round(self.length * RAGGED[r % len(RAGGED)])) for r in range(self.bs)]

    @property
    def prefix_lens(self) -> list[int]:
        if self.spread != "one-long":
            return [self.ctx] * self.bs
        return [self.ctx] + [CONTEXT_OF_THE_SHORT] * (self.bs - 1)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cache that one call reads: prefix and draft tokens."""
        size = 1 if self.kv == "fp8" else 2
        return (sum(self.prefix_lens) + sum(self.query_lens)) * self.shape.values_per_key * size

    @property
    def rows(self) -> int:
        """Query rows that share a KV head."""
        return self.shape.heads // self.shape.kv_heads * self.length

    @property
    def moved_bytes(self) -> int:
        """Bytes that one call has to move: what it reads of the cache, the queries and the output."""
        return self.kv_bytes + 2 * self._row * sum(self.query_lens)

    @property
    def _row(self) -> int:
        """Elements of q and out of one token, which are the multiply-adds for one key too."""
        return self.shape.heads * (self.shape.head_dim + self.shape.v_head_dim)

    @property
    def floor_us(self) -> float:
        """The larger of memory time and arithmetic time on an H200. A draft token sees half of the other draft tokens on average."""
        seen = sum(n * (p + n / 2) for n, p in zip(self.query_lens, self.prefix_lens, strict=True))
        return max(self.moved_bytes / BYTES_PER_US, 2 * self._row * seen / FLOPS_PER_US)


GEOMETRY = ((1, 4, 1024), (1, 4, 8192), (1, 17, 8192), (1, 64, 32768), (1, 17, 65536), (8, 4, 8192), (8, 17, 8192), (32, 4, 4096))
TABLE = tuple(Point(shape, bs, length, ctx, tree) for shape in SHAPES for bs, length, ctx in GEOMETRY for tree in (False, True))
# A minute's worth: every shape and mask, a small, a long and a large batch.
QUICK = tuple(p for p in TABLE if (p.bs, p.length, p.ctx) in ((1, 4, 1024), (1, 17, 65536), (8, 17, 8192)))


def sweep(
    shapes: Iterable[Shape] = (GQA_32_8,),
    *,
    batches: Iterable[int] = (1,),
    lengths: Iterable[int] = (4,),
    contexts: Iterable[int] = (8192,),
    masks: Iterable[str] = ("chain", "tree"),
    kvs: Iterable[str] = ("bf16",),
    pages: Iterable[int] = (64,),
    spreads: Iterable[str] = ("uniform",),
) -> list[Point]:
    """Every combination, those of one class (which differ in their cached tokens alone) after one another."""
    axes = product(shapes, kvs, pages, spreads, batches, lengths, masks, contexts)
    return [Point(shape, bs, n, ctx, mask == "tree", page, kv, spread) for shape, kv, page, spread, bs, n, mask, ctx in axes]


def _sweeps() -> tuple[Point, ...]:
    points: list[Point] = []
    for shape in map(Shape.named, ("gqa32/8", "gqa28/4", "gqa64/8", "gqa8/1", "gqa32/8d64", "gqa32/8d256", "mla16", "mla32", "mla128")):
        points += sweep([shape], lengths=[8], contexts=[1024 << n for n in range(8)])
        points += sweep([shape], batches=[1 << n for n in range(7)])
        points += sweep([shape], lengths=[1 << n for n in range(7)], contexts=[16384])
        points += sweep([shape], batches=[8], kvs=("bf16", "fp8"))
        points += sweep([shape], batches=[8], pages=(1, 16))
        points += sweep([shape], batches=[8], spreads=("ragged",))
    return tuple(dict.fromkeys(points))


def _tune() -> tuple[Point, ...]:
    points: list[Point] = []
    for shape in map(Shape.named, ("gqa32/8", "gqa64/8", "gqa8/1", "mla16", "mla128")):
        points += sweep([shape], batches=(1, 8, 32), lengths=(4, 8, 17), contexts=(1024, 8192, 32768))
        points += sweep([shape], batches=(1, 8), lengths=(32, 64), contexts=(8192, 32768))
        points += sweep([shape], batches=(1, 8), lengths=(4, 17), contexts=(8192, 32768), kvs=("fp8",))
    return tuple(points)


SWEEPS, TUNE = _sweeps(), _tune()
SETS = {"quick": QUICK, "all": TABLE, "sweeps": SWEEPS, "tune": TUNE, "none": ()}


def select(text: str) -> list[Point]:
    """The points for --points: a set, a regular expression over the main table's labels, or SET:REGEX. Raises ValueError."""
    name, _, pattern = text.partition(":")
    if name not in SETS:
        name, pattern = "all", text
    try:
        found = [p for p in SETS[name] if re.search(pattern, p.label)]
    except re.error as error:
        raise ValueError(f"--points {text!r} is no regular expression: {error}") from None
    if not found and name != "none":
        labels = f"the {len(SETS[name])} labels of {name!r}, such as {SETS[name][0].label!r}"
        raise ValueError(f"--points {text!r} matches none of {labels}; sets: {', '.join(SETS)}")
    return found


@dataclass(frozen=True, slots=True)
class Ratio:
    """A feature row: time of `other` over time of `base`, and what it may be at most (None: no goal)."""

    group: str
    base: Point
    other: Point
    at_most: float | None


def features() -> dict[str, list[Ratio]]:
    """Feature rows by group. The goals are the project's (docs: performance)."""
    gqa, mla = Point(GQA_32_8, 8, 4, 8192), Point(MLA_16, 8, 4, 8192)
    full = replace(gqa, bs=32)  # 1.07 GB of keys and values in bf16
    alone = Point(GQA_32_8, 1, 4, 65536)
    rows: list[Ratio] = []
    for base in (full, replace(full, tree=True), replace(mla, bs=32)):
        goal = 1 / 1.6 if not base.shape.latent else None
        rows.append(Ratio("fp8", base, replace(base, kv="fp8"), goal))
    for base in (gqa, replace(gqa, tree=True), mla):
        rows += [Ratio("page", base, replace(base, page=size), 1.03) for size in (1, 16)]
    for base in (Point(GQA_32_8, 32, 4, 4096), Point(GQA_32_8, 32, 4, 4096, tree=True), Point(MLA_16, 32, 4, 4096)):
        rows.append(Ratio("ragged", base, replace(base, spread="ragged"), 1.03))
    for base in (Point(GQA_32_8, 1, 1, 16384), Point(GQA_32_8, 8, 1, 16384), Point(GQA_8_1, 8, 1, 16384)):
        lengths = [n for n in (2, 4, 8, 16) if n * base.shape.heads // base.shape.kv_heads <= 64]
        rows += [Ratio("length", base, replace(base, length=n), 1.05) for n in lengths]
    for tree in (False, True):
        base = replace(alone, tree=tree)
        rows.append(Ratio("imbalance", base, replace(base, bs=32, spread="one-long"), 2.5))
    groups: dict[str, list[Ratio]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return groups
