"""Who is the fastest: times measured on a named GPU by class of shapes, and what follows from them for one request.

dispatch.py asks for our implementations in their order, engines.py whether an engine's kernel is the faster one. A table is a
JSON file that ``flashmap bench --tune`` wrote: the checked-in ones lie beside this file, a user's own in the folder that
:func:`user_file` names. Files are read once a process; what is looked up in a :class:`Table` is pure.
docs/how-it-decides.md has the rule in prose.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmap import env
from flashmap.core.request import DeviceInfo, VerifyRequest

logger = logging.getLogger(__name__)
SCHEMA = 1
OURS = "ours:"  # before the name of an implementation; a name without it is an engine's library
ONE_BLOCK = 64  # packed rows that a program of our kernels holds at most: up to here K and V are read once
TIE = 1.01  # points that stand in two files of benchmarks/results/ differ by up to 0.7 % (H200)
_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Class:
    """Calls that differ in their cached tokens alone. ``us``: {cached tokens: {candidate: µs a call}}.

    ``kv``: "bf16" for a cache of the query's 16 bits, or "fp8". ``requests`` in the batch, of ``tokens`` query tokens each.
    """

    heads: int
    kv_heads: int
    head_dim: int
    latent: bool
    kv: str
    mask: str
    requests: int
    tokens: int
    us: Mapping[int, Mapping[str, float]]

    @property
    def rows(self) -> int:
        """Query rows that share a KV head: what a kernel packs into one tile."""
        return self.heads // self.kv_heads * self.tokens

    @property
    def kind(self) -> str:
        return kind_of(self.kv_heads, self.latent)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(heads, kv_heads, head_dim)"""
        return self.heads, self.kv_heads, self.head_dim

    def __str__(self) -> str:
        kv = "" if self.kv == "bf16" else f" {self.kv}"
        return f"{self.kind} {self.heads}/{self.kv_heads} d{self.head_dim}{kv} {self.mask}, {self.requests} x {self.tokens} tokens"

    def pairs(self, first: str, second: str) -> list[tuple[int, float, float]]:
        """(cached tokens, µs of ``first``, µs of ``second``) wherever both were measured."""
        return [(cached, us[first], us[second]) for cached, us in self.us.items() if first in us and second in us]


@dataclass(frozen=True, slots=True)
class Left:
    """Calls that stay with an engine's ``kernel`` ("fa3") whatever the times of the op alone say, and the measurement behind that."""

    kernel: str
    kind: str
    mask: str
    why: str
    results: str


@dataclass(frozen=True, eq=False)
class Table:
    """Measured times of one GPU with their provenance. ``source``: the file it was read from.

    ``versions``: of torch, Triton, the driver and each candidate; ``results``: the results files that it follows from.
    """

    gpu: str
    capability: tuple[int, int]
    sm_count: int
    date: str
    versions: Mapping[str, str]
    results: tuple[str, ...]
    classes: tuple[Class, ...]
    left: tuple[Left, ...] = ()
    source: str = ""

    def speaking(self, request: VerifyRequest) -> tuple[Class, ...]:
        """The measured classes that speak for ``request``, the one that covers it last; none: nothing like it was measured.

        Requests and tokens are upper bounds when a choice is made (graphs are padded, batches ragged), so every class with
        fewer of both speaks too.
        """
        kv = _cache_of(request)
        mask = "chain" if request.mask is None else "tree"
        wanted = (kind_of(request.kv_heads, request.latent), mask, kv)
        same = [c for c in self.classes if (c.kind, c.mask, c.kv) == wanted]
        if not same or request.window is not None:
            return ()
        shape = min((c.shape for c in same), key=lambda s: (_distance(s, request), s))
        same = [c for c in same if c.shape == shape]
        rows = request.group * request.max_query_len
        sizes = sorted({c.rows for c in same})
        cover = next((n for n in sizes if n >= rows), None)
        if rows <= ONE_BLOCK and (cover is None or cover > ONE_BLOCK):
            cover = max((n for n in sizes if n <= ONE_BLOCK), default=cover)
        if cover is None:
            return ()
        batches = sorted({c.requests for c in same if c.rows == cover and (c.requests > 1 or request.num_requests == 1)})
        if not batches:
            return ()
        most = next((n for n in batches if n >= request.num_requests), batches[-1])
        return tuple(sorted((c for c in same if c.rows <= cover and c.requests <= most), key=lambda c: (c.rows, c.requests)))

    def order(self, request: VerifyRequest) -> tuple[str, ...]:
        """Our implementations measured for such a request, the fastest first: by the mean of log(time) over the lengths."""
        speaking = self.speaking(request)
        if not speaking:
            return ()
        us = speaking[-1].us
        names = {name for times in us.values() for name in times if name.startswith(OURS)}
        complete = [name for name in names if all(name in times for times in us.values())]
        mean = {name: sum(math.log(times[name]) for times in us.values()) for name in complete}
        return tuple(name.removeprefix(OURS) for name in sorted(complete, key=lambda name: (mean[name], name)))

    def against(self, library: str, impl: str, request: VerifyRequest) -> str | None:
        """Why ``library`` is not known to be slower than ``impl`` for ``request``; None: ours won or tied at every length measured."""
        mask = "chain" if request.mask is None else "tree"
        for left in self.left:
            if (left.kernel, left.kind, left.mask) == (library, kind_of(request.kv_heads, request.latent), mask):
                return f"{left.why} ({left.results})"
        speaking = self.speaking(request)
        theirs = library if mask == "chain" else f"{library}_cascade"  # what an engine does with a tree
        if not speaking or not speaking[-1].pairs(OURS + impl, theirs):
            return f"nothing like it was measured on {self.gpu}"
        for one in speaking:
            unknown = [cached for cached, us in one.us.items() if theirs in us and OURS + impl not in us]
            if unknown:
                return f"{one} on {unknown[0]} cached was not measured with {impl}, on {self.gpu}"
            for cached, our_us, their_us in one.pairs(OURS + impl, theirs):
                if our_us > TIE * their_us:
                    return f"{one} on {cached} cached took {our_us:.1f} µs with {impl} and {their_us:.1f} with {theirs}, on {self.gpu}"
        return None

    def to_json(self) -> str:
        """The file's text, a class a line."""
        facts: dict[str, Any] = {"schema": SCHEMA, "gpu": self.gpu, "capability": self.capability, "sm_count": self.sm_count}
        facts |= {"date": self.date, "versions": dict(self.versions), "results": self.results}
        lists = {"left": [_fields(one) for one in self.left], "classes": [_fields(one) for one in self.classes]}
        lines = [f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in facts.items()]
        for name, items in lists.items():
            lines.append(f" {json.dumps(name)}: [" + ",".join(f"\n  {json.dumps(item, ensure_ascii=False)}" for item in items) + "]")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, source: str = "") -> Table:
        """The table in ``text``. Raises ValueError saying what is wrong with it."""
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise ValueError(f"its schema is {data['schema']!r}, this version reads {SCHEMA}: write it anew with flashmap bench --tune")
            classes = tuple(_class(one) for one in data["classes"])
            left = tuple(Left(**one) for one in data["left"])
            capability = (int(data["capability"][0]), int(data["capability"][1]))
            facts = (str(data["gpu"]), capability, int(data["sm_count"]), str(data["date"]), dict(data["versions"]))
            return cls(*facts, tuple(data["results"]), classes, left, source)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"it lacks a part or has one of the wrong type: {type(error).__name__}: {error}") from error


