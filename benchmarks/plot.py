"""The charts of README and docs, from committed results: ``python benchmarks/plot.py``. Needs matplotlib (flashmap-verify[bench]).

Every number comes from a file of benchmarks/results/, none is written by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
IMAGES = HERE.parent / "docs" / "img"
OP = RESULTS / "2026-11-30-h200-op.jsonl"
SGLANG = RESULTS / "2026-11-30-h200-sglang" / "steps.jsonl"

OURS, GREY = "#0b6e4f", "#9aa5b1"
# Who is shown in the chart of the op: records of these names count as one participant, the faster one of each point.
SERIES = {
    "FlashMap": (("ours:auto",), OURS, "o"),
    "FlashAttention 3 (trees: twice and merged)": (("fa3", "fa3_cascade"), "#c1121f", "s"),
    "FlashMLA": (("flashmla",), "#e09f3e", "^"),
    "FlashInfer": (("flashinfer",), "#5e60ce", "D"),
}


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "flashmap", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    IMAGES.mkdir(exist_ok=True)
    _save(engine_steps(_read(SGLANG)), "sglang-steps.svg")
    _save(over_the_floor(_read(OP)), "op-over-floor.svg")


def engine_steps(rows: list[dict[str, Any]]) -> pyplot.Figure:
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


def over_the_floor(rows: list[dict[str, Any]]) -> pyplot.Figure:
    """The time of one call over the time that its bytes and products need at least, for all points, chains and trees."""
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4), sharey=True)
    for axes, mask in zip(panels, ("chain", "tree"), strict=True):
        _panel(axes, [row for row in rows if row["mask"] == mask and "us" in row])
        axes.set_title(f"{mask}s")
    panels[0].set_ylabel("time / floor")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="upper center", ncols=3, fontsize=8, frameon=False, bbox_to_anchor=(0.5, 1.1))
    figure.text(
        0.01, -0.04, f"{rows[0]['gpu']}, bf16, page 64, torch {rows[0]['torch']}, Triton {rows[0]['triton']}; {OP.name}", fontsize=7
    )
    return figure


def _panel(axes: Axes, rows: list[dict[str, Any]]) -> None:
    floors = {row["label"]: row["floor_us"] for row in rows}
    for title, (names, colour, marker) in SERIES.items():
        times: dict[str, float] = {}
        for row in rows:
            if row["who"] in names:
                times[row["label"]] = min(row["us"], times.get(row["label"], row["us"]))
        x, y = [floors[label] for label in times], [us / floors[label] for label, us in times.items()]
        axes.scatter(x, y, s=16, c=colour, marker=marker, label=title, alpha=0.8, linewidths=0)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="floor: least time for its bytes and products, µs")


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _save(figure: pyplot.Figure, name: str) -> None:
    figure.savefig(IMAGES / name, bbox_inches="tight", metadata={"Date": None})
    print(IMAGES / name)


if __name__ == "__main__":
    main()
