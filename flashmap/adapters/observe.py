"""What adapters count and check, and how it gets out of an engine's processes. A debugging aid.

* ``record`` keeps the difference between the op's output and the engine's own kernel's (FLASHMAP_CHECK=1), for each
  layer and step.
* With FLASHMAP_STATS_DIR each process writes its counters and differences into that directory as one JSON file, every
  half second in which something happened and when it ends; ``collect`` adds up the files of all processes. Engines
  run attention in processes of their own, out of reach of the one that reads the answer.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmap import env
from flashmap.core import stats

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
_PERIOD_S = 0.5
_MOST_STEPS = 4096  # of a layer, kept one by one; the largest difference covers all


@dataclass(slots=True)
class Differences:
    """Of one layer: ``calls`` compared, the ``largest`` absolute difference, the ``scale`` (the engine's largest output) and each step's."""

    calls: int = 0
    largest: float = 0.0
    scale: float = 0.0
    steps: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Report:
    """The sum over processes: ``counts`` {(implementation, outcome, reason code): times}, ``layers`` {name: Differences}."""

    processes: int
    counts: dict[tuple[str, str, str], int]
    layers: dict[str, Differences]

    def total(self, outcome: str, code: str | None = None) -> int:
        """How many calls had this outcome ("routed", "left", ...), with this reason code unless None."""
        return sum(n for (_, o, c), n in self.counts.items() if o == outcome and code in (None, c))

    def codes(self, outcome: str) -> dict[str, int]:
        """{reason code: times} of the calls with this outcome."""
        found: dict[str, int] = {}
        for (_, o, code), n in self.counts.items():
            if o == outcome:
                found[code] = found.get(code, 0) + n
        return found

    @property
    def largest(self) -> float:
        """The largest difference of all layers and steps; NaN where nothing was compared."""
        return max((d.largest for d in self.layers.values()), default=math.nan)


_layers: dict[str, Differences] = {}
_written: float = 0.0
_writing: bool = False


def record(layer: str, ours: torch.Tensor, engine: torch.Tensor) -> None:
    """Keep the largest absolute difference of two outputs of ``layer`` in this step. NaN counts as infinite."""
    difference = float((ours.float() - engine.float()).abs().nan_to_num(nan=math.inf).max()) if ours.numel() else 0.0
    found = _layers.setdefault(layer, Differences())
    found.calls += 1
    found.largest = max(found.largest, difference)
    found.scale = max(found.scale, float(engine.float().abs().max()) if engine.numel() else 0.0)
    if len(found.steps) < _MOST_STEPS:
        found.steps.append(difference)


def here() -> Report:
    """This process's counters and differences."""
    return Report(1, stats.snapshot(), dict(_layers))


def reset() -> None:
    """Forget the differences. The counters are those of ``flashmap.core.stats``, which has a reset of its own."""
    _layers.clear()


def start() -> None:
    """Begin to write files if FLASHMAP_STATS_DIR is set. Called once by each adapter that installs."""
    global _writing
    if _writing or env.get("FLASHMAP_STATS_DIR") is None:
        return
    _writing = True
    util.Finalize(None, _try_to_write, exitpriority=1)  # runs at the end of the main process and of multiprocessing's children alike
    util.register_after_fork(_HERE, _begin_in_child)


def tick() -> None:
    """Write the file if the last time is long enough ago. Called by adapters after each call that they counted."""
    if _writing and time.monotonic() - _written > _PERIOD_S:
        _try_to_write()


def _try_to_write() -> None:
    """A debugging aid does not take an engine down: a directory that cannot be written to is given up, with one WARNING."""
    global _writing
    if not _writing:
        return
    try:
        write()
    except OSError as error:
        _writing = False
        logger.warning(
            "flashmap: FLASHMAP_STATS_DIR=%s cannot be written to, no counters are kept there: %s", env.get("FLASHMAP_STATS_DIR"), error
        )


def write() -> None:
    """Write this process's file. What was there is replaced in one step, so that a reader never sees half of it."""
    global _written
    directory = env.get("FLASHMAP_STATS_DIR")
    if directory is None:
        return
    content = {
        "pid": os.getpid(),
        "counts": [[*key, n] for key, n in stats.snapshot().items()],
        "layers": {name: asdict(d) for name, d in _layers.items()},
    }
    target = Path(directory) / f"flashmap-{os.getpid()}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".tmp")
    partial.write_text(json.dumps(content))
    partial.replace(target)
    _written = time.monotonic()


def collect(directory: Path | str) -> Report:
    """Add up the files that the processes of one or more engines wrote into ``directory``."""
    return merge(json.loads(path.read_text()) for path in sorted(Path(directory).glob("flashmap-*.json")))


def merge(contents: Iterable[dict[str, Any]]) -> Report:
    """Add up the contents of such files."""
    counts: dict[tuple[str, str, str], int] = {}
    layers: dict[str, Differences] = {}
    processes = 0
    for content in contents:
        processes += 1
        for implementation, outcome, code, n in content["counts"]:
            key = (implementation, outcome, code)
            counts[key] = counts.get(key, 0) + n
        for name, other in content["layers"].items():
            found = layers.setdefault(name, Differences())
            found.calls += other["calls"]
            found.largest = max(found.largest, other["largest"])
            found.scale = max(found.scale, other["scale"])
            found.steps += other["steps"]
    return Report(processes, counts, layers)


class _Here:
    """multiprocessing wants an object that lives as long as the callback."""


_HERE = _Here()


def _begin_in_child(_: object) -> None:
    """In a forked child: what the parent counted is the parent's, and its exit handlers were not inherited."""
    global _writing
    stats.reset()
    _layers.clear()
    _writing = False
    start()
