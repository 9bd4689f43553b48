"""The examples run as a reader would run them, and the documents name what exists."""

from __future__ import annotations

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


def test_every_variable_is_documented() -> None:
    text = (ROOT / "docs" / "how-it-decides.md").read_text()
    assert [name for name in env.VARIABLES if f"`{name}`" not in text] == []


@pytest.mark.parametrize("document", ["README.md", "docs/how-it-decides.md", "docs/add-an-implementation.md"])
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []
