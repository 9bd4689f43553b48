"""Tables of measured times: what follows from one for a request, how files are read, and where the checked-in ones come from."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashmap.bench.tune import changes, derive, read
from flashmap.core import dispatch, registry, tables
from flashmap.core.dispatch import Policy
from flashmap.core.interface import Implementation
from flashmap.core.request import DeviceInfo, VerifyRequest
from flashmap.core.tables import Class, Left, Table

H200 = DeviceInfo.known("sm90")
ROOT = Path(__file__).resolve().parents[2]
PACKAGED = sorted((ROOT / "flashmap" / "core" / "tables").glob("*.json"))


def of(requests: int, tokens: int, us: dict[int, dict[str, float]], **change: Any) -> Class:
    """A class of trees, 32/8 heads: 4 rows a token."""
    facts = {"heads": 32, "kv_heads": 8, "head_dim": 128, "latent": False, "kv": "bf16", "mask": "tree"} | change
    return Class(**facts, requests=requests, tokens=tokens, us=us)


def won(ours: float = 1.0) -> dict[int, dict[str, float]]:
    return {1024: {"ours:mine": ours, "fa3_cascade": 2.0}, 8192: {"ours:mine": 2 * ours, "fa3_cascade": 4.0}}


LOST = {1024: {"ours:mine": 1.0, "fa3_cascade": 2.0}, 8192: {"ours:mine": 5.0, "fa3_cascade": 4.0}}


def table(*classes: Class, left: tuple[Left, ...] = ()) -> Table:
    return Table("NVIDIA H200", (9, 0), 132, "2026-12-01", {}, (), classes, left)


def tree(tokens: int, requests: int = 1, **change: Any) -> VerifyRequest:
    facts: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "mask": "qlen"} | change
    return VerifyRequest(**facts, max_query_len=tokens, num_requests=requests)


def ours(found: Table, request: VerifyRequest) -> bool:
    return found.against("fa3", "mine", request) is None


# -- what follows for a request -----------------------------------------------------------------------------------------


def test_ours_only_if_it_won_or_tied_at_every_length() -> None:
    assert ours(table(of(1, 4, won())), tree(4))
    assert ours(table(of(1, 4, won(2.01))), tree(4)), "within the spread"
    assert not ours(table(of(1, 4, won(2.05))), tree(4))
    assert not ours(table(of(1, 4, LOST)), tree(4))


def test_the_next_measured_class_with_at_least_as_many_rows_decides() -> None:
    found = table(of(1, 20, won()), of(1, 40, LOST))
    assert ours(found, tree(20)) and not ours(found, tree(21)) and not ours(found, tree(40))
    assert not ours(found, tree(41)), "more rows than any class has"


def test_rows_that_one_program_holds_go_together() -> None:
    found = table(of(1, 4, won()), of(1, 17, LOST))
    assert ours(found, tree(16)) and not ours(found, tree(17))
    found = table(of(1, 4, won()), of(1, 8, LOST))
    assert ours(found, tree(4)) and not ours(found, tree(5)), "a nearer class speaks first"


def test_the_next_larger_batch_decides_and_the_largest_for_all_beyond() -> None:
    found = table(of(1, 4, won()), of(8, 4, LOST), of(32, 4, won()))
    assert ours(found, tree(4)) and not ours(found, tree(4, 2))
    found = table(of(1, 4, won()), of(8, 4, won()))
    assert ours(found, tree(4, 500))
    assert not ours(table(of(1, 4, won())), tree(4, 2)), "one request does not speak for a batch"


def test_smaller_classes_speak_too_since_what_is_known_are_upper_bounds() -> None:
    found = table(of(1, 4, won()), of(8, 4, won()), of(1, 20, LOST), of(8, 20, won()))
    assert ours(found, tree(4, 8)) and not ours(found, tree(20, 8))


def test_the_nearest_shape_of_the_same_kind_mask_and_cache_speaks() -> None:
    found = table(of(1, 4, won()), of(1, 4, LOST, heads=64), of(1, 4, LOST, kv_heads=1, heads=8))
    assert ours(found, tree(4)) and ours(found, tree(4, heads=40)) and ours(found, tree(4, head_dim=64, v_head_dim=64))
    assert not ours(found, tree(4, heads=64)) and not ours(found, tree(4, heads=28, kv_heads=4)), "7 query heads a KV head are nearer to 8"
    assert not ours(found, tree(4, heads=8, kv_heads=1))
    for change in (
        {"latent": True, "kv_heads": 1},
        {"mask": None},
        {"kv_dtype": "fp8_e4m3"},
        {"window": 8},
        {"dtype": "fp32", "kv_dtype": "fp32"},
    ):
        assert not ours(found, tree(4, **change)), change
    assert ours(found, tree(4, dtype="fp16", kv_dtype="fp16"))


def test_who_was_not_measured_is_not_ours() -> None:
    found = table(of(1, 4, won()))
    assert found.against("fa3", "another", tree(4)) is not None and found.against("flashmla", "mine", tree(4)) is not None


def test_what_is_left_to_an_engine_whatever_the_times_say() -> None:
    found = table(of(1, 4, won()), left=(Left("fa3", "gqa", "tree", "slower in an engine", "steps.jsonl"),))
    assert found.against("fa3", "mine", tree(4)) == "slower in an engine (steps.jsonl)"


# -- the order of ours --------------------------------------------------------------------------------------------------


def test_ours_are_tried_by_their_times() -> None:
    us = {1024: {"ours:a": 4.0, "ours:b": 1.0, "fa3_cascade": 0.5}, 8192: {"ours:a": 5.0, "ours:b": 9.0, "ours:c": 1.0}}
    assert table(of(1, 4, us)).order(tree(4)) == ("b", "a"), "c was not measured at every length"
    assert table(of(1, 4, us)).order(tree(4, mask=None)) == ()


def test_dispatch_takes_the_fastest_of_ours_that_beats_the_engine() -> None:
    us = {1024: {"ours:composite": 1.0, "ours:triton_splitkv": 2.0, "fa3_cascade": 2.5, "ours:unknown": 0.1}}
    found = table(of(1, 4, us))
    registry.register(Implementation("composite"))
    try:
        assert dispatch.preference(tree(4), H200, found) == ("composite", "triton_splitkv", "torch_dense")
        decision = dispatch.choose(tree(4), H200, Policy(engine_kernel="sglang.fa3"), table=found)
        assert decision.winner == "composite" and decision.passed == ("triton_splitkv",)
        us[8192] = {"ours:composite": 9.0, "ours:triton_splitkv": 17.0, "fa3_cascade": 18.0}
        us[65536] = {"ours:composite": 90.0, "ours:triton_splitkv": 80.0, "fa3_cascade": 81.0}
        assert dispatch.choose(tree(4), H200, Policy(), table=found).winner == "composite"
        assert dispatch.choose(tree(4), H200, Policy(engine_kernel="sglang.fa3"), table=found).winner == "triton_splitkv"
    finally:
        registry.unregister("composite")
    assert dispatch.preference(tree(4), H200, found) == ("triton_splitkv", "torch_dense"), "a name that is not registered is passed over"


def test_a_gpu_without_a_table() -> None:
    other = replace(H200, name="NVIDIA H100 80GB HBM3")
    assert tables.in_force(other) is None and tables.in_force(DeviceInfo("cpu", "cpu")) is None
    for kernel, winner in (("sglang.fa3", None), ("vllm.flashmla", None), ("vllm.triton_attn", "triton_splitkv")):
        assert dispatch.choose(tree(4), other, Policy(engine_kernel=kernel)).winner == winner


# -- files --------------------------------------------------------------------------------------------------------------


def test_a_file_gives_the_table_back() -> None:
    found = table(of(1, 4, won()), left=(Left("fa3", "gqa", "chain", "because", "steps.jsonl"),))
    text = found.to_json()
    again = Table.from_json(text)
    assert (again.classes, again.left, again.to_json()) == (found.classes, found.left, text)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the user's table of an H200 is looked for; nothing is there yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tables.user_file("NVIDIA H200")
    assert path == tmp_path / "flashmap" / "nvidia-h200.json"
    path.parent.mkdir()
    return path


def test_the_users_own_table_comes_before_the_checked_in_one(mine: Path) -> None:
    mine.write_text(table(of(1, 4, LOST)).to_json())
    found = tables.in_force(H200)
    assert found is not None and found.source == str(mine) and tables.in_force(H200) is found
    mine.unlink()
    assert tables.in_force(H200) is found, "read once a process"


def test_a_named_table_comes_first(mine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine.write_text(table(of(1, 4, LOST)).to_json())
    named = tmp_path / "another.json"
    named.write_text(table(of(1, 4, won())).to_json())
    monkeypatch.setenv("FLASHMAP_TABLE", str(named))
    found = tables.in_force(H200)
    assert found is not None and found.source == str(named)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "{}", '{"schema": 0}', table().to_json().replace("NVIDIA H200", "NVIDIA A100"),
        table(of(1, 4, {8192: {"ours:mine": 0.0}})).to_json(), table(of(1, 4, {8192: {"ours:mine": "fast"}})).to_json(),  # type: ignore[dict-item]
        table(of(0, 4, won())).to_json(), table(of(1, 4, won())).to_json().replace('"tokens"', '"tocens"'),
    ],
)  # fmt: skip
def test_a_broken_file_is_one_warning_and_left_out(mine: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    mine.write_text(text)
    with caplog.at_level(logging.WARNING, "flashmap"):
        found = [tables.in_force(H200) for _ in range(3)]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and str(mine) in record.getMessage()
    assert found[0] is found[1] is found[2] is not None and found[0].source == str(PACKAGED[0])


def test_a_named_file_that_is_not_there_is_one_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMAP_TABLE", "/no/such/table.json")
    with caplog.at_level(logging.WARNING, "flashmap"):
        assert tables.in_force(H200) is not None
    assert len(caplog.records) == 1 and "/no/such/table.json" in caplog.text


# -- where tables come from ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PACKAGED, ids=lambda p: p.name)
def test_a_checked_in_table_is_what_its_results_files_give(path: Path) -> None:
    found = Table.from_json(path.read_text())
    assert tables.checked_in(found.gpu) is not None
    results = ROOT / "benchmarks" / "results"
    assert derive(read(results / name for name in found.results)).to_json() == path.read_text()
    assert all((results / left.results).is_file() for left in found.left)


def record(**change: Any) -> str:
    facts = {"who": "ours:auto", "shape": "gqa32/8", "kv": "bf16", "mask": "chain", "bs": 1, "L": 4, "ctx": 1024, "page": 64, "us": 2.0}
    facts |= {
        "lens": "uniform",
        "gpu": "NVIDIA H200",
        "driver": "1",
        "torch": "2",
        "triton": "3",
        "commit": "4",
        "date": "d",
        "version": "v",
    }
    return json.dumps(facts | change) + "\n"


def test_derive_takes_what_a_table_can_say(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    first.write_text(
        record()
        + record(who="fa3", us=3.0)
        + record(who="flashinfer", us=1.0)
        + record(ctx=8192, us=9.0)
        + record(page=1, us=7.0)
        + record(lens="ragged", us=7.0)
        + record(who="fa3", ctx=4096, us=None).replace('"us": null', '"skipped": "no"')
    )
    second.write_text(record(ctx=8192, us=5.0, impl="mine") + record(who="ours:other", ctx=8192, sm_count=7, capability=[8, 0]))
    found = derive(read([first, second]))
    (one,) = found.classes
    assert one.us == {1024: {"ours:triton_splitkv": 2.0, "fa3": 3.0}, 8192: {"ours:mine": 5.0, "ours:other": 2.0}}
    assert (found.gpu, found.sm_count, found.capability, found.results) == ("NVIDIA H200", 7, (8, 0), ("first.jsonl", "second.jsonl"))
    assert found.versions["fa3"] == "v"


def test_derive_refuses_two_gpus_and_nothing(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(record() + record(gpu="NVIDIA A100"))
    with pytest.raises(ValueError, match="one GPU"):
        derive(read([file]))
    file.write_text("")
    with pytest.raises(ValueError, match="no time"):
        derive(read([file]))


def test_a_results_file_that_is_none_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text("{")
    with pytest.raises(ValueError, match=r"results\.jsonl"):
        read([file])
    with pytest.raises(ValueError, match=r"missing\.jsonl"):
        read([tmp_path / "missing.jsonl"])
    file.write_text(record())
    with pytest.raises(ValueError, match="the name of another"):
        read([file, file])


def test_what_changed_is_said_class_by_class() -> None:
    us = {1024: {"ours:a": 1.0, "ours:b": 2.0, "fa3_cascade": 1.5}}
    slower = {1024: {"ours:a": 3.0, "ours:b": 2.0, "fa3_cascade": 1.5}}
    before, after = table(of(1, 4, us), of(1, 20, us)), table(of(1, 4, us), of(1, 20, slower))
    assert changes(before, before) == []
    (change,) = changes(before, after)
    assert "1 x 20 tokens" in change.calls and "a > b" in change.before and "fa3: a" in change.before
    assert "b > a" in change.after and "fa3: the engine" in change.after
    assert [c.before for c in changes(None, after)] == ["no table"] * 2


def test_kernels_that_variables_changed_are_in_no_table(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(record(variables={"FLASHMAP_SPLITKV_WAVES": "1", "FLASHMAP_IMPL": "mine"}))
    with pytest.raises(ValueError, match="FLASHMAP_SPLITKV_WAVES: a table"):
        derive(read([file]))
    file.write_text(json.dumps({"engine": "vllm"}))
    with pytest.raises(ValueError, match="no measurement"):
        read([file])


def test_a_length_that_ours_was_not_measured_at_is_not_won() -> None:
    found = table(of(1, 4, {1024: {"ours:mine": 5.0, "fa3_cascade": 9.0}, 32768: {"fa3_cascade": 50.0}}))
    why = found.against("fa3", "mine", tree(4))
    assert why is not None and "32768 cached was not measured with mine" in why


@pytest.mark.parametrize("error", [PermissionError("no"), RuntimeError("Could not determine home directory.")])
def test_a_home_that_cannot_be_read_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """A container that runs as another user, say: an engine must start all the same."""

    def refused(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(*((tables, "user_file") if isinstance(error, RuntimeError) else (Path, "read_text")), refused)
    packaged = table()
    monkeypatch.setattr(tables, "checked_in", lambda gpu: packaged)
    with caplog.at_level(logging.WARNING, "flashmap"):
        assert tables.in_force(H200) is packaged
    assert len(caplog.records) == 1 and str(error) in caplog.text
