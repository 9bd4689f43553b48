"""benchmarks/ties.py: two runs part where they do, by as much as the target says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.models import data
from benchmarks.models.checkpoints import LLAMA, load_target
from benchmarks.models.speculate import generate
from benchmarks.models.train import causal
from benchmarks.ties import partings

ROOT = Path(__file__).resolve().parents[2]


@torch.no_grad()
def test_the_gap_is_the_targets_own(tmp_path):
    target = load_target(LLAMA)
    prompts = data.prompts(2)
    tokens = generate(target, prompts, 6).tokens
    text = torch.tensor([*prompts[1], *tokens[1][:4]])
    said = target(text[None], torch.arange(len(text))[None], causal)[0][0, -1].log_softmax(-1)
    best, second = said.topk(2).indices.tolist()
    assert tokens[1][4] == best
    off = {"name": "ll-x-off", "model": LLAMA, "prompts": prompts, "tokens": tokens}
    other = {**off, "name": "ll-x-auto", "tokens": [tokens[0], [*tokens[1][:4], second, 0]]}
    (parting,) = partings(target, off, other)
    assert (parting.prompt, parting.token) == (1, 4) and parting.gap == pytest.approx(float(said[best] - said[second]), abs=1e-5)
    assert partings(target, off, off) == []

    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (off, other, {**other, "name": "ll-y-off"}, {**off, "name": "ds-y-off"})))
    done = subprocess.run([sys.executable, "-m", "benchmarks.ties", str(file)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "1 of 2 the same" in done.stdout and f"the largest gap: {parting.gap:.3f}, over 1 runs" in done.stdout
    assert "ll: x and y" in done.stdout and f"between the engine's own: {parting.gap:.3f}, over 1 pairs" in done.stdout
    file.write_text(json.dumps(other) + "\n")
    alone = subprocess.run([sys.executable, "-m", "benchmarks.ties", str(file)], cwd=ROOT, capture_output=True, text=True)
    assert alone.returncode == 1 and "left out: no record without FlashMap" in alone.stdout
