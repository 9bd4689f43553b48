"""``flashmap bench --plot``: charts of results files. Needs matplotlib (flashmap-verify[bench]) and no GPU.

Every number comes from the files. A chart that they have no points for is not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmap.bench.points import Point
from flashmap.bench.tune import read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = "FlashMap"
# Who is drawn: records of these names count as one participant, the faster one of each point. Of ours, the automatic choice if it was timed.
SERIES: dict[str, tuple[tuple[str, ...], str, str]] = {
    OURS: (("ours:auto",), "#0b6e4f", "o"),
    "FlashAttention 3 (trees: twice and merged)": (("fa3", "fa3_cascade"), "#c1121f", "s"),
    "FlashMLA": (("flashmla",), "#e09f3e", "^"),
    "FlashInfer": (("flashinfer",), "#5e60ce", "D"),
    "SGLang extend": (("sglang_extend",), "#8d99ae", "v"),
    "SGLang verify": (("sglang_verify",), "#6c757d", "<"),
    "vLLM unified": (("vllm_unified",), "#b08968", ">"),
    "seed kernel": (("seed",), "#adb5bd", "x"),
}
Times = dict[Point, dict[str, float]]


def draw(files: Sequence[Path], out: Path) -> list[Path]:
    """Draw what the files have points for into the folder ``out``, as SVG. Raises ValueError without matplotlib, without a time, or for two GPUs."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("charts need matplotlib: pip install matplotlib") from None
    records = [record for run in read(files).values() for record in run if "us" in record]
    if not records:
        raise ValueError(f"no time stands in {', '.join(map(str, files))}: write them with flashmap bench --json-out FILE")
    gpus = sorted({record["gpu"] for record in records})
    if len(gpus) > 1:
        raise ValueError(f"the files are of {' and '.join(gpus)}: draw those of one GPU at a time")
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "flashmap", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    times, facts = by_point(records), records[0]
    charts: dict[str, Callable[[Times], Figure | None]] = {
        "op-over-floor.svg": over_the_floor,
        "op-over-context.svg": over_context,
        "op-speed-up.svg": speed_up,
        "op-over-length.svg": over_length,
    }
    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, chart in charts.items():
        figure = chart(times)
        if figure is None:
            continue
        source = f"{facts['gpu']}, torch {facts['torch']}, Triton {facts['triton']}; {', '.join(file.name for file in files)}"
        figure.text(0.01, -0.04, source, fontsize=7)
        figure.savefig(out / name, bbox_inches="tight", metadata={"Date": None})
        drawn.append(out / name)
    return drawn


def by_point(records: Iterable[dict[str, Any]]) -> Times:
    """{point: {who: µs}} of SERIES; of ours the automatic choice, or else the fastest that was named."""
    series = {name: title for title, (names, _, _) in SERIES.items() for name in names}
    times: Times = {}
    named: Times = {}
    for record in records:
        point = Point.of(record)
        title = series.get(record["who"], OURS if record["who"].startswith("ours:") else "")
        into = named if title == OURS and record["who"] != "ours:auto" else times
        if title:
            found = into.setdefault(point, {})
            found[title] = min(record["us"], found.get(title, math.inf))
    for point, found in named.items():
        times.setdefault(point, {}).setdefault(OURS, found[OURS])
    return times


def over_the_floor(times: Times) -> Figure | None:
    """The time of a call over the time that its bytes and products need at least, for all points, chains and trees."""
    figure, panels = _panels(1, 2, (9, 4), sharey=True)
    for axes, mask in zip(panels[0], ("chain", "tree"), strict=True):
        for title, (_, colour, marker) in SERIES.items():
            found = [(point.floor_us, us[title]) for point, us in times.items() if point.mask == mask and title in us]
            x, y = [floor for floor, _ in found], [us / floor for floor, us in found]
            if found:
                axes.scatter(x, y, s=16, c=colour, marker=marker, label=title, alpha=0.8, linewidths=0.8 if marker == "x" else 0)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="floor: least time for its bytes and products, µs", title=f"{mask}s")
    panels[0][0].set_ylabel("time / floor")
    _legend(figure, panels)
    return figure


def over_context(times: Times) -> Figure | None:
    """Time over the cached tokens, per participant, with the floor: for each shape the batch that was measured at most of them."""
    lines = _lines(times, lambda p: (p.shape, p.mask, p.bs, p.length, p.page, p.kv, p.spread), lambda p: p.ctx)
    best: dict[tuple[str, str], list[Point]] = {}
    for (shape, mask, *_), points in lines.items():
        key = (shape.name, mask)
        best[key] = max(best.get(key, []), points, key=lambda line: (len(line), line[-1].ctx if line else 0))
    names = list(dict.fromkeys(name for name, _ in best))
    if not names:
        return None
    figure, panels = _panels(len(names), 2, (9, 2.6 * len(names)))
    for row, name in zip(panels, names, strict=True):
        for axes, mask in zip(row, ("chain", "tree"), strict=True):
            points = best.get((name, mask), [])
            if not points:
                axes.set_axis_off()
                continue
            _draw(axes, times, points, lambda p: p.ctx)
            axes.plot([p.ctx for p in points], [p.floor_us for p in points], "--", color="black", linewidth=0.8, label="floor")
            axes.set(xscale="log", yscale="log", title=f"{name}, {points[0].bs} x {points[0].length} tokens, {mask}")
            axes.set_xticks([p.ctx for p in points], [_thousands(p.ctx) for p in points], minor=False)
            axes.minorticks_off()
        row[0].set_ylabel("µs a call")
    for axes in panels[-1]:
        axes.set_xlabel("cached tokens")
    figure.tight_layout()
    _legend(figure, panels)
    return figure


