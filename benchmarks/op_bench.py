#!/usr/bin/env python3
"""Time verify_attention against the other kernels that can do the same, on one GPU.

    python benchmarks/op_bench.py --peers-check
    python benchmarks/op_bench.py --points gqa --peers fa3,fa3_cascade --impl auto,triton_splitkv --json-out results.jsonl
    python benchmarks/op_bench.py --points none --features all --peers none

bf16, random pages of 64; a CUDA graph calls the op once per layer on caches of its own, together more than 400 MB, so that
the L2 holds nothing; the median of 20 replays, in µs per call. Everyone is first compared with an fp32 reference, and what is
wrong is not timed. floor = max(bytes / 4.3 TB/s, FLOPs / 780 TFLOP/s). One JSON line a measurement goes to --json-out as it
is made; the tables come last. FLASHMAP_PEERS names a folder of peers (pack_peers.py).
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import peers, report, timing
from benchmarks.peers.ours import Ours
from benchmarks.problem import Problem
from flashmap.bench import points


class Bench:
    """Runs participants on points within the time limit and keeps what they took: {(label, name): record}."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begin = args, time.monotonic()
        self.records: dict[tuple[str, str], dict] = {}
        self.not_run: list[str] = []
        self.broken = ""  # a CUDA error ends a process's use of the GPU: nothing is run after one
        self.log = report.Log(args.json_out)
        self.ours = {f"ours:{name}": Ours(None if name == "auto" else name, args.draft, args.mask_layout) for name in args.impl}
        self.peers, self.absent = {}, {}
        for name in args.peers:
            try:
                self.peers[name] = peers.load(name)
            except peers.Skip as reason:
                self.absent[name] = str(reason)
                print(f"{name}: skipped: {reason}", flush=True)

    @property
    def names(self) -> list[str]:
        return [*self.ours, *self.peers]

    def point(self, point: points.Point) -> None:
        """Everyone on one point; the tensors and the reference are made once."""
        left = [name for name in self.names if (point.label, name) not in self.records]
        if not left or self._out_of_time(point.label):
            return
        try:
            problem = Problem(point, same_tree=self.args.same_tree)
            references = (problem.reference(0), problem.reference(problem.layers - 1))
        except torch.OutOfMemoryError as error:
            self.not_run.append(f"{point.label}: {str(error).splitlines()[0]}")
            return
        for name in left:
            if not self._out_of_time(f"{point.label} {name}"):
                self._measure(problem, references, name)
        del problem, references
        gc.collect()
        torch.cuda.empty_cache()

    def _measure(self, problem: Problem, references: tuple, name: str) -> None:
        point = problem.point
        record = {"who": name, "floor_us": round(point.floor_us, 2), "layers": problem.layers, **report.describe(point)}
        try:
            participant = self.ours.get(name) or self.peers[name]
            record["version"] = participant.version
            call = participant.bind(problem)
            graph, first, last = timing.capture(call, problem.layers)
            record["err"] = timing.check(problem, references, graph, first, last)
            record["us"], record["replays"] = timing.replay_us(graph, problem.layers)
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
        took = f"{record['us']:.1f} us, error {record['err']:.1e}" if "us" in record else report.reason(record)
        if "skipped" not in record or self.args.peers_check:
            print(f"[{time.monotonic() - self.begin:4.0f} s] {point.label}: {name}: {took}", flush=True)

    def host(self) -> None:
        """Host time of an eager call on the smallest points, ours and peers alike."""
        launch = timing.bare_launch_us()
        print(f"host time of a bare Triton launch: {launch:.1f} us")
        for point in (p for p in points.TABLE if (p.bs, p.length, p.ctx) == (1, 4, 1024)):
            if self._out_of_time(f"host {point.label}"):
                return
            problem = Problem(point, layers=2)
            for name in self.names:
                record = {"who": name, "bare_launch_us": launch, **report.describe(point)}
                try:
                    call = (self.ours.get(name) or self.peers[name]).bind(problem)
                    record["host_us"] = timing.host_us(lambda call=call: call(0))
                except Exception as error:
                    record["skipped"] = str(error)
                self.log.write(record)
                if "host_us" in record:
                    print(f"host {point.label}: {name}: {record['host_us']:.1f} us a call", flush=True)

    def _out_of_time(self, what: str) -> bool:
        if self.broken or time.monotonic() - self.begin > self.args.max_seconds:
            self.not_run.append(what)
            return True
        return False


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _gpu_works() -> bool:
    try:
        torch.cuda.synchronize()
        return torch.ones(1, device="cuda").item() == 1
    except Exception:
        return False


