"""Everything in README and docs that shows results, from committed results: ``python -m benchmarks.plot`` in a checkout.

It draws docs/img/ and fills README's table. It needs matplotlib (flashmap-verify[bench]) and no GPU. Every number comes from a file of
benchmarks/results/, none is written by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.figure import Figure

from benchmarks import readme_table
from flashmap.bench.plot import SERIES, draw

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "img"
OP = RESULTS / "2026-11-30-h200-op.jsonl"
FEATURES = RESULTS / "2026-11-30-h200-features.jsonl"
SGLANG = RESULTS / "2026-11-30-h200-sglang" / "steps.jsonl"

OURS, GREY = SERIES["FlashMap"][1], "#9aa5b1"


def main() -> None:
    for path in draw([OP, FEATURES], IMAGES):
        print(path)
    figure = engine_steps([json.loads(line) for line in SGLANG.read_text().splitlines()])
    figure.savefig(IMAGES / "sglang-steps.svg", bbox_inches="tight", metadata={"Date": None})
    print(IMAGES / "sglang-steps.svg")
    readme_table.main(OP)


def engine_steps(rows: list[dict[str, Any]]) -> Figure:
    """Milliseconds a verify step in a whole engine, with FlashMap and without, by context."""
    figure, axes = pyplot.subplots(figsize=(7, 2.6))
    bars = [(context, row) for context in rows[0]["ctx"] for row in rows]
    for y, (context, row) in enumerate(reversed(bars)):
        value = row["ctx"][context]["ms_per_step"]
        off = row["flashmap"] == "off"
        axes.barh(y, value, color=GREY if off else OURS)
        axes.text(value + 0.6, y, f"{value:.1f} ms", va="center")
    axes.set_yticks(
        range(len(bars)), [f"{int(c) // 1024}k, {r['backend']}{'' if r['flashmap'] == 'off' else ' + FlashMap'}" for c, r in reversed(bars)]
    )
    axes.set_xlabel("milliseconds a verify step")
    versions = ", ".join(f"{name} {version}" for name, version in rows[0]["versions"].items())
    axes.set_title(
        f"Llama-3.1-8B's shape, EAGLE, a tree of {rows[0]['draft_tokens']} tokens, batch 1\n{rows[0]['machine']}, {versions}",
        fontsize=9,
        loc="left",
    )
    return figure


if __name__ == "__main__":
    main()