def kind_of(kv_heads: int, latent: bool) -> str:
    """ "mla", "mqa" (one KV head) or "gqa"."""
    return "mla" if latent else "mqa" if kv_heads == 1 else "gqa"


def in_force(device: DeviceInfo) -> Table | None:
    """The table for ``device``: FLASHMAP_TABLE, else the user's own, else the checked-in one; None: its GPU is in none of them.

    Read once a process. A file of those two that cannot be used is said in one WARNING, and the checked-in table is taken.
    """
    return _in_force(device.name) if device.type == "cuda" else None


def user_file(gpu: str) -> Path:
    """Where ``flashmap bench --tune`` writes the table of a GPU of that name: $XDG_CONFIG_HOME/flashmap, else ~/.config/flashmap."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "flashmap" / _file_name(gpu)


def checked_in(gpu: str) -> Table | None:
    """The table of that GPU which comes with the package, or None."""
    path = _FOLDER / _file_name(gpu)
    return Table.from_json(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else None


@functools.cache
def _in_force(gpu: str) -> Table | None:
    named = env.get("FLASHMAP_TABLE")
    path: Path | None = None
    try:
        path = Path(named) if named else user_file(gpu)
        table = Table.from_json(path.read_text(encoding="utf-8"), str(path))
        if table.gpu != gpu:
            raise ValueError(f"it is of {table.gpu!r}, this is {gpu!r}")
        return table
    except FileNotFoundError:
        if named:
            logger.warning("flashmap: there is no table of measured times %s, which FLASHMAP_TABLE names", named)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: nobody knows this user's home directory
        logger.warning("flashmap: the table of measured times %s is left out: %s", path or f"of this user for {gpu}", error)
    return checked_in(gpu)


def _file_name(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def _cache_of(request: VerifyRequest) -> str | None:
    if request.kv_dtype.startswith("fp8"):
        return "fp8"
    return "bf16" if request.kv_dtype == request.dtype != "fp32" else None


def _distance(shape: tuple[int, int, int], request: VerifyRequest) -> float:
    """Of two shapes of one kind: factors between query heads a KV head, KV heads, and head dimensions."""
    heads, kv_heads, head_dim = shape
    factors = (heads / kv_heads / request.group, kv_heads / request.kv_heads, head_dim / request.head_dim)
    return sum(abs(math.log2(factor)) for factor in factors)


def _fields(one: Class | Left) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__slots__}


def _class(data: dict[str, Any]) -> Class:
    """One line of a file. Its numbers are checked here, so that a lookup cannot fail."""
    one = Class(**{**data, "us": {int(cached): dict(times) for cached, times in data["us"].items()}})
    numbers = (one.heads, one.kv_heads, one.head_dim, one.requests, one.tokens, *(us for times in one.us.values() for us in times.values()))
    if not one.us or not all(isinstance(n, int | float) and n > 0 for n in numbers):
        raise ValueError(f"a number in the class {data} is not above zero")
    return one
