"""What a run leaves: a JSON line a measurement, with its conditions, and the tables at the end."""

from __future__ import annotations

import datetime
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from flashmap import env
from flashmap.bench.points import Point, Ratio

Record: TypeAlias = dict[str, Any]
Records: TypeAlias = dict[tuple[str, str], Record]  # by the point's label and the participant's name


def describe(point: Point) -> Record:
    """The point's part of a record."""
    return {
        "shape": point.shape.name, "bs": point.bs, "L": point.length, "ctx": point.ctx, "mask": point.mask, "page": point.page,
        "kv": point.kv, "lens": point.spread, "label": point.label, "floor_us": round(point.floor_us, 2),
        "kv_bytes": point.kv_bytes, "moved_bytes": point.moved_bytes,
    }  # fmt: skip


def outcome(record: Record) -> str:
    """What became of a measurement, in one phrase: the time with the floor and the bandwidth, or why there is none."""
    if "us" in record:
        return f"{record['us']:.1f} us (floor {record['floor_us']:.1f}, {record['tb_per_s']:.2f} TB/s), error {record['err']:.1e}"
    return next((f"{key}: {record[key]}" for key in ("skipped", "wrong", "failed") if key in record), "")


class Log:
    """Appends records to a file as they come, so that a run that is cut off leaves its results. ``path`` None: only keeps them."""

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.records, self.conditions = path, list[Record](), _conditions()
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, record: Record) -> None:
        self.records.append({**record, **self.conditions})
        if self.path:
            with open(self.path, "a", encoding="utf-8") as out:
                out.write(json.dumps(self.records[-1]) + "\n")


def table(points: list[Point], records: Records, ours: list[str], peers: list[str]) -> Iterator[str]:
    """A line a point: the floor, everyone's µs, the best peer that can do it, ours (the fastest) over it, our TB/s, and the goal.

    The goals: a chain takes no longer than the best peer; a tree at most 1.02 times the best peer's chain and 2 µs.
    """
    if not points:
        return
    names = [n for n in ours + peers if any("us" in records.get((p.label, n), {}) for p in points)]
    width = max(len(p.label) for p in points) + 1
    columns = "".join(f"{n.replace('ours:', '')[:14]:>15}" for n in names)
    yield f"\n{'us per call':{width}}{'floor':>7}{columns}{'best peer':>11}{'ratio':>7}{'TB/s':>6}  goal"
    ratios: dict[str, list[float]] = {"chain": [], "tree": []}
    for point in points:
        mine, best = _fastest(records, point, ours), _fastest(records, point, peers)
        limit = 1.02 * _fastest(records, replace(point, tree=False), peers) + 2 if point.tree else best
        goal = "" if math.isnan(mine - limit) else "met" if mine <= limit else f"MISSED: {limit:.1f}"
        if not math.isnan(mine / best):
            ratios[point.mask].append(mine / best)
        cells = "".join(f"{_cell(records.get((point.label, n), {})):>15}" for n in names)
        speed = point.moved_bytes / mine / 1e6
        yield f"{point.label:{width}}{point.floor_us:7.1f}{cells}{best:11.1f}{mine / best:7.2f}{speed:6.2f}  {goal}"
    for mask, values in ratios.items():
        if values:
            mean = math.exp(sum(map(math.log, values)) / len(values))
            yield f"{mask}: ours / best peer, geometric mean {mean:.3f}, worst {max(values):.3f}, over {len(values)} points"


def feature_table(rows: list[Ratio], records: Records, names: list[str]) -> Iterator[str]:
    """A line a feature row and participant: both times, their ratio, the goal."""
    for row in rows:
        for name in names:
            base, other = (records.get((p.label, name), {}) for p in (row.base, row.other))
            if "us" in base and "us" in other:
                ratio = other["us"] / base["us"]
                times = f"{other['us']:.1f} / {base['us']:.1f} = {ratio:.3f}"
                goal = "" if row.at_most is None else f"  goal <= {row.at_most:.3f}: {'met' if ratio <= row.at_most else 'MISSED'}"
                yield f"{row.group:10}{name:22}{row.other.label} / {row.base.label}: {times}{goal}"


def _fastest(records: Records, point: Point, names: list[str]) -> float:
    times = [records[point.label, n]["us"] for n in names if "us" in records.get((point.label, n), {})]
    return min(times, default=math.nan)


def _cell(record: Record) -> str:
    if "us" in record:
        return f"{record['us']:.1f}"
    return "WRONG" if "wrong" in record else "failed" if "failed" in record else "-"


_NOT_SAID = ("FLASHMAP_PEERS", "FLASHMAP_COMMIT")  # of the machine, and said already


def _conditions() -> Record:
    """Machine, versions, date, command, commit, and the FLASHMAP_* variables that are set."""
    import triton

    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": device.name,
        "capability": [device.major, device.minor],
        "sm_count": device.multi_processor_count,
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": now(),
        "command": " ".join(["flashmap", *sys.argv[1:]]),
        "commit": commit(),
        "variables": {name: os.environ[name] for name in env.VARIABLES if name in os.environ and name not in _NOT_SAID},
    }


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def commit() -> str:
    """Of this checkout, or what FLASHMAP_COMMIT says."""
    checkout = Path(__file__).resolve().parents[2]
    found = _output(["git", "-C", str(checkout), "describe", "--always", "--dirty"]) if (checkout / ".git").exists() else ""
    return found or env.get("FLASHMAP_COMMIT") or "unknown"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""
