"""The examples run as a reader would run them, and the documents name what exists."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashmap import env

ROOT = Path(__file__).resolve().parents[2]


def run(example: str) -> str:
    """The example's output, as its own process with this checkout importable."""
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, f"examples/{example}"], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_call_it() -> None:
    errors = re.findall(r"^(chain|tree): .* by (\w+), .* (\S+)$", run("01_call_it.py"), re.MULTILINE)
    assert [kind for kind, _, _ in errors] == ["chain", "tree"]
    assert all(float(error) < 1e-2 for _, _, error in errors)


def test_add_an_implementation() -> None:
    counts = dict(re.findall(r"^(ok|declined|failed): (\d+)$", run("02_add_an_implementation.py"), re.MULTILINE))
    assert int(counts["ok"]) > 5 and int(counts["declined"]) > 5 and counts["failed"] == "0"


def test_it_registers_from_a_package_of_its_own(tmp_path: Path) -> None:
    """What pip leaves behind for such a package: its module, and the entry point in its metadata."""
    (tmp_path / "torch_sdpa.py").write_text((ROOT / "examples" / "02_add_an_implementation.py").read_text())
    info = tmp_path / "torch_sdpa-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-sdpa\nVersion: 1.0\n")
    points = "torch_sdpa = torch_sdpa:IMPLEMENTATION\nmissing = no_such_module:IMPLEMENTATION\n"
    (info / "entry_points.txt").write_text(f"[flashmap.implementations]\n{points}")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "flashmap", *arguments], cwd=tmp_path, env=environ, capture_output=True, text=True)

    listed = {one["name"]: one for one in json.loads(command("list", "--json", "--arch", "cpu").stdout)}
    assert listed["torch_sdpa"]["reasons"] == [] and "missing" not in listed
    explained = json.loads(command("explain", "--json", "--arch", "sm90", "--impl", "torch_sdpa").stdout)
    assert explained["winner"] == "torch_sdpa"
    left_out = [f for f in json.loads(command("doctor", "--json").stdout)["findings"] if f["code"] == "left_out"]
    assert len(left_out) == 1 and "missing" in left_out[0]["text"]


def test_every_variable_is_documented() -> None:
    text = (ROOT / "docs" / "how-it-decides.md").read_text()
    assert [name for name in env.VARIABLES if f"`{name}`" not in text] == []


@pytest.mark.parametrize("document", ["README.md", "docs/how-it-decides.md", "docs/add-an-implementation.md"])
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []
