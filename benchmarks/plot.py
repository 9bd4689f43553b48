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
OP = RESULTS / "2026-12-01-h200-op.jsonl"
FEATURES = RESULTS / "2026-12-01-h200-features.jsonl"
STEPS = (RESULTS / "2026-12-01-h200-sglang-drafts" / "sglang-steps.jsonl", RESULTS / "2026-12-01-h200-vllm" / "vllm-steps.jsonl")

LABELS = {"sglang": "SGLang", "vllm": "vLLM"}
OURS, GREY = SERIES["FlashMap"][1], "#9aa5b1"


def main() -> None:
    for path in draw([OP, FEATURES], IMAGES):
        print(path)
    rows = [json.loads(line) for path in STEPS for line in path.read_text().splitlines()]
    # SGLang's trees, and vLLM's chains, as it has no trees.
    rows = [row for row in rows if row["model"] == "llama8b" and (row["topk"] > 1 or row["engine"] == "vllm")]
    figure = engine_steps([row for row in rows if "nodrafts" not in row["name"]])
    figure.savefig(IMAGES / "engine-steps.svg", bbox_inches="tight", metadata={"Date": None})
    print(IMAGES / "engine-steps.svg")
    readme_table.main(OP)


def engine_steps(rows: list[dict[str, Any]]) -> Figure:
    """Milliseconds a verify step in whole engines, with FlashMap and without, by context; of two runs of one name, the later one."""
    engines = sorted({row["engine"] for row in rows})
    figure, panels = pyplot.subplots(1, len(engines), figsize=(9, 2.8), squeeze=False)
    for axes, engine in zip(panels[0], engines, strict=True):
        one = list({row["name"]: row for row in rows if row["engine"] == engine}.values())
        one.sort(key=lambda row: (row["backend"].lower().startswith("triton"), row["flashmap"] != "off"))
        bars = [(context, row) for context in one[0]["ctx"] for row in one]
        for y, (context, row) in enumerate(reversed(bars)):
            value = row["ctx"][context]["ms_per_step"]
            axes.barh(y, value, color=GREY if row["flashmap"] == "off" else OURS)
            axes.text(value + 0.8, y, f"{value:.1f}", va="center")
        axes.set_yticks(range(len(bars)), [f"{int(c) // 1024}k, {_name(row)}" for c, row in reversed(bars)])
        axes.set_xlabel("milliseconds a verify step")
        axes.set_xlim(right=1.2 * max(row["ctx"][c]["ms_per_step"] for c, row in bars))
        versions, draft = one[0]["versions"], one[0]["draft_tokens"]
        kind = f"a tree of {draft}" if one[0]["topk"] > 1 else f"a chain of {draft}"
        axes.set_title(f"{LABELS[engine]} {versions[engine]}, EAGLE, {kind}", fontsize=9, loc="left")
    figure.suptitle(f"Llama-3.1-8B's shape, batch 1, {rows[0]['machine']}", fontsize=9, x=0.01, ha="left")
    figure.tight_layout()
    return figure


def _name(row: dict[str, Any]) -> str:
    return row["backend"] + ("" if row["flashmap"] == "off" else " + FlashMap")


if __name__ == "__main__":
    main()
