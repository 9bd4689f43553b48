"""``flashmap bench``: what is run, what is written and printed. The GPU's parts (graphs, events) are played by a CPU, the rest is real."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flashmap.bench import command, peers, report, run, timing
from flashmap.bench.problem import Problem
from flashmap.bench.report import Log
from flashmap.cli import app
from flashmap.core import Capability, Implementation, registry, tables
from flashmap.core.inputs import Call
from flashmap.core.request import DeviceInfo

runner = CliRunner()
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
CONDITIONS = {"gpu": "NVIDIA H200", "capability": [9, 0], "sm_count": 132, "driver": "1", "torch": "2", "triton": "3"}
CONDITIONS |= {"date": "2026-12-01", "command": "flashmap bench", "commit": "c"}
SMALL = ["--peers", "none", "--heads", "8/1", "--tokens", "3", "--context", "20", "--page", "16"]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring on a CPU: a graph that calls again, replays that are said to take 10 µs, and the facts of an H200."""

    def capture(call: peers.Call, layers: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
        class Graph:
            first, last = call(0), call(layers - 1)

            def replay(self) -> None:
                self.first.copy_(call(0))
                self.last.copy_(call(layers - 1))

        return Graph(), Graph.first, Graph.last

    def replay_us(graph: Any, layers: int) -> tuple[float, int]:
        return 10.0, 20

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch, "set_grad_enabled", lambda mode: None)
    monkeypatch.setattr(report, "_conditions", lambda: CONDITIONS)
    monkeypatch.setattr(run, "Problem", lambda point, layers=2, same_tree=False: Problem(point, "cpu", 2, same_tree))
    monkeypatch.setattr(timing, "capture", capture)
    monkeypatch.setattr(timing, "replay_us", replay_us)
    monkeypatch.setattr(timing, "bare_launch_us", lambda: 5.0)
    monkeypatch.setattr(timing, "host_us", lambda call: call() is None or 7.0)


def invoke(*options: str, code: int = 0) -> Any:
    result = runner.invoke(app, ["bench", *options])
    assert result.exit_code == code, result.output
    return result


# -- measuring ----------------------------------------------------------------------------------------------------------


def test_a_measurement_is_a_line_with_its_conditions(on_a_gpu: None, tmp_path: Path) -> None:
    out = tmp_path / "new" / "results.jsonl"
    result = invoke(*SMALL, "--mask", "chain,tree", "--impl", "auto,reference", "--json-out", str(out))
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["who"], r["mask"]) for r in records] == [(who, m) for m in ("chain", "tree") for who in ("ours:auto", "ours:reference")]
    first = records[0]
    assert first["impl"] == "torch_dense" and first["us"] == 10.0 and first["err"] < 0.01 and first["gpu"] == "NVIDIA H200"
    # 8 query heads and 1 KV head of 128, 3 tokens, 23 keys, two bytes each
    assert first["kv_bytes"] == 23 * 2 * 128 * 2 and first["moved_bytes"] == first["kv_bytes"] + 3 * 2 * 8 * 128 * 2
    assert first["tb_per_s"] == pytest.approx(first["moved_bytes"] / 10.0 / 1e6, abs=5e-4)
    assert "gqa8/1 bs1 L3 ctx20 chain page16" in result.stdout and "TB/s" in result.stdout
    assert "0.00 TB/s" in result.stderr and "floor" in result.stderr


def test_json(on_a_gpu: None) -> None:
    printed = json.loads(invoke(*SMALL, "--impl", "reference", "--mask", "chain", "--json").stdout)
    (record,) = printed["records"]
    assert record["who"] == "ours:reference" and printed["not_run"] == [] and not printed["broken"]


def test_one_of_ours_that_is_wrong_is_not_timed_and_exits_with_1(on_a_gpu: None) -> None:
    class Zeros(Implementation):
        def run(self, call: Call) -> None:
            call.out.zero_()

    registry.register(Zeros("zeros", Capability(features=frozenset())))
    try:
        printed = json.loads(invoke(*SMALL, "--impl", "zeros", "--json", code=1).stdout)
    finally:
        registry.unregister("zeros")
    chain, tree = printed["records"]
    assert "wrong" in chain and "us" not in chain
    assert "declined" in tree["skipped"], "what it cannot do is no failure"


