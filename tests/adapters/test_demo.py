"""The demo's own parts that need no engine: the op's table, what is printed, and what it says where it has no model."""

import dataclasses
import json

import pytest
import torch

from flashmap import demo


@pytest.fixture
def small(monkeypatch):
    shapes = [dataclasses.replace(s, title=f"shape {i}", requests=2, keys=40, heads=max(2, s.kv_heads)) for i, s in enumerate(demo._SHAPES)]
    monkeypatch.setattr(demo, "_SHAPES", tuple(shapes))
    monkeypatch.setattr(demo, "_time", lambda run, device: run() is None)


def test_op_table(small):
    rows = demo.op_table()
    assert {row.shape for row in rows} == {"shape 0", "shape 1", "shape 2"}
    for shape in ("shape 0", "shape 1", "shape 2"):
        found = {row.implementation: row for row in rows if row.shape == shape}
        assert {"reference", "torch_dense", "triton_splitkv"} <= set(found)
        assert sum(row.chosen for row in found.values()) == 1
        for row in found.values():
            assert row.declined if row.milliseconds is None else row.error <= 1e-2
    if not torch.cuda.is_available():
        assert all(row.declined for row in rows if row.implementation == "triton_splitkv")


def row(title, **changes):
    fields = dict(seconds=1.0, text="pass", steps=0, drafted=0, accepted=0, routed=0, left={}, tokens_equal=True, largest_difference=None)
    return demo.EngineRow(title, **(fields | changes))


@pytest.mark.parametrize("equal, code, word", [(True, 0, "equal"), (False, 1, "DIFFERENT")])
def test_what_is_printed_and_the_exit_code(small, monkeypatch, capsys, equal, code, word):
    rows = [
        row("plain"),
        row("fast", steps=4, drafted=8, accepted=2, routed=6, left={"decode": 1}, tokens_equal=equal, largest_difference=1e-6),
    ]
    monkeypatch.setattr(demo, "engine_rows", lambda say, model: (rows, None))
    assert demo.main() == code
    printed = capsys.readouterr().out
    for text in (word, "»pass«", "1.50", "2 of 8 (25%)", "6 of 6 routed", "1 decode", "1.0e-06", "torch_dense *"):
        assert text in printed


def test_json_is_all_of_stdout(small, monkeypatch, capsys):
    monkeypatch.setattr(demo, "engine_rows", lambda say, model: ([], "no engine here"))
    assert demo.main(json=True) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["problem"] == "no engine here" and printed["engine"] == [] and len(printed["op"]) >= 9


def test_without_a_model_it_says_what_to_do(small, monkeypatch, tmp_path, capsys):
    assert (demo._MODEL / "config.json").exists(), "the checkout has one"
    for model in (None, tmp_path / "mine"):
        monkeypatch.setattr(demo, "_MODEL", tmp_path / "nowhere")
        assert demo.main(model=model) == 1
        printed = capsys.readouterr().out
        assert str(model or tmp_path / "nowhere") in printed and "flashmap demo --model DIR" in printed and "torch_dense *" in printed
