"""Where an engine with FlashMap wrote something else than without it: how near a tie that was.

    python -m benchmarks.ties sglang-text.jsonl

The records are those of ``engine_bench.py ENGINE text``; each is compared with the one of its name that ends in "-off". Up to the first
token that differs both texts are the same, so the target itself says how much it prefers one over the other: their log probabilities in
fp32, by the small models in PyTorch. In bf16 a gap of a few hundredths is a tie. A line a run, and the largest gap; then the same for
the engine's own backends against one another, without FlashMap.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from benchmarks.models.architecture import Target
from benchmarks.models.checkpoints import load_target
from benchmarks.models.train import causal


@dataclass(frozen=True, slots=True)
class Parting:
    """``prompt`` and ``token``: where two runs part; ``gap``: how much less than the likeliest token the worse of the two is, in nats."""

    prompt: int
    token: int
    gap: float


def main() -> None:
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    rows = {row["name"]: row for path in parser.parse_args().results for row in map(json.loads, path.read_text().splitlines())}
    targets: dict[str, Target] = {}

    def gap(name: str, off: dict[str, Any], row: dict[str, Any]) -> float:
        """The largest of these two, said."""
        if row["model"] not in targets:
            targets[row["model"]] = load_target(row["model"])
        found = partings(targets[row["model"]], off, row)
        gaps = ", ".join(f"{one.gap:.3f} at token {one.token} of prompt {one.prompt}" for one in found)
        print(
            f"{name:36} {len(row['prompts']) - len(found)} of {len(row['prompts'])} the same{'; gaps: ' if gaps else ''}{gaps}", flush=True
        )
        return max((one.gap for one in found), default=0.0)

    gaps = []
    for name, row in rows.items():
        model, backend, _ = name.rsplit("-", 2)
        off = rows.get(f"{model}-{backend}-off") or rows.get(f"{model.rpartition('-')[0]}-{backend}-off")  # ll-tree-qlen: as ll-tree
        if off is row:
            continue
        if off is None or "prompts" not in row or "prompts" not in off:
            print(f"{name:36} left out: {'no record without FlashMap' if off is None else 'its prompts are not in the record'}")
        else:
            gaps.append(gap(name, off, row))
    if not gaps:
        sys.exit("no two records could be compared")
    print(f"the largest gap: {max(gaps):.3f}, over {len(gaps)} runs")
    alone = [(name.rsplit("-", 2), row) for name, row in rows.items() if name.endswith("-off") and "prompts" in row]
    pairs = [(one, other) for one, other in combinations(alone, 2) if one[0][0] == other[0][0]]
    theirs = [gap(f"{model}: {first} and {second}", off, row) for ((model, first, _), off), ((_, second, _), row) in pairs]
    if theirs:
        print(f"the largest gap between the engine's own: {max(theirs):.3f}, over {len(theirs)} pairs")


@torch.no_grad()
def partings(target: Target, one: dict[str, Any], other: dict[str, Any]) -> list[Parting]:
    """Of two records with the same prompts. Raises ValueError where they have others."""
    if one["prompts"] != other["prompts"]:
        raise ValueError(f"{one['name']} and {other['name']} have different prompts")
    found = []
    for i, (prompt, first, second) in enumerate(zip(one["prompts"], one["tokens"], other["tokens"], strict=True)):
        at = next((n for n, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]), None)
        if at is None:
            continue
        text = torch.tensor([*prompt, *first[:at]])
        logits, _, _ = target(text[None], torch.arange(len(text))[None], causal)
        said = logits[0, -1].float().log_softmax(-1)
        found.append(Parting(i, at, float(said.max() - min(said[first[at]], said[second[at]]))))
    return found


if __name__ == "__main__":
    main()
