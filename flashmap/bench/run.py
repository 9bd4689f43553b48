"""Measuring: participants on points, within a time limit. ``flashmap bench`` says what, and shows what comes back. Needs a GPU.

bf16, random pages of 64 unless a point says otherwise; a CUDA graph calls the op once per layer on caches of its own, together more
than 400 MB, so that the L2 holds nothing; the median of 20 replays, in µs a call. Everyone is first compared with an fp32
reference, and what is wrong is not timed.
"""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from flashmap.bench import peers, points, timing
from flashmap.bench.peers.ours import Ours
from flashmap.bench.problem import Problem
from flashmap.bench.report import Log, Record, Records, describe, outcome


@dataclass(frozen=True, slots=True)
class Participants:
    """Who is timed. ``impl``: our implementations by name, or "auto". ``draft``, ``layout``: how our op gets draft tokens and trees."""

    impl: tuple[str, ...] = ("auto",)
    peers: tuple[str, ...] = peers.DEFAULT
    draft: str = "cache"
    layout: str = "qlen"


class Bench:
    """Runs participants on points within ``max_seconds`` and keeps what they took in ``records``.

    ``say`` is called with a line a measurement. ``same_tree``: one tree for all requests of a batch.
    """

    def __init__(
        self, who: Participants, log: Log, say: Callable[[str], None], *, max_seconds: float = float("inf"), same_tree: bool = False
    ) -> None:
        self.log, self.say, self.same_tree = log, say, same_tree
        self.begin, self.max_seconds = time.monotonic(), max_seconds
        self.records: Records = {}
        self.not_run: list[str] = []
        self.broken = ""  # a CUDA error ends a process's use of the GPU: nothing is run after one
        peers.look_in_folder()  # ours may need a library of it too
        self.ours = {f"ours:{name}": Ours(None if name == "auto" else name, who.draft, who.layout) for name in who.impl}
        self.peers: dict[str, peers.Peer] = {}
        self.absent: dict[str, str] = {}
        for name in who.peers:
            try:
                self.peers[name] = peers.load(name)
            except peers.Skip as reason:
                self.absent[name] = str(reason)
                say(f"{name}: skipped: {reason}")

    @property
    def names(self) -> list[str]:
        return [*self.ours, *self.peers]

    def point(self, point: points.Point) -> None:
        """Everyone on one point; the tensors and the reference are made once."""
        left = [name for name in self.names if (point.label, name) not in self.records]
        if not left or self._out_of_time(point.label):
            return
        try:
            problem = Problem(point, same_tree=self.same_tree)
            references = (problem.reference(0), problem.reference(problem.layers - 1))
        except torch.OutOfMemoryError as error:
            self.not_run.append(f"{point.label}: {_first_line(error)}")
            return
        for name in left:
            if not self._out_of_time(f"{point.label} {name}"):
                self._measure(problem, references, name)
        del problem, references
        gc.collect()
        torch.cuda.empty_cache()

    def host(self, point: points.Point, launch_us: float) -> None:
        """Host time of an eager call on one point, ours and peers alike. ``launch_us``: that of a bare Triton launch."""
        if self._out_of_time(f"host {point.label}"):
            return
        problem = Problem(point, layers=2)
        for name in self.names:
            record = {"who": name, "bare_launch_us": launch_us, **describe(point)}
            try:
                call = self._participant(name).bind(problem)
                record["host_us"] = timing.host_us(partial(call, 0))
                self.say(f"host {point.label}: {name}: {record['host_us']:.1f} us a call")
            except peers.Skip as reason:
                record["skipped"] = str(reason)
            except Exception as error:
                record["failed"] = _first_line(error)
            self.log.write(record)

    def _participant(self, name: str) -> peers.Peer:
        return self.ours[name] if name in self.ours else self.peers[name]

    def _measure(self, problem: Problem, references: tuple[torch.Tensor, torch.Tensor], name: str) -> None:
        point, participant = problem.point, self._participant(name)
        record: Record = {"who": name, "version": participant.version, "layers": problem.layers, **describe(point)}
        try:
            call = participant.bind(problem)
            if isinstance(participant, Ours):
                record["impl"] = participant.chosen
            graph, first, last = timing.capture(call, problem.layers)
            record["err"] = timing.check(problem, references, graph, first, last)
            record["us"], record["replays"] = timing.replay_us(graph, problem.layers)
            record["tb_per_s"] = round(point.moved_bytes / record["us"] / 1e6, 3)
        except (peers.Skip, timing.Wrong) as reason:
            record["wrong" if isinstance(reason, timing.Wrong) else "skipped"] = str(reason)
        except Exception as error:  # one participant's failure is its own; it is reported, never hidden
            record["failed"] = _first_line(error)
            if error.__context__ is not None:  # a failure under capture raises once more when the capture ends
                record["failed"] += f" (after {_first_line(error.__context__)})"
            if not _gpu_works():
                self.broken = f"{name} on {point.label}: {record['failed']}"
        self.records[point.label, name] = record
        self.log.write(record)
        if "skipped" not in record:
            self.say(f"[{time.monotonic() - self.begin:4.0f} s] {point.label}: {name}: {outcome(record)}")

    def _out_of_time(self, what: str) -> bool:
        if self.broken or time.monotonic() - self.begin > self.max_seconds:
            self.not_run.append(what)
            return True
        return False


HOST_POINTS = tuple(p for p in points.TABLE if (p.bs, p.length, p.ctx) == (1, 4, 1024))


def check_peers(names: Sequence[str] | None, say: Callable[[str], None]) -> list[str]:
    """Each peer on one tiny point a mask and kind of shape: a table of 'ok' or why not.

    ``names`` None: all of them, but FlashInfer only where it is compiled: it would compile for minutes.
    """
    bench = Bench(Participants(impl=(), peers=tuple(peers.PEERS if names is None else names)), Log(), say)
    lines = []
    if names is None and "flashinfer" in bench.peers and not _flashinfer_is_compiled():
        version = bench.peers.pop("flashinfer").version
        lines.append(f"{version} is here; it compiles for minutes, so name it to try it: --peers flashinfer")
    base = [points.Point(shape, 2, 4, 200) for shape in (points.GQA_32_8, points.MLA_16)]
    tiny = [replace(p, tree=tree) for p in base for tree in (False, True)]
    for point in tiny:
        bench.point(point)
    lines.append(f"{'peer':14}" + "".join(f"{f'{p.shape.name} {p.mask}':>16}" for p in tiny))
    for name in bench.names:
        cells = [bench.records.get((p.label, name), {"skipped": "not run"}) for p in tiny]
        lines.append(f"{name:14}" + "".join(f"{'ok' if 'us' in c else '-' if 'skipped' in c else 'BAD':>16}" for c in cells))
    return lines + [f"{name:14}  skipped: {reason}" for name, reason in bench.absent.items()]


def _flashinfer_is_compiled() -> bool:
    """Whether FlashInfer finds compiled kernels instead of compiling (benchmarks/pack_peers.py --aot)."""
    try:
        folder = importlib.import_module("flashinfer.jit.env").FLASHINFER_AOT_DIR
    except Exception:  # any failure to import says no
        return False
    return folder.is_dir() and any(folder.iterdir())


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _gpu_works() -> bool:
    try:
        torch.cuda.synchronize()
        return torch.ones(1, device="cuda").item() == 1
    except Exception:  # whatever it is, the GPU answers no more
        return False
