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
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # threads wait for each other where all cores are busy
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


def test_tree_speculation() -> None:
    found = re.findall(
        r"^(.*): (\d+) steps of the target, (\S+) tokens a step, the same text$", run("03_tree_speculation.py"), re.MULTILINE
    )
    assert [title for title, _, _ in found] == ["no drafter", "chain of 6", "tree of 8"]
    alone, chain, tree = (float(tokens) for _, _, tokens in found)
    assert alone < 1.8 < chain < tree


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


@pytest.fixture
def an_engine(tmp_path: Path) -> Path:
    """A package that answers as SGLang's server does, so far as the examples ask; it takes twice as long without FlashMap."""
    (tmp_path / "sglang" / "test").mkdir(parents=True)
    for folder in ("sglang", "sglang/test"):
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "sglang" / "launch_server.py").write_text(
        "import argparse, http.server, json, os\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--port', type=int)\n"
        "port = parser.parse_known_args()[0].port\n"
        "seconds = 2.0 if os.environ['FLASHMAP_DISABLE'] == '1' else 1.0\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers()\n"
        "    def do_POST(self):\n"
        "        self.send_response(200); self.end_headers()\n"
        "        told = {'completion_tokens': 30, 'e2e_latency': seconds, 'spec_verify_ct': 12}\n"
        "        self.wfile.write(json.dumps({'meta_info': told}).encode())\n"
        "http.server.HTTPServer(('127.0.0.1', port), Handler).serve_forever()\n"
    )
    (tmp_path / "sglang" / "test" / "few_shot_gsm8k.py").write_text(
        "def run_eval(args):\n"
        "    assert args.host == '127.0.0.1' and len(open(args.data_path).readlines()) == args.num_questions\n"
        "    open('tmp_output_gsm8k.txt', 'w').write('the same')\n"
        "    return {'accuracy': 0.5, 'invalid': 0.0, 'latency': 1.0, 'output_throughput': 9.0}\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("example", "rows"),
    [
        ("deepseek_eagle_sglang.py", [["without", "2.000", "30", "2.500", "15.00"], ["with", "1.000", "30", "2.500", "30.00"]]),
        ("gsm8k_sglang.py", [["without", "0.500", "0.000", "1.000", "9.000"], ["with", "0.500", "0.000", "1.000", "9.000"]]),
    ],
)
def test_sglang_examples(an_engine: Path, example: str, rows: list[list[str]]) -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(an_engine), str(ROOT)))}
    command = [sys.executable, f"examples/{example}", "--tiny", "--", "--tp", "1"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if line.startswith("|")]
    assert found[1:] == rows
    assert done.stdout.count("--tp 1") == 2 and done.stdout.count("models/deepseek_v3_tiny") == 2


def test_every_variable_is_documented() -> None:
    text = (ROOT / "docs" / "how-it-decides.md").read_text()
    assert [name for name in env.VARIABLES if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    "document", ["README.md", "docs/how-it-decides.md", "docs/add-an-implementation.md", "docs/engines.md", "benchmarks/models/README.md"]
)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []
