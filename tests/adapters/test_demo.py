"""The demo's own parts that need no engine: the op's table, what is printed, and the models it serves."""

import dataclasses
import json

import pytest
import torch

from flashmap import demo, random_models


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
    fields = dict(seconds=1.0, drafted=0, accepted=0, routed=0, left={}, tokens_equal=True, largest_difference=None)
    return demo.EngineRow(title, **(fields | changes))


@pytest.mark.parametrize("equal, code, word", [(True, 0, "equal"), (False, 1, "DIFFERENT")])
def test_what_is_printed_and_the_exit_code(small, monkeypatch, capsys, equal, code, word):
    rows = [row("plain"), row("fast", drafted=8, accepted=2, routed=6, left={"decode": 1}, tokens_equal=equal, largest_difference=1e-6)]
    monkeypatch.setattr(demo, "engine_rows", lambda say: (rows, None))
    assert demo.main() == code
    printed = capsys.readouterr().out
    for text in (word, "2 of 8 (25%)", "6 of 6 routed", "1 decode", "1.0e-06", "torch_dense *"):
        assert text in printed


def test_json_is_all_of_stdout(small, monkeypatch, capsys):
    monkeypatch.setattr(demo, "engine_rows", lambda say: ([], "no engine here"))
    assert demo.main(json=True) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["problem"] == "no engine here" and printed["engine"] == [] and len(printed["op"]) >= 9


def test_models_are_the_same_bytes_every_time(tmp_path):
    pytest.importorskip("safetensors")
    for name in random_models.MODELS:
        one, two = (random_models.write(name, tmp_path / f"{name}{i}") for i in range(2))
        content = (one / "model.safetensors").read_bytes()
        assert content == (two / "model.safetensors").read_bytes()
        assert len(content) < 10 << 20
        assert json.loads((one / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with pytest.raises(ValueError, match="deepseek_v3"):
        random_models.write("gpt", tmp_path)