def test_nothing_is_started_after_the_limit(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(run.time, "monotonic", lambda: next(clock))
    printed = json.loads(invoke(*SMALL, "--impl", "reference", "--max-seconds", "150", "--json").stdout)
    assert printed["records"] == [] and len(printed["not_run"]) == 2


def test_an_absent_peer_is_skipped_with_its_reason(on_a_gpu: None) -> None:
    result = invoke(*SMALL[2:], "--impl", "reference", "--peers", "seed,flashinfer")
    assert "seed: skipped: ModuleNotFoundError" in result.stderr and "flashinfer: skipped:" in result.stderr


def test_host_time_stands_apart(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "HOST_POINTS", tuple(command.sweep_of("8/1", "", "2", "16", "", "16", "chain")))
    printed = json.loads(invoke("--host", "--impl", "reference", "--peers", "none", "--json").stdout)
    (record,) = printed["records"]
    assert record["host_us"] == 7.0 and record["bare_launch_us"] == 5.0 and "us" not in record


def test_features_compare_pairs(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    base, other = command.sweep_of("8/1", "", "2,4", "16", "", "16", "chain")
    pair = command.all_points.Ratio("length", base, other, 1.05)
    monkeypatch.setattr(command.all_points, "features", lambda: {"length": [pair]})
    assert "= 1.000  goal <= 1.050: met" in invoke("--features", "all", "--impl", "reference", "--peers", "none").stdout


# -- tables -------------------------------------------------------------------------------------------------------------


def test_tune_writes_the_users_table_and_says_what_changed(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert "pages of 64" in invoke("--tune", *SMALL, "--impl", "reference", code=2).stderr
    result = invoke("--tune", *SMALL, "--page", "64", "--mask", "tree", "--impl", "reference")
    path = tables.user_file("NVIDIA H200")
    written = tables.Table.from_json(path.read_text())
    (one,) = written.classes
    assert (one.heads, one.kv_heads, one.tokens, one.requests, one.mask) == (8, 1, 3, 1, "tree")
    assert one.us == {20: {"ours:reference": 10.0}} and written.results == ("nvidia-h200.jsonl",)
    assert (path.parent / "nvidia-h200.jsonl").read_text().count("\n") == 1
    assert "    before: " in result.stdout and "; instead of fa3: " in result.stdout
    assert "now:    reference; instead of fa3: the engine" in result.stdout and "1 of them changed" in result.stdout
    assert tables.in_force(DeviceInfo.known("sm90")) is not None


def test_a_table_from_results_needs_no_gpu(tmp_path: Path) -> None:
    packaged = tables.checked_in("NVIDIA H200")
    assert packaged is not None
    path = tmp_path / "table.json"
    options = [option for name in packaged.results for option in ("--results", str(RESULTS / name))]
    printed = json.loads(invoke("--tune", *options, "--table", str(path), "--json").stdout)
    assert printed == {"table": str(path), "before": packaged.source, "changes": []}
    assert path.read_text() == packaged.to_json()


# -- options ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--points", "quick"], ["CUDA device", "--plot", "--tune --results"]),
        (["--results", "x.jsonl"], ["--results", "--tune"]),
        (["--tune", "--results", "/no/such.jsonl"], ["/no/such.jsonl"]),
    ],
)
def test_without_a_gpu_it_says_what_goes(options: list[str], named: list[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = invoke(*options, code=2)
    (line,) = result.stderr.splitlines()
    assert all(name in line for name in named)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--points", "nothing like this"], ["quick", "tune", "gqa32/8"]),
        (["--points", "tune:nothing"], ["tune"]),
        (["--points", "("], ["regular expression"]),
        (["--peers", "fa4"], ["fa4", "fa3_cascade"]),
        (["--impl", "mine"], ["mine", "auto", "torch_dense"]),
        (["--heads", "32x8"], ["32x8", "gqa32/8"]),
        (["--heads", "33/8"], ["33", "8"]),
        (["--batch", "0"], ["--batch '0'"]),
        (["--context", "8m"], ["--context '8m'", "8k"]),
        (["--dtype", "fp4"], ["--dtype 'fp4'", "fp8"]),
        (["--mask", "forest"], ["--mask 'forest'", "tree"]),
        (["--features", "speed"], ["speed", "imbalance"]),
        (["--draft", "nowhere"], ["--draft", "separate"]),
        (["--mask-layout", "csr"], ["--mask-layout", "packed"]),
        (["--tune", "--json-out", "x.json", "--table", "./x.json"], ["--table x.json", "another"]),
        (["--tune", "--table", "x.jsonl"], ["--table x.jsonl", ".json"]),
    ],
)
def test_a_bad_value_is_one_line_that_names_what_is_accepted(on_a_gpu: None, options: list[str], named: list[str]) -> None:
    (line,) = invoke(*options, code=2).stderr.splitlines()
    assert all(name in line for name in named), line


def test_sweeps_are_every_combination() -> None:
    assert command.sweep_of("", "", "", "", "", "", "") == []
    points = command.sweep_of("32/8,mla16,64/8d256", "1,2", "", "1k,128k", "bf16,fp8", "", "chain", ragged=True)
    assert len(points) == 3 * 2 * 2 * 2 * 2 == len({p.label for p in points})
    assert {p.ctx for p in points} == {1024, 131072} and {p.length for p in points} == {4} and not any(p.tree for p in points)
    assert {p.shape.head_dim for p in points} == {128, 256, 576}


def test_who_is_timed() -> None:
    def asked(peers_: str | None, impl: str | None, tune: bool = False) -> tuple[tuple[str, ...], tuple[str, ...]]:
        who = command._participants(peers_, impl, "cache", "qlen", tune=tune)
        return who.impl, who.peers

    every = ("triton_splitkv", "fa3_tail", "fa3", "flashmla_tail")  # what a graph can hold
    assert set(registry.names()) - set(every) == {"reference", "torch_dense", "flashinfer"}
    assert asked(None, None) == (("auto",), peers.DEFAULT)
    assert asked(None, None, tune=True) == (every, ("fa3", "fa3_cascade", "flashmla"))
    assert asked("all", "auto,all") == (("auto", *every), tuple(peers.PEERS))
    assert asked("none", "none") == ((), ()) and asked("fa3,fa3", "reference") == (("reference",), ("fa3",))


def test_peers_are_looked_for_in_a_folder_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "seed_splitkv.py").write_text("class SplitKVVerify:\n    pass\n")
    monkeypatch.setattr(sys, "path", sys.path.copy())
    with pytest.raises(peers.Skip, match="FLASHMAP_PEERS is not set"):
        peers.load("seed")
    monkeypatch.setenv("FLASHMAP_PEERS", str(tmp_path))
    assert peers.load("seed").version == "seed" and sys.path[-1] == str(tmp_path)
    sys.modules.pop("seed_splitkv")


def test_the_default_is_the_quick_points(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(run.Bench, "point", lambda self, point: seen.append(point.label))
    invoke("--peers", "none")
    assert seen == [p.label for p in command.all_points.QUICK]
    seen.clear()
    invoke("--peers", "none", "--batch", "2")
    assert len(seen) == 2 and all(" bs2 " in label for label in seen), "a sweep alone"


def test_the_progress_bar_lets_lines_through(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rich = pytest.importorskip("rich.console")
    monkeypatch.setattr(rich.Console, "is_terminal", True)
    with command._progress(2) as (say, advance):
        advance("one [red]")
        say("a line [0 s]")
        advance("two")
    assert "a line [0 s]" in capsys.readouterr().err


def test_a_log_keeps_records_without_a_file(on_a_gpu: None) -> None:
    log = Log()
    log.write({"who": "ours:auto"})
    assert log.records == [{"who": "ours:auto", **CONDITIONS}]


def test_tb_per_s_of_a_line() -> None:
    record = {"us": 10.0, "floor_us": 5.0, "tb_per_s": 2.5, "err": 0.001}
    assert report.outcome(record) == "10.0 us (floor 5.0, 2.50 TB/s), error 1.0e-03"
    assert report.outcome({"skipped": "no tree mask"}) == "skipped: no tree mask"


def test_conditions_name_the_machine_and_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    device = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setenv("FLASHMAP_SPLITKV_WAVES", "2")
    monkeypatch.setenv("FLASHMAP_PEERS", "/peers")
    found = report._conditions()
    assert (found["gpu"], found["capability"], found["sm_count"]) == ("NVIDIA H200", [9, 0], 132)
    assert found["variables"] == {"FLASHMAP_SPLITKV_WAVES": "2"} and set(CONDITIONS) < set(found)


def test_half_a_tune_replaces_no_table(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run.Bench, "point", lambda self, point: self.not_run.append(point.label))
    result = CliRunner().invoke(app, ["bench", "--tune", "--table", str(tmp_path / "mine.json"), "--peers", "none"])
    assert "no table is written" in result.stderr and "--tune --results" in result.stderr
    assert not (tmp_path / "mine.json").exists()


def test_a_tune_with_forced_kernels_is_refused_before_it_measures(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMAP_SPLITKV_WAVES", "1")
    (line,) = invoke("--tune", code=2).stderr.splitlines()
    assert "FLASHMAP_SPLITKV_WAVES" in line and "unset" in line
