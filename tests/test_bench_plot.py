"""Charts of results: what is drawn from which records. What needs matplotlib is skipped where it is not installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import readme_table
from flashmap.bench import plot
from flashmap.bench.points import Point
from flashmap.cli import app

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OP, FEATURES = RESULTS / "2026-12-01-h200-op.jsonl", RESULTS / "2026-12-01-h200-features.jsonl"
runner = CliRunner()


def record(**change: Any) -> dict[str, Any]:
    facts = {"who": "ours:auto", "shape": "gqa32/8", "kv": "bf16", "mask": "chain", "bs": 1, "L": 4, "ctx": 1024, "page": 64, "us": 2.0}
    return facts | {"lens": "uniform", "gpu": "NVIDIA H200", "torch": "2", "triton": "3"} | change


def test_who_counts_as_whom() -> None:
    times = plot.by_point(
        [
            record(),
            record(who="ours:fast", us=1.0),
            record(who="fa3", us=3.0),
            record(who="somebody", us=0.1),
            record(mask="tree", who="ours:fast", us=5.0),
            record(mask="tree", who="ours:slow", us=6.0),
            record(mask="tree", who="fa3_cascade", us=7.0),
        ]
    )
    chain, tree = Point.of(record()), Point.of(record(mask="tree"))
    fa3 = "FlashAttention 3 (trees: twice and merged)"
    assert times == {chain: {"FlashMap": 2.0, fa3: 3.0}, tree: {"FlashMap": 5.0, fa3: 7.0}}


def test_a_record_gives_its_point_back() -> None:
    for line in (*OP.read_text().splitlines(), *FEATURES.read_text().splitlines()):
        found = json.loads(line)
        assert Point.of(found).label == found["label"]


def test_without_matplotlib_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = runner.invoke(app, ["bench", "--plot", str(OP)])
    assert result.exit_code == 2 and "pip install matplotlib" in result.stderr


def test_a_file_without_times_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    empty = tmp_path / "empty.jsonl"
    empty.write_text(json.dumps(record(us=None)).replace('"us": null', '"skipped": "no"'))
    result = runner.invoke(app, ["bench", "--plot", str(empty), "--out", str(tmp_path)])
    assert result.exit_code == 2 and "empty.jsonl" in result.stderr


def test_all_charts_of_the_committed_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ["bench", "--plot", str(OP), "--plot", str(FEATURES), "--out", str(tmp_path / "charts"), "--json"]
    result = runner.invoke(app, options)
    assert result.exit_code == 0, result.output
    drawn = [Path(path) for path in json.loads(result.stdout)]
    assert [path.name for path in drawn] == ["op-over-floor.svg", "op-over-context.svg", "op-speed-up.svg", "op-over-length.svg"]
    first = [path.read_bytes() for path in drawn]
    runner.invoke(app, options)
    assert [path.read_bytes() for path in drawn] == first, "the same file each time"


def test_what_the_charts_show() -> None:
    pytest.importorskip("matplotlib")
    records = [record(ctx=ctx, us=us) for ctx, us in ((1024, 2.0), (8192, 8.0))]
    records += [record(ctx=ctx, us=us, who="fa3") for ctx, us in ((1024, 4.0), (8192, 8.0))]
    records += [record(L=n, ctx=16384, us=us) for n, us in ((1, 10.0), (2, 11.0), (8, 15.0))]
    times = plot.by_point(records)
    context, heat, length = plot.over_context(times), plot.speed_up(times), plot.over_length(times)
    assert context is not None and heat is not None and length is not None
    lines = {line.get_label(): list(line.get_ydata()) for line in context.axes[0].lines}
    assert lines["FlashMap"][:2] == [2.0, 8.0] and len(lines) == 3 and "floor" in lines
    assert sorted(text.get_text() for text in heat.axes[0].texts) == ["1.00", "2.00"]
    assert next(list(line.get_ydata()) for line in length.axes[0].lines if line.get_label() == "FlashMap") == [1.0, 1.1, 1.5]


def test_a_chart_without_points_is_not_drawn() -> None:
    pytest.importorskip("matplotlib")
    times = plot.by_point([record()])
    assert plot.over_context(times) is None and plot.speed_up(times) is None and plot.over_length(times) is None


def test_readmes_table_and_the_charts_are_what_the_committed_results_give(tmp_path: Path) -> None:
    rows = readme_table.rows([json.loads(line) for line in OP.read_text().splitlines()])
    assert "\n".join(rows) in (ROOT / "README.md").read_text()
    matplotlib = pytest.importorskip("matplotlib")
    for path in plot.draw([OP, FEATURES], tmp_path):
        committed = (ROOT / "docs" / "img" / path.name).read_text()
        if f"v{matplotlib.__version__}," not in committed:
            pytest.skip("drawn with another matplotlib")
        assert path.read_text() == committed, f"{path.name}: run python -m benchmarks.plot"


def test_two_gpus_are_not_one_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "both.jsonl"
    file.write_text("".join(json.dumps(record(gpu=gpu)) + "\n" for gpu in ("NVIDIA H200", "NVIDIA B200")))
    result = runner.invoke(app, ["bench", "--plot", str(file), "--out", str(tmp_path)])
    assert result.exit_code == 2 and "NVIDIA B200 and NVIDIA H200" in result.stderr
