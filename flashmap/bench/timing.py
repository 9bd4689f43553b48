"""Capturing a participant's call once per layer, checking it against the reference, and timing replays."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from flashmap.bench.peers import Call
from flashmap.bench.problem import Problem

REPLAYS = 20
SLOW_REPLAY_MS, SLOW_REPLAYS = 200.0, 5  # a replay this long varies little, and GPU time is dear
# Relative errors, ||out - ref|| / ||ref||, of all rows together and of the worst row of one head. bf16 kernels reach 0.002
# to 0.003 and 0.005; a mask read wrongly in one place gives far more (problem.py).
MAX_ERROR, MAX_ROW_ERROR = 0.01, 0.05


class Wrong(Exception):
    """The result is not the reference's; nothing was timed."""


def capture(call: Call, layers: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
    """A graph of one call per layer, and the outputs of the first and of the last."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # the same stream as the capture's: scratch may belong to a stream
        for layer in (0, layers - 1):
            call(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        first = call(0)
        for layer in range(1, layers):
            last = call(layer)
    return graph, first, last


def check(
    problem: Problem, references: tuple[torch.Tensor, torch.Tensor], graph: torch.cuda.CUDAGraph, first: torch.Tensor, last: torch.Tensor
) -> float:
    """Replay once onto poisoned outputs; the relative error of the first and last layer, or Wrong."""
    for out in (problem.outs, first, last):
        out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    worst = 0.0
    for out, reference in zip((first, last), references, strict=True):
        difference = out.float() - reference
        error = (difference.norm() / reference.norm()).item()
        row_error = (difference.norm(dim=-1) / reference.norm(dim=-1)).max().item()
        if not (error <= MAX_ERROR and row_error <= MAX_ROW_ERROR):  # a NaN is wrong too
            raise Wrong(f"error {error:.2g} (accepted {MAX_ERROR}), worst row {row_error:.2g} (accepted {MAX_ROW_ERROR})")
        worst = max(worst, error)
    return worst


def replay_us(graph: torch.cuda.CUDAGraph, layers: int) -> tuple[float, int]:
    """Median time of a replay per layer in µs, and of how many replays."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS + 1)]
    times, count = [], REPLAYS
    for index, (start, end) in enumerate(events):
        start.record()
        graph.replay()
        end.record()
        if index == 0:  # warm-up
            end.synchronize()
            count = SLOW_REPLAYS if start.elapsed_time(end) > SLOW_REPLAY_MS else REPLAYS
        elif index == count:
            break
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in events[1 : count + 1]]
    return statistics.median(times) * 1e3 / layers, count


def host_us(call: Callable[[], object], calls: int = 400, batch: int = 50) -> float:
    """Host time of an eager call in µs: batches short enough that the launch queue never fills, the GPU idle before each."""
    for _ in range(batch):
        call()
    times = []
    for _ in range(calls // batch):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - begin) / batch)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def bare_launch_us() -> float:
    """Host time of launching a Triton kernel that does nothing, as its plain `kernel[grid](...)`."""
    from flashmap.bench.empty_kernel import empty_kernel

    tensor = torch.empty(1, device="cuda")
    return host_us(lambda: empty_kernel[(1,)](tensor, BLOCK=16))
