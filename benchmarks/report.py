"""What op_bench.py writes: a JSON line a measurement, with its conditions, and the tables at the end."""

from __future__ import annotations

import datetime
import importlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from flashmap.bench.points import Point, Ratio


def describe(point: Point) -> dict:
    """The point's part of a record."""
    return {
        "shape": point.shape.name, "bs": point.bs, "L": point.length, "ctx": point.ctx, "mask": point.mask, "page": point.page,
        "kv": point.kv, "lens": point.spread, "label": point.label,
    }  # fmt: skip


def reason(record: dict) -> str:
    """Why a record has no time."""
    for key in ("skipped", "wrong", "failed"):
        if key in record:
            return f"{key}: {record[key]}"
    return ""


def flashinfer_is_compiled() -> bool:
    """Whether FlashInfer finds compiled kernels instead of compiling (pack_peers.py --aot)."""
    try:
        folder = importlib.import_module("flashinfer.jit.env").FLASHINFER_AOT_DIR
    except Exception:
        return False
    return folder.is_dir() and any(folder.iterdir())


class Log:
    """Appends records to a file as they come, so that a run that is cut off leaves its results."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.conditions = path, {}
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.conditions = _conditions()

    def write(self, record: dict) -> None:
        if self.path:
            with open(self.path, "a") as out:
                out.write(json.dumps({**record, **self.conditions}) + "\n")


def table(points: list[Point], records: dict, ours: list[str], peers: list[str]) -> None:
    """A row a point: the floor, everyone's µs, the best peer that can do it, ours (the fastest) over it, and the goal.

    The goals: a chain takes no longer than the best peer; a tree at most 1.02 times the best peer's chain and 2 µs.
    """
    if not points:
        return
    names = [n for n in ours + peers if any("us" in records.get((p.label, n), {}) for p in points)]
    columns = "".join(f"{n.replace('ours:', '')[:13]:>14}" for n in names)
    print(f"\n{'us per call':34}{'floor':>7}{columns}{'best peer':>11}{'ratio':>7}  goal")
    ratios: dict[str, list[float]] = {"chain": [], "tree": []}
    for point in points:
        mine, best = _fastest(records, point, ours), _fastest(records, point, peers)
        limit = 1.02 * _fastest(records, replace(point, tree=False), peers) + 2 if point.tree else best
        goal = "" if math.isnan(mine - limit) else "met" if mine <= limit else f"MISSED: {limit:.1f}"
        if not math.isnan(mine / best):
            ratios[point.mask].append(mine / best)
        cells = "".join(f"{_cell(records.get((point.label, n), {})):>14}" for n in names)
        print(f"{point.label:34}{point.floor_us:7.1f}{cells}{best:11.1f}{mine / best:7.2f}  {goal}")
    for mask, values in ratios.items():
        if values:
            mean = math.exp(sum(map(math.log, values)) / len(values))
            print(f"{mask}: ours / best peer, geometric mean {mean:.3f}, worst {max(values):.3f}, over {len(values)} points")


def feature_table(rows: list[Ratio], records: dict, names: list[str]) -> None:
    """A line a feature row and participant: both times, their ratio, the goal."""
    for row in rows:
        for name in names:
            base, other = (records.get((p.label, name), {}) for p in (row.base, row.other))
            if "us" in base and "us" in other:
                ratio = other["us"] / base["us"]
                times = f"{other['us']:.1f} / {base['us']:.1f} = {ratio:.3f}"
                goal = "" if row.at_most is None else f"  goal <= {row.at_most:.3f}: {'met' if ratio <= row.at_most else 'MISSED'}"
                print(f"{row.group:10}{name:22}{row.other.label} / {row.base.label}: {times}{goal}")


def _fastest(records: dict, point: Point, names: list[str]) -> float:
    times = [records[point.label, n]["us"] for n in names if "us" in records.get((point.label, n), {})]
    return min(times, default=math.nan)


def _cell(record: dict) -> str:
    if "us" in record:
        return f"{record['us']:.1f}"
    return "WRONG" if "wrong" in record else "failed" if "failed" in record else "-"


def _conditions() -> dict:
    """Machine, versions, date, command and commit."""
    import triton

    here = Path(__file__).resolve().parent.parent
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "commit": _output(["git", "-C", str(here), "describe", "--always", "--dirty"]) or os.environ.get("FLASHMAP_COMMIT", "unknown"),
    }


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""
