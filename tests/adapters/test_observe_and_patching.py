"""What adapters share: contract probes, installations, and the counters that leave an engine's process."""

import json
import math
import multiprocessing
from dataclasses import dataclass

import pytest
import torch

from flashmap.adapters import install, observe
from flashmap.adapters.patching import Contract, Hook, Installation, probe
from flashmap.core import stats


class Engine:
    def forward(self, query, *, out):
        pass

    def anything(self, **kwargs):
        pass


@dataclass
class Metadata:
    seq_lens: int


HERE = __name__


@pytest.mark.parametrize(
    "contract, missing",
    [
        (Contract(f"{HERE}:Engine.forward", ("query", "out")), None),
        (Contract(f"{HERE}:Engine.anything", ("whatever",)), None),
        (Contract(f"{HERE}:Metadata", fields=("seq_lens",)), None),
        (Contract(f"{HERE}:Engine.backward"), "Engine.backward is missing"),
        (Contract(f"{HERE}:Gone.forward"), "Gone.forward is missing"),
        (Contract(f"{HERE}:Engine.forward", ("query", "key")), "Engine.forward takes no 'key'"),
        (Contract(f"{HERE}:Metadata", fields=("block_table",)), "Metadata has no field 'block_table'"),
        (Contract("no_such_engine.attention:forward"), "no_such_engine.attention cannot be imported"),
    ],
    ids=lambda c: c.target if isinstance(c, Contract) else "",
)
def test_probe(contract, missing):
    found = probe([contract])
    assert (found == ()) if missing is None else (len(found) == 1 and missing in found[0])


def test_remove_undoes_the_last_change_first():
    order = []
    hooks = tuple(Hook(name, "ours", "flashmap", "a test", lambda name=name: order.append(name)) for name in "abc")
    Installation("engine", hooks).remove()
    assert order == ["c", "b", "a"]
    assert str(hooks[0]) == "a -> ours"


def test_engines_are_named():
    with pytest.raises(ValueError, match="'vllm', 'sglang'"):
        install("tgi")


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHMAP_STATS_DIR", str(tmp_path))
    monkeypatch.setattr(observe, "_writing", False)
    stats.reset()
    observe.reset()
    yield tmp_path
    stats.reset()
    observe.reset()


def test_differences():
    observe.reset()
    observe.record("a", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))
    observe.record("a", torch.tensor([1.0]), torch.tensor([1.25]))
    observe.record("b", torch.tensor([math.nan]), torch.tensor([0.0]))
    report = observe.here()
    assert report.layers["a"].steps == [0.5, 0.25] and report.layers["a"].largest == 0.5 and report.layers["a"].scale == 2.5
    assert report.layers["b"].largest == report.largest > 1e30, "NaN is as wrong as it gets"
    observe.reset()


def _child():
    stats.count("vllm", "left", "decode", times=3)
    observe.record("layer", torch.zeros(1), torch.ones(1))


def test_counters_of_all_processes_add_up(files):
    observe.start()
    stats.count("vllm", "left", "decode")
    stats.count("torch_dense", "routed")
    observe.record("layer", torch.zeros(1), torch.zeros(1))
    child = multiprocessing.get_context("fork").Process(target=_child)
    child.start()
    child.join()
    assert child.exitcode == 0
    observe.write()
    report = observe.collect(files)
    assert report.processes == 2
    assert report.counts == {("vllm", "left", "decode"): 4, ("torch_dense", "routed", ""): 1}
    assert report.total("left") == 4 and report.codes("left") == {"decode": 4} and report.total("routed", "x") == 0
    assert report.layers["layer"].calls == 2 and report.largest == 1.0


def test_ticks_write_now_and_then(files, monkeypatch):
    observe.tick()
    assert not list(files.iterdir()), "not started"
    observe.start()
    monkeypatch.setattr(observe, "_written", -math.inf)
    observe.tick()
    (one,) = files.iterdir()
    stats.count("vllm", "left", "decode")
    observe.tick()
    assert json.loads(one.read_text())["counts"] == [], "half a second has not passed"
    observe.write()
    assert json.loads(one.read_text())["counts"] == [["vllm", "left", "decode", 1]]


def test_nothing_is_written_unless_asked(tmp_path, monkeypatch):
    monkeypatch.delenv("FLASHMAP_STATS_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(observe, "_writing", False)
    observe.start()
    observe.tick()
    observe.write()
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_to_is_given_up_with_one_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHMAP_STATS_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(observe, "_writing", False)
    monkeypatch.setattr(observe, "_written", -math.inf)
    observe.start()
    observe.tick()
    observe.tick()
    assert len(caplog.records) == 1 and "FLASHMAP_STATS_DIR" in caplog.text
