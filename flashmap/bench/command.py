"""``flashmap bench``: its options, its progress bar and what it prints. Measuring is run.py, tables tune.py, charts plot.py.

cli.py adds it to the ``flashmap`` command. torch is imported when something is measured, matplotlib when something is drawn.
"""

from __future__ import annotations

import json as jsonlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashmap.bench import points as all_points
from flashmap.bench.points import Point, Ratio, Shape

if TYPE_CHECKING:
    from flashmap.bench.run import Bench, Participants
    from flashmap.core.tables import Table


def bench(
    points: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(all_points.SETS)}, a regular expression, or SET:REGEX.", show_default="quick, with --tune tune"),
    ] = None,
    heads: Annotated[str, typer.Option(help="Sweep: such as 32/8,64/8d256,mla16.", show_default="32/8")] = "",
    batch: Annotated[str, typer.Option(help="Sweep: requests, such as 1,8,64.", show_default="1")] = "",
    tokens: Annotated[str, typer.Option(help="Sweep: query tokens of a request, such as 1,4,17.", show_default="4")] = "",
    context: Annotated[str, typer.Option(help="Sweep: cached tokens, such as 1k,8k,128k.", show_default="8k")] = "",
    dtype: Annotated[str, typer.Option(help="Sweep: of the cache, bf16 or fp8.", show_default="bf16")] = "",
    page: Annotated[str, typer.Option(help="Sweep: page sizes, such as 1,16,64.", show_default="64")] = "",
    mask: Annotated[str, typer.Option(help="Sweep: chain or tree.", show_default="chain,tree")] = "",
    ragged: Annotated[bool, typer.Option("--ragged", help="Sweep: every batch with ragged lengths too.")] = False,
    features: Annotated[str, typer.Option(help="Pairs of points: fp8, page, ragged, length, imbalance, or all.")] = "",
    host: Annotated[bool, typer.Option("--host", help="Also the host time of an eager call.")] = False,
    peers: Annotated[str | None, typer.Option(help="Names, all or none.", show_default="those that engines verify with")] = None,
    impl: Annotated[str | None, typer.Option(help="Of ours: names, auto, all or none.", show_default="auto, with --tune all")] = None,
    draft: Annotated[str, typer.Option(help="Where our op finds the draft tokens: cache or separate.")] = "cache",
    mask_layout: Annotated[str, typer.Option(help="How our op gets a tree: qlen, full or packed.")] = "qlen",
    same_tree: Annotated[bool, typer.Option("--same-tree", help="One tree for all requests; vllm_unified can do no other.")] = False,
    max_seconds: Annotated[float | None, typer.Option(min=1, help="Start nothing after this long.", show_default="no limit")] = None,
    json_out: Annotated[Path | None, typer.Option(help="Append a JSON line a measurement to this file.")] = None,
    peers_check: Annotated[bool, typer.Option("--peers-check", help="Try each peer on tiny points and say ok or why not.")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Write the table of measured times for this GPU, and say what it changes.")] = False,
    results: Annotated[list[Path] | None, typer.Option(help="With --tune: from this results file instead; may be repeated.")] = None,
    table: Annotated[Path | None, typer.Option(help="With --tune: the file to write.", show_default="the user's own")] = None,
    plot: Annotated[list[Path] | None, typer.Option(help="Draw charts of this results file; may be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="With --plot: the folder for the charts.")] = Path("."),
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time the op against every peer that is installed. Exit code 1 when one of ours was wrong or failed."""
    if plot:
        from flashmap.bench.plot import draw

        files = [str(path) for path in draw(plot, out)]
        typer.echo(jsonlib.dumps(files) if json else "\n".join(files))
        return
    from flashmap.bench import tune as tuning
    from flashmap.core import tables

    if results and not tune:
        raise ValueError("--results goes with --tune: add it, or draw the files with --plot")
    if table is not None and any(table.resolve() == file.resolve() for file in (*(results or ()), json_out) if file is not None):
        raise ValueError(f"--table {table} is the file of the results: write the table to another one")
    if tune and not results:
        forcing = tuning.forcing(os.environ)
        if forcing:
            raise ValueError(f"--tune with {', '.join(forcing)}: unset them, a table is of what a process does without")
        if table is not None and table.suffix == ".jsonl":
            raise ValueError(f"--table {table}: results are written beside the table with that ending, name it .json")
    if tune and results:
        _write_table(tuning.derive(tuning.read(results)), table, json)
        return

    import torch

    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here to measure on: --plot FILE and --tune --results FILE go without one")
    from flashmap.bench import report, run

    torch.set_grad_enabled(False)
    who = _participants(peers, impl, draft, mask_layout, tune=tune)
    if peers_check:
        lines = run.check_peers(None if peers is None else who.peers, lambda line: typer.echo(line, err=True))
        typer.echo(jsonlib.dumps(lines) if json else "\n".join(lines))
        return
    groups = all_points.features()
    chosen = list(groups) if features == "all" else [group for group in features.split(",") if group]
    _all_of("--features", chosen, tuple(groups))
    pairs = [row for group in chosen for row in groups[group]]
    wanted = sweep_of(heads, batch, tokens, context, dtype, page, mask, ragged=ragged)
    if points is not None or not (wanted or chosen or host):
        wanted = all_points.select(points or ("tune" if tune else "quick")) + wanted

    if tune:
        table = table or tables.user_file(torch.cuda.get_device_name())
        kept = json_out or table.with_suffix(".jsonl")
        if json_out is None:  # what the table in force follows from stays until there is a new one
            json_out = table.with_suffix(".new.jsonl")
            json_out.unlink(missing_ok=True)
    log = report.Log(json_out)
    seconds = max_seconds or float("inf")
    make = partial(run.Bench, who, log, max_seconds=seconds, same_tree=same_tree)
    measured, bare = _measure(wanted, pairs, make, host=host)
    if not json:
        if host:
            typer.echo(f"host time of a bare Triton launch: {bare:.1f} us")
        for line in (
            *report.feature_table(pairs, measured.records, measured.names),
            *report.table(wanted, measured.records, list(measured.ours), list(measured.peers)),
        ):
            typer.echo(line)
    elif not tune:
        typer.echo(jsonlib.dumps({"records": log.records, "not_run": measured.not_run, "broken": measured.broken}, indent=2))
    if measured.broken:
        typer.echo(f"stopped, the GPU answers no more after {measured.broken}", err=True)
    if measured.not_run:
        more = " ..." if len(measured.not_run) > 12 else ""
        typer.echo(f"not run ({len(measured.not_run)}): {'; '.join(measured.not_run[:12])}{more}", err=True)
    if tune and (measured.not_run or measured.broken):
        typer.echo(f"no table is written, as not all was measured; with what was: flashmap bench --tune --results {json_out}", err=True)
    elif tune:
        assert json_out is not None
        found = tuning.derive({kept.name: log.records})
        json_out.replace(kept)
        _write_table(found, table, json)
    bad = any("wrong" in record or "failed" in record for record in log.records if record["who"].startswith(tables.OURS))
    raise typer.Exit(int(bad or bool(measured.broken)))


def _participants(peers: str | None, impl: str | None, draft: str, layout: str, *, tune: bool) -> Participants:
    """Who is timed, of ``--peers`` and ``--impl``. Raises ValueError for a name that is not there."""
    from flashmap.bench import peers as registry_of_peers
    from flashmap.bench.run import Participants
    from flashmap.bench.tune import LIBRARIES
    from flashmap.core import registry

    peers = (",".join(LIBRARIES if tune else registry_of_peers.DEFAULT)) if peers is None else peers
    impl = ("all" if tune else "auto") if impl is None else impl
    theirs = _names("--peers", peers, tuple(registry_of_peers.PEERS), tuple(registry_of_peers.PEERS))
    timed = tuple(name for name in registry.names() if registry.get(name).capability.capturable)  # times are those of graphs
    ours = _names("--impl", impl, timed, ("auto", *registry.names()))
    _all_of("--draft", [draft], ("cache", "separate"))
    _all_of("--mask-layout", [layout], ("qlen", "full", "packed"))
    return Participants(ours, theirs, draft, layout)


def _measure(wanted: list[Point], pairs: list[Ratio], make: Callable[[Callable[[str], None]], Bench], *, host: bool) -> tuple[Bench, float]:
    """Everyone on every point, under a progress bar; the bench, and the host time of a bare launch where it was asked for."""
    from flashmap.bench import run, timing

    points = list(dict.fromkeys((*wanted, *(point for row in pairs for point in (row.base, row.other)))))
    with _progress(len(points) + host * len(run.HOST_POINTS)) as (say, advance):
        measured = make(say)
        for point in points:
            advance(point.label)
            measured.point(point)
        bare = timing.bare_launch_us() if host else 0.0
        for point in run.HOST_POINTS if host else ():
            advance(f"host {point.label}")
            measured.host(point, bare)
    return measured, bare


def sweep_of(heads: str, batch: str, tokens: str, context: str, dtype: str, page: str, mask: str, *, ragged: bool = False) -> list[Point]:
    """Every combination of what the options list, separated by commas; all empty: no point. Raises ValueError with the option's name."""
    if not (heads or batch or tokens or context or dtype or page or mask or ragged):
        return []
    shapes = [Shape.named(name if name.startswith(("mla", "gqa")) else f"gqa{name}") for name in (heads or "32/8").split(",")]
    masks, kvs = (mask or "chain,tree").split(","), (dtype or "bf16").split(",")
    _all_of("--mask", masks, ("chain", "tree"))
    _all_of("--dtype", kvs, ("bf16", "fp8"))
    return all_points.sweep(
        shapes,
        batches=_numbers("--batch", batch or "1"),
        lengths=_numbers("--tokens", tokens or "4"),
        contexts=_numbers("--context", context or "8k"),
        masks=masks,
        kvs=kvs,
        pages=_numbers("--page", page or "64"),
        spreads=("uniform", "ragged") if ragged else ("uniform",),
    )


def _write_table(found: Table, path: Path | None, json: bool) -> None:
    """Write the table and say what it changes against the one in force for that GPU."""
    from flashmap.bench.tune import changes
    from flashmap.core import tables
    from flashmap.core.request import DeviceInfo

    path = path or tables.user_file(found.gpu)
    in_force = tables.in_force(DeviceInfo("cuda", found.gpu))
    changed = changes(in_force, found)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(found.to_json(), encoding="utf-8")
    new.replace(path)  # a process that starts meanwhile reads the old file or the new one, no half of one
    if json:
        before = None if in_force is None else in_force.source
        typer.echo(jsonlib.dumps({"table": str(path), "before": before, "changes": [asdict(one) for one in changed]}, indent=2))
        return
    for one in changed:
        typer.echo(f"{one.calls}\n    before: {one.before}\n    now:    {one.after}")
    against = "no table was in force" if in_force is None else f"against {in_force.source} of {in_force.date}"
    typer.echo(f"{path}: {len(found.classes)} classes of {found.gpu}, {len(changed)} of them changed; {against}")


@contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """(say, advance): a line above the bar; the next step's name. Both on stderr, the bar on a terminal that rich is there for."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield (lambda line: typer.echo(line, err=True)), (lambda name: None)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    console = Console(stderr=True)
    if not console.is_terminal:
        yield (lambda line: typer.echo(line, err=True)), (lambda name: None)
        return
    with Progress(*columns, console=console, transient=True) as progress:
        task, first = progress.add_task("", total=total), True

        def say(line: str) -> None:
            progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

        def advance(name: str) -> None:
            nonlocal first
            progress.update(task, description=name, advance=0 if first else 1)
            first = False

        yield say, advance


def _numbers(option: str, text: str) -> list[int]:
    """1,8,64 or 1k,128k, where k is 1024."""
    found = []
    for part in text.split(","):
        digits, factor = (part[:-1], 1024) if part.endswith("k") else (part, 1)
        if not digits.isascii() or not digits.isdigit() or int(digits) < 1:
            raise ValueError(f"{option} {text!r} is not understood: write whole numbers such as 1,8 or 8k,128k")
        found.append(int(digits) * factor)
    return found


def _names(option: str, text: str, every: tuple[str, ...], allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Names separated by commas, where "all" stands for ``every`` and "none" for nobody."""
    found: list[str] = []
    for name in text.split(","):
        found += every if name == "all" else () if name == "none" else (name,)
    _all_of(option, found, allowed)
    return tuple(dict.fromkeys(found))


def _all_of(option: str, values: Any, allowed: tuple[str, ...]) -> None:
    for value in values:
        if value not in allowed:
            raise ValueError(f"{option} {value!r} is not one of {', '.join(allowed)}")