def speed_up(times: Times) -> Figure | None:
    """How many times faster than the fastest other, by packed rows and the bytes of keys and values: geometric means of the points."""
    figure, panels = _panels(1, 2, (11, 3.6))
    cells: dict[str, dict[tuple[int, int], list[float]]] = {"chain": {}, "tree": {}}
    for point, us in times.items():
        others = [one for title, one in us.items() if title != OURS]
        if OURS in us and others:
            cell = (math.ceil(math.log2(point.rows)), math.floor(math.log2(point.kv_bytes / 1e6) / 2))
            cells[point.mask].setdefault(cell, []).append(math.log2(min(others) / us[OURS]))
    every = sorted({cell for found in cells.values() for cell in found})
    if not every:
        return None
    rows, sizes = sorted({row for row, _ in every}), sorted({size for _, size in every})
    for axes, (mask, found) in zip(panels[0], cells.items(), strict=True):
        mean = {cell: sum(logs) / len(logs) for cell, logs in found.items()}
        grid = [[mean.get((row, size), math.nan) for size in sizes] for row in rows]
        axes.imshow(grid, cmap="PiYG", vmin=-1.5, vmax=1.5, aspect="auto", origin="lower")
        for (row, size), value in mean.items():
            axes.text(sizes.index(size), rows.index(row), f"{2**value:.2f}", ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(sizes)), [f"{4.0**n:g}-{4.0 ** (n + 1):g}" for n in sizes], rotation=30)
        axes.set_yticks(range(len(rows)), [f"<= {2**n}" for n in rows])
        axes.set(title=f"{mask}s: time of the fastest other / FlashMap's", xlabel="MB of keys and values", ylabel="rows a KV head")
    figure.tight_layout()
    return figure


def over_length(times: Times) -> Figure | None:
    """t(L) / t(1): what more query tokens cost, per participant, for each shape and batch measured at one token and at more."""
    lines = _lines(times, lambda p: (p.shape, p.mask, p.bs, p.ctx, p.page, p.kv, p.spread), lambda p: p.length)
    found = [points for points in lines.values() if points[0].length == 1 and len(points) > 2]
    if not found:
        return None
    columns = min(3, len(found))
    figure, panels = _panels(-(-len(found) // columns), columns, (3.3 * columns, 2.8 * -(-len(found) // columns)))
    flat = [axes for row in panels for axes in row]
    for axes in flat[len(found) :]:
        axes.set_axis_off()
    for axes, points in zip(flat, found, strict=False):
        first = points[0]
        _draw(axes, times, points, lambda p: p.length, over_first=True)
        axes.plot(
            [p.length for p in points], [p.floor_us / first.floor_us for p in points], "--", color="black", linewidth=0.8, label="floor"
        )
        axes.set_xscale("log", base=2)
        axes.set_xticks([p.length for p in points], [str(p.length) for p in points])
        axes.set(
            title=f"{first.shape.name}, batch {first.bs}, {_thousands(first.ctx)}, {first.mask}", xlabel="L, query tokens of a request"
        )
    for row in panels:
        row[0].set_ylabel("t(L) / t(1)")
    figure.tight_layout()
    _legend(figure, panels)
    return figure


def _lines(times: Times, key: Callable[[Point], Any], x: Callable[[Point], int]) -> dict[Any, list[Point]]:
    """The points that differ in ``x`` alone, in its order, where there are several."""
    lines: dict[Any, list[Point]] = {}
    for point in sorted(times, key=x):
        lines.setdefault(key(point), []).append(point)
    return {name: points for name, points in lines.items() if len(points) > 1}


def _draw(
    axes: Axes,
    times: Times,
    points: list[Point],
    x: Callable[[Point], int],
    *,
    over_first: bool = False,
) -> None:
    """A line a participant; ``over_first``: as parts of its value at the first point."""
    for title, (_, colour, marker) in SERIES.items():
        found = [(x(point), times[point][title]) for point in points if title in times[point]]
        if not found or (over_first and title not in times[points[0]]):
            continue
        unit = found[0][1] if over_first else 1.0
        axes.plot(
            [a for a, _ in found], [b / unit for _, b in found], marker=marker, markersize=4, color=colour, linewidth=1.2, label=title
        )


def _panels(rows: int, columns: int, size: tuple[float, float], *, sharey: bool = False) -> tuple[Figure, list[list[Axes]]]:
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(rows, columns, figsize=size, sharey=sharey, squeeze=False)
    return figure, [list(row) for row in panels]


def _legend(figure: Figure, panels: list[list[Axes]]) -> None:
    handles: dict[Any, Any] = {}
    for axes in (axes for row in panels for axes in row):
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=3, fontsize=8, frameon=False, bbox_to_anchor=(0.5, 1.0))


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
