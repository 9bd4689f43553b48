"""The table in README.md, from a results file; ``plot.py`` calls it.

Replaces what stands between the two markers. Every number comes from the file, none is written by hand.
"""

from __future__ import annotations

import json
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- H200 TABLE: begin", "<!-- H200 TABLE: end -->"
NAMES = {
    "fa3": "FlashAttention 3",
    "fa3_cascade": "FlashAttention 3, twice and merged",
    "flashmla": "FlashMLA",
    "flashinfer": "FlashInfer",
}
POINTS = (
    "gqa32/8 bs1 L4 ctx8192",
    "gqa32/8 bs8 L4 ctx8192",
    "gqa32/8 bs8 L17 ctx8192",
    "gqa8/1 bs1 L17 ctx65536",
    "gqa8/1 bs32 L4 ctx4096",
    "mla16 bs1 L4 ctx8192",
    "mla16 bs8 L17 ctx8192",
    "mla128 bs1 L17 ctx8192",
)


def rows(records: list[dict]) -> list[str]:
    times: dict[str, dict[str, float]] = {}
    for record in records:
        if record.get("us") is not None:
            times.setdefault(record["label"], {})[record["who"]] = record["us"]
    lines = ["| call | FlashMap | fastest other |", "|---|---|---|"]
    for point in POINTS:
        for mask in ("chain", "tree"):
            found = times.get(f"{point} {mask}", {})
            others = {who: us for who, us in found.items() if who in NAMES}
            if "ours:auto" not in found or not others:
                continue
            best = min(others, key=others.__getitem__)
            lines.append(f"| {_words(point)}, {mask} | {found['ours:auto']:.1f} | {others[best]:.1f} ({NAMES[best]}) |")
    return lines


def _words(point: str) -> str:
    shape, batch, length, keys = point.split()
    heads = f"GQA {shape[3:]} heads" if shape.startswith("gqa") else f"MLA {shape[3:]} heads"
    return f"{heads}, batch {batch[2:]}, {length[1:]} tokens, {int(keys[3:]):,} keys"


def main(path: Path) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    facts, name = records[0], path.name
    text = README.read_text()
    begin = text.index("\n", text.index(BEGIN)) + 1
    intro = (
        f"µs a call on one {facts['gpu']}, bf16, page size 64, torch {facts['torch']}, Triton {facts['triton']}; median of CUDA graph "
        f"replays with a cold L2, all in one run. All points: [{name}](benchmarks/results/{name}), made at commit {facts['commit'][:7]} "
        f"by `{facts['command']}`; `flashmap bench --points all` measures them again.\n"
    )
    README.write_text(text[:begin] + intro + "\n" + "\n".join(rows(records)) + "\n" + text[text.index(END) :])