def check_peers(args: argparse.Namespace) -> None:
    """Each peer on one tiny point a mask and shape class: 'ok' or why not. FlashInfer compiles, so only when it is named."""
    named = args.peers_given
    args.peers = args.peers if named else list(peers.PEERS)
    bench = Bench(args)
    for name in [n for n in bench.peers if n == "flashinfer" and not named and not report.flashinfer_is_compiled()]:
        print(f"{name}: {bench.peers.pop(name).version} is here; it compiles for minutes, so name it to try it: --peers {name}")
    base = [points.Point(points.GQA_32_8, 2, 4, 200), points.Point(points.MLA_16, 2, 4, 200)]
    for point in [replace(p, tree=tree) for p in base for tree in (False, True)]:
        bench.point(point)
    print(f"\n{'peer':14}" + "".join(f"{p.shape.name + ' ' + m:>16}" for p in base for m in ("chain", "tree")))
    labels = [replace(p, tree=tree).label for p in base for tree in (False, True)]
    for name in bench.names:
        cells = [bench.records.get((label, name), {"skipped": "not run"}) for label in labels]
        print(f"{name:14}" + "".join(f"{'ok' if 'us' in c else '-' if 'skipped' in c else 'BAD':>16}" for c in cells))
    for name, reason in bench.absent.items():
        print(f"{name:14}  skipped: {reason}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options; lists are comma-separated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", default="quick", help="all, gqa, mla, quick, none, or a regular expression over labels")
    parser.add_argument("--peers", help=f"names, all or none; there are {', '.join(peers.PEERS)} (default: the first {len(peers.DEFAULT)})")
    parser.add_argument("--impl", default="auto", help="our implementations: auto, a registered name, none (default: auto)")
    parser.add_argument("--features", default="", help="feature rows: fp8, page, ragged, length, imbalance, host, or all")
    parser.add_argument("--draft", default="cache", choices=("cache", "separate"), help="where our op finds the draft tokens")
    parser.add_argument("--mask-layout", default="qlen", choices=("qlen", "full", "packed"), help="how our op gets a tree")
    parser.add_argument("--same-tree", action="store_true", help="one tree for all requests (vllm_unified can do no other)")
    parser.add_argument("--json-out", type=Path, help="append a JSON line a measurement to this file")
    parser.add_argument("--max-seconds", type=float, default=540, help="start nothing after this long (default: 540)")
    parser.add_argument("--peers-check", action="store_true", help="run each peer on tiny points and say ok or why not")
    args = parser.parse_args(argv)
    args.peers_given = args.peers is not None
    names = {None: list(peers.DEFAULT), "all": list(peers.PEERS), "none": []}
    args.peers = names[args.peers] if args.peers in names else args.peers.split(",")
    if unknown := set(args.peers) - set(peers.PEERS):
        parser.error(f"--peers: {', '.join(sorted(unknown))} is not known; there are {', '.join(peers.PEERS)}")
    args.impl = [] if args.impl == "none" else args.impl.split(",")
    groups = [*points.features(), "host"]
    args.features = groups if args.features == "all" else [g for g in args.features.split(",") if g]
    if unknown := set(args.features) - set(groups):
        parser.error(f"--features: {', '.join(sorted(unknown))} is not known; there are {', '.join(groups)}")
    try:
        args.points = [] if args.points == "none" else points.select(args.points)
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> None:
    """Measure what was asked for, then print the tables."""
    args = parse()
    if not torch.cuda.is_available():
        sys.exit("op_bench: no CUDA device here")
    torch.set_grad_enabled(False)
    if args.peers_check:
        check_peers(args)
        return
    bench = Bench(args)
    for point in args.points:
        bench.point(point)
    ratios = [row for group, rows in points.features().items() if group in args.features for row in rows]
    for row in ratios:
        bench.point(row.base)
        bench.point(row.other)
    if "host" in args.features:
        bench.host()
    report.feature_table(ratios, bench.records, bench.names)
    report.table(args.points, bench.records, list(bench.ours), list(bench.peers))
    if bench.broken:
        print(f"stopped, the GPU answers no more after {bench.broken}")
    if bench.not_run:
        print(f"not run ({len(bench.not_run)}): " + "; ".join(bench.not_run[:12]) + (" ..." if len(bench.not_run) > 12 else ""))


if __name__ == "__main__":
    main()
