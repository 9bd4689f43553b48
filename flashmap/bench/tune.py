"""A table of measured times from results: what ``flashmap bench --tune`` writes, and what the checked-in tables are made with.

It needs no GPU. Each results file is one run, and times are compared within a run alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from flashmap.bench.points import Shape
from flashmap.core.request import VerifyRequest
from flashmap.core.tables import OURS, Class, Left, Table

LIBRARIES = ("fa3", "fa3_cascade", "flashmla")  # the peers that are an engine's own kernels, as engines.py asks for them
PAGE = 64  # other page sizes, and ragged batches, are measured as properties of a kernel, not as classes of their own

# What whole engines showed, which the time of the op alone does not: it is part of every table.
LEFT = (
    Left(
        kernel="fa3",
        kind="gqa",
        mask="chain",
        why="with FLASH_ATTN vLLM took 1.0 to 1.7 % longer a step with ours, in chains of 8 at 8k and 32k",
        results="2026-12-01-h200-engines/vllm-steps.jsonl",
    ),
    Left(
        kernel="fa3",
        kind="mla",
        mask="chain",
        why="no whole engine has shown its chains to be faster with ours",
        results="2026-12-01-h200-engines/vllm-steps.jsonl",
    ),
    Left(
        kernel="fa3",
        kind="mla",
        mask="tree",
        why="SGLang's step of DeepSeek's shape took 2 to 32 % longer with ours, at 32k and 8k, measured once",
        results="2026-12-01-h200-engines/sglang-steps.jsonl",
    ),
)

# Results of before 2026-12-01 leave these facts out: one H200, and one kernel that the automatic choice could take.
_UNSAID: dict[str, Any] = {"impl": "triton_splitkv", "capability": (9, 0), "sm_count": 132}

# {(shape, cache, mask, requests, tokens): {cached tokens: {candidate: µs}}}
_Times: TypeAlias = dict[tuple[str, str, str, int, int], dict[int, dict[str, float]]]


def read(files: Iterable[Path]) -> dict[str, list[dict[str, Any]]]:
    """The records of results files by the file's name, as :func:`derive` takes them.

    Raises ValueError for a line that is none, and for two files of one name, which a table could not tell apart.
    """
    runs: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        if file.name in runs:
            raise ValueError(f"{file} has the name of another results file: rename one")
        try:
            runs[file.name] = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read as JSON Lines: {error}") from None
        if not all(isinstance(record, dict) and "who" in record for record in runs[file.name]):
            raise ValueError(f"{file} has lines that are no measurement of flashmap bench")
    return runs


def derive(runs: Mapping[str, Iterable[Mapping[str, Any]]]) -> Table:
    """The table that follows from runs on one GPU, {results file: its records}; where two have the same point, the later one counts.

    Raises ValueError for runs on different GPUs, for those with kernels' variables set, and for those without a time.
    """
    times: _Times = {}
    facts: dict[str, Any] = {}
    versions: dict[str, str] = {}
    for file, records in runs.items():
        run: _Times = {}
        for record in (_UNSAID | dict(one) for one in records):
            name = _candidate(record)
            if name is None or "us" not in record or (record["page"], record["lens"]) != (PAGE, "uniform"):
                continue
            if facts and record["gpu"] != facts["gpu"]:
                raise ValueError(f"{file} is of {record['gpu']!r}, not of {facts['gpu']!r}: a table is of one GPU")
            if forcing(record.get("variables", ())):
                raise ValueError(
                    f"{file} was measured with {', '.join(forcing(record['variables']))}: a table is of what a process does where they are not set"
                )
            facts = record
            versions |= {name: record["version"]} | {part: record[part] for part in ("torch", "triton", "driver", "commit")}
            key = (record["shape"], record["kv"], record["mask"], record["bs"], record["L"])
            point = run.setdefault(key, {}).setdefault(record["ctx"], {})
            if record["who"] != OURS + "auto" or name not in point:  # who is named counts more than the automatic choice
                point[name] = round(record["us"], 2)
        for key, lengths in run.items():
            times.setdefault(key, {}).update(lengths)
    if not times:
        raise ValueError(f"no time with pages of {PAGE} of ours or of {', '.join(LIBRARIES)} stands in {', '.join(runs) or 'no file'}")
    classes = (_class(*key, lengths) for key, lengths in times.items())
    return Table(
        gpu=facts["gpu"],
        capability=tuple(facts["capability"]),
        sm_count=facts["sm_count"],
        date=facts["date"],
        versions=versions,
        results=tuple(runs),
        classes=tuple(sorted(classes, key=lambda c: (c.latent, c.shape, c.kv, c.mask, c.requests, c.tokens))),
        left=LEFT,
    )


def forcing(variables: Iterable[str]) -> list[str]:
    """Those that change what an implementation does."""
    return [name for name in variables if name.startswith(("FLASHMAP_SPLITKV_", "FLASHMAP_FA3_"))]


@dataclass(frozen=True, slots=True)
class Change:
    """A class of calls, and what a table says of it: who of ours is tried first, and who serves it instead of an engine's kernel."""

    calls: str
    before: str
    after: str


def changes(before: Table | None, after: Table) -> list[Change]:
    """What ``after`` decides differently for the classes that it has; ``before`` None: there was no table."""
    found = []
    for one in after.classes:
        was, now = _verdict(before, one), _verdict(after, one)
        if was != now:
            found.append(Change(str(one), was, now))
    return found


def _verdict(table: Table | None, one: Class) -> str:
    if table is None:
        return "no table"
    dtype = "bf16" if one.kv == "bf16" else "fp8_e4m3"
    request = VerifyRequest(
        one.heads,
        one.kv_heads,
        one.head_dim,
        512 if one.latent else one.head_dim,
        kv_dtype=dtype,
        num_requests=one.requests,
        max_query_len=one.tokens,
        latent=one.latent,
        mask=None if one.mask == "chain" else "qlen",
    )
    order = table.order(request) or ("triton_splitkv",)
    against = []
    for library in ("fa3", "flashmla") if one.latent and one.mask == "chain" else ("fa3",):
        winner = next((name for name in order if table.against(library, name, request) is None), "the engine")
        against.append(f"{library}: {winner}")
    return f"{' > '.join(order)}; instead of {', '.join(against)}"


def _candidate(record: dict[str, Any]) -> str | None:
    """A record's name in the table; None: it is in none."""
    who: str = record["who"]
    if who == OURS + "auto":
        return OURS + str(record["impl"])
    return who if who.startswith(OURS) or who in LIBRARIES else None


def _class(shape: str, kv: str, mask: str, requests: int, tokens: int, us: dict[int, dict[str, float]]) -> Class:
    s = Shape.named(shape)
    return Class(s.heads, s.kv_heads, s.head_dim, s.latent, kv, mask, requests, tokens, dict(sorted(us.items())))
