"""A table of measured times from results files: what ``flashmap bench --tune`` writes, and what the checked-in tables are made with.

It needs no GPU. Each results file is one run, and times are compared within a run alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from flashmap.bench.points import Shape
from flashmap.core.tables import OURS, Class, Left, Table

LIBRARIES = ("fa3", "fa3_cascade", "flashmla")  # the peers that are an engine's own kernels, as engines.py asks for them
PAGE = 64  # other page sizes, and ragged batches, are measured as properties of a kernel, not as classes of their own

# What whole engines showed, which the time of the op alone does not: it is part of every table.
LEFT = (
    Left(
        library="fa3",
        kind="gqa",
        mask="chain",
        why="with FLASH_ATTN vLLM took 1.0 to 1.7 % longer a step with ours, in chains of 8 at 8k and 32k",
        results="2026-12-01-h200-engines/vllm-steps.jsonl",
    ),
)

# Results of before 2026-12-01 leave these facts out: one H200, and one kernel that the automatic choice could take.
_UNSAID: dict[str, Any] = {"impl": "triton_splitkv", "capability": (9, 0), "sm_count": 132}

# {(shape, cache, mask, requests, tokens): {cached tokens: {candidate: µs}}}
_Times: TypeAlias = dict[tuple[str, str, str, int, int], dict[int, dict[str, float]]]


def derive(files: Sequence[Path]) -> Table:
    """The table that follows from results files of one GPU; where two have the same point, the later file counts.

    Raises ValueError for files of different GPUs, and for those without a time.
    """
    times: _Times = {}
    facts: dict[str, Any] = {}
    versions: dict[str, str] = {}
    for file in files:
        run: _Times = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            record = _UNSAID | json.loads(line)
            name = _candidate(record)
            if name is None or "us" not in record or (record["page"], record["lens"]) != (PAGE, "uniform"):
                continue
            if facts and record["gpu"] != facts["gpu"]:
                raise ValueError(f"{file} is of {record['gpu']!r}, not of {facts['gpu']!r}: a table is of one GPU")
            facts = record
            versions |= {name: record["version"]} | {part: record[part] for part in ("torch", "triton", "driver", "commit")}
            key = (record["shape"], record["kv"], record["mask"], record["bs"], record["L"])
            point = run.setdefault(key, {}).setdefault(record["ctx"], {})
            if record["who"] != OURS + "auto" or name not in point:  # who is named counts more than the automatic choice
                point[name] = round(record["us"], 2)
        for key, lengths in run.items():
            times.setdefault(key, {}).update(lengths)
    if not times:
        raise ValueError(f"no time of ours or of {', '.join(LIBRARIES)} stands in {', '.join(map(str, files)) or 'no file'}")
    classes = (_class(*key, lengths) for key, lengths in times.items())
    return Table(
        gpu=facts["gpu"],
        capability=tuple(facts["capability"]),
        sm_count=facts["sm_count"],
        date=facts["date"],
        versions=versions,
        results=tuple(file.name for file in files),
        classes=tuple(sorted(classes, key=lambda c: (c.latent, c.shape, c.kv, c.mask, c.requests, c.tokens))),
        left=LEFT,
    )


def _candidate(record: dict[str, Any]) -> str | None:
    """A record's name in the table; None: it is in none."""
    who: str = record["who"]
    if who == OURS + "auto":
        return OURS + str(record["impl"])
    return who if who.startswith(OURS) or who in LIBRARIES else None


def _class(shape: str, kv: str, mask: str, requests: int, tokens: int, us: dict[int, dict[str, float]]) -> Class:
    s = Shape.named(shape)
    return Class(s.heads, s.kv_heads, s.head_dim, s.latent, kv, mask, requests, tokens, dict(sorted(us.items())))
