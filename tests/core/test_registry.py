"""Names: ours, registered ones, and those of other distributions' entry points."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mean_case import mean_case, near, rows

from flashmap.core import Implementation, VerifyAttention, registry, verify_attention
from flashmap.core.inputs import Call

OURS = ("reference", "torch_dense", "triton_splitkv", "fa3_tail", "fa3", "flashmla_tail", "flashinfer")


class Sevens(Implementation):
    def run(self, call: Call) -> None:
        call.out.fill_(7)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Every test starts with our names and leaves nothing behind."""
    kept = dict(registry._registered)
    registry._registered.clear()
    registry._load_entry_points.cache_clear()
    yield
    registry._registered.clear()
    registry._registered.update(kept)
    registry._load_entry_points.cache_clear()


def test_ours_always_exist() -> None:
    assert registry.names()[: len(OURS)] == OURS
    for name in OURS:
        found = registry.get(name)
        assert found.name == name and isinstance(found, VerifyAttention)
        assert registry.get(name) is found


def test_register_run_unregister() -> None:
    registry.register(Sevens("sevens"))
    assert registry.names() == (*OURS, "sevens")
    assert rows(verify_attention(**mean_case([[1]], [[2]]), impl="sevens")) == [7]
    registry.unregister("sevens")
    assert registry.names() == OURS
    with pytest.raises(ValueError, match="no implementation is named 'sevens': registered are reference, torch_dense, triton_splitkv"):
        verify_attention(**mean_case([[1]], [[2]]), impl="sevens")


def test_a_name_is_taken_once() -> None:
    registry.register(Sevens("sevens"))
    for name in ("sevens", "torch_dense"):
        with pytest.raises(ValueError, match=f"{name!r} is registered already"):
            registry.register(Sevens(name))


def test_replace_and_come_back() -> None:
    registry.register(Sevens("torch_dense"), replace=True)
    assert rows(verify_attention(**mean_case([[1]], [[2]]), impl="torch_dense")) == [7]
    registry.unregister("torch_dense")
    assert rows(verify_attention(**mean_case([[1]], [[2]]), impl="torch_dense")) == near([1.5])


def test_what_lacks_a_part_is_refused() -> None:
    class Half:
        name = "half"

        def run(self, call: Call) -> None: ...

    with pytest.raises(TypeError, match="Half lacks capability, why_not, not_ready, prepare: derive it from"):
        registry.register(Half())  # type: ignore[arg-type]
    assert "half" not in registry.names()


def test_a_base_without_run_says_so() -> None:
    registry.register(Implementation("empty"))
    with pytest.raises(NotImplementedError, match="run"):
        verify_attention(**mean_case([[1]], [[2]]), impl="empty")


# -- entry points ---------------------------------------------------------------------------------------------------------

MODULE = """
from flashmap.core import Implementation

class Halves(Implementation):
    def run(self, call):
        call.out.fill_(0.5)

INSTANCE = Halves("halves")
def make(): return Halves("made")
class Named(Halves):
    def __init__(self): super().__init__("named")
TAKEN = Halves("reference")
class Part:
    name = "part"
    def run(self, call): pass
PART = Part()
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution, as far as importlib.metadata can tell: a module and a dist-info folder on sys.path."""
    (tmp_path / "other_kernels.py").write_text(textwrap.dedent(MODULE))
    info = tmp_path / "other_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-kernels\nVersion: 1.0\n")
    entries = {
        "halves": "other_kernels:INSTANCE",
        "made": "other_kernels:make",
        "named": "other_kernels:Named",
        "gone": "no_such_module:X",
        "taken": "other_kernels:TAKEN",
        "part": "other_kernels:PART",
    }
    lines = "\n".join(f"{name} = {value}" for name, value in entries.items())
    (info / "entry_points.txt").write_text(f"[flashmap.implementations]\n{lines}\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    import sys

    sys.modules.pop("other_kernels", None)


def test_entry_points_register(distribution: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="flashmap"):
        names = registry.names()
    assert set(names) == {*OURS, "halves", "made", "named"} and names[: len(OURS)] == OURS
    out = verify_attention(**mean_case([[1]], [[2]]), impl="halves")
    assert torch.equal(out, torch.full_like(out, 0.5))
    assert registry.get("reference").__class__.__name__ == "Reference"


def test_a_broken_entry_point_is_left_out_with_a_warning(distribution: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="flashmap"):
        registry.names()
        registry.names()
    warnings = {record.args[0]: record.getMessage() for record in caplog.records if record.args}  # type: ignore[index]
    assert set(warnings) == {"gone", "taken", "part"} and len(caplog.records) == 3
    assert "no_such_module" in warnings["gone"] and "'reference' is taken" in warnings["taken"] and "lacks" in warnings["part"]
