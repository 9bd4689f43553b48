"""``flashmap bench`` on a GPU: who is right is timed, and a table of measured times follows from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flashmap.bench.tune import derive, read
from flashmap.cli import app
from flashmap.core import tables
from flashmap.core.request import DeviceInfo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OPTIONS = ["bench", "--heads", "8/1,mla16", "--context", "1k", "--peers", "none"]


def test_small_points_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    result = CliRunner().invoke(app, [*OPTIONS, "--impl", "auto,triton_splitkv", "--host", "--json-out", str(out)])
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in out.read_text().splitlines()]
    timed = [record for record in records if "us" in record]
    assert len(timed) == 8 and all(record["us"] > 0 and record["err"] < 0.01 and record["sm_count"] > 0 for record in timed)
    assert {record["impl"] for record in timed if record["who"] == "ours:triton_splitkv"} == {"triton_splitkv"}
    assert all(record["host_us"] > 0 for record in records if "host_us" in record)
    assert len(derive(read([out])).classes) == 4


def test_tune_writes_a_table_for_this_gpu(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    result = CliRunner().invoke(app, [*OPTIONS, "--tune", "--impl", "triton_splitkv", "--table", str(path)])
    assert result.exit_code == 0, result.output
    found, device = tables.Table.from_json(path.read_text()), DeviceInfo.of(torch.device("cuda"))
    assert (found.gpu, found.capability, found.sm_count) == (device.name, device.capability, device.sm_count)
    assert len(found.classes) == 4 and (tmp_path / "table.jsonl").is_file()
