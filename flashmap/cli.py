"""The ``flashmap`` command. It parses options and prints; what it prints comes from flashmap.core.

torch is imported inside the commands, so that ``flashmap --help`` is quick. Every command prints JSON with ``--json``.
Exit codes: 0 fine; 1 what was looked at is not; 2 the command was not understood.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import flashmap
from flashmap.bench.command import bench

if TYPE_CHECKING:
    from flashmap.core.request import DeviceInfo

app = typer.Typer(
    name="flashmap",
    help="Fast verification attention for speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_COLOURS = {"ok": "green", "info": "cyan", "warning": "yellow", "failure": "red"}
_HERE = "this machine"


def _errors_in_one_line(command: Callable[..., None]) -> Callable[..., None]:
    """A ValueError is the user's: one line that names what is accepted, and exit code 2."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except ValueError as error:
            _refuse(str(error))

    return wrapped


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False) -> None:
    if version:
        typer.echo(flashmap.__version__)
        raise typer.Exit


@app.command()
@_errors_in_one_line
def doctor(json: Json = False) -> None:
    """Is FlashMap active? Exit code 1 when an installed engine would run without it."""
    from flashmap.core import diagnostics

    examination = diagnostics.examine()
    if json:
        typer.echo(diagnostics.as_json(examination))
    else:
        for finding in examination.findings:
            remedy = "" if finding.fix is None else f". {'Hint' if finding.verdict == 'info' else 'Fix'}: {finding.fix}"
            text = f"{finding.subject:<16} {finding.text}{remedy}"
            typer.echo(f"{typer.style(f'{finding.verdict:<8}', fg=_COLOURS[finding.verdict])} {text}")
    raise typer.Exit(examination.exit_code)


@app.command("list")
@_errors_in_one_line
def list_(
    arch: Annotated[str, typer.Option(help="A GPU such as sm90, or cpu.", show_default="this machine")] = _HERE,
    json: Json = False,
) -> None:
    """The registered implementations, and whether each can run here."""
    from flashmap.core import diagnostics

    device = _device(arch)
    request = diagnostics.plain_request()
    if device.type != "cuda":
        request = replace(request, dtype="fp32", kv_dtype="fp32")
    listed = diagnostics.listing(device, request)
    if json:
        typer.echo(diagnostics.as_json(listed))
        return
    rows = []
    for one in listed:
        here = "yes" if not one.reasons else f"no: {one.reasons[0].text}"
        rows.append((one.name, " ".join(one.devices), " ".join(one.dtypes), here))
    _table(("name", "devices", "dtypes", f"runs on {device.name or device.type}"), rows)


@app.command()
@_errors_in_one_line
def explain(
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads.", show_default="8, with --mla 1")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Columns of Q and K.", show_default="128, with --mla 576")] = None,
    v_head_dim: Annotated[int | None, typer.Option(min=1, help="Columns of V.", show_default="as K, with --mla 512")] = None,
    mla: Annotated[bool, typer.Option("--mla", "--latent", help="Latent attention: V is the first columns of K.")] = False,
    tokens: Annotated[int, typer.Option(min=0, help="Most query tokens of a request.")] = 17,
    requests: Annotated[int, typer.Option(min=1, help="Requests in the batch.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Most keys of a request.")] = 8192,
    mask: Annotated[str, typer.Option(help="chain, tree (the same as qlen), full, qlen or packed.")] = "chain",
    dtype: Annotated[str, typer.Option(help="fp32, fp16 or bf16.")] = "bf16",
    kv_dtype: Annotated[str | None, typer.Option(help="The cache: as --dtype, or fp8_e4m3 or fp8_e5m2.", show_default="as --dtype")] = None,
    kv_layout: Annotated[str, typer.Option(help="paged or slots.")] = "paged",
    page_size: Annotated[int, typer.Option(min=1, help="Tokens of a page.")] = 16,
    draft: Annotated[str, typer.Option(help="Where the draft's K/V is: cache, slots or dense.")] = "cache",
    window: Annotated[int | None, typer.Option(min=0, help="Sliding window.", show_default="none")] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="With attention sinks.")] = False,
    softcap: Annotated[bool, typer.Option("--softcap", help="With soft-capped logits.")] = False,
    positions: Annotated[bool, typer.Option("--positions", help="With explicit positions; a window over a tree needs them.")] = False,
    kv_start: Annotated[bool, typer.Option("--kv-start", help="With a key list that is cut at the front.")] = False,
    scales: Annotated[str, typer.Option(help="Of the cache: none, host or device.", show_default="none, with fp8 host")] = "",
    lse: Annotated[bool, typer.Option("--lse", help="With the log-sum-exp returned.")] = False,
    arch: Annotated[str, typer.Option(help="A GPU such as sm90, or cpu.", show_default=_HERE)] = _HERE,
    capturing: Annotated[bool, typer.Option("--capturing", help="While a CUDA graph is captured.")] = False,
    engine_kernel: Annotated[
        str | None,
        typer.Option(
            help="The kernel that an engine would run instead, such as vllm.fa3, vllm.flashmla, vllm.triton_attn, sglang.fa3 or sglang.triton.",
            show_default="none",
        ),
    ] = None,
    impl: Annotated[str | None, typer.Option(help="Ask for this implementation.", show_default="FLASHMAP_IMPL, or automatic")] = None,
    json: Json = False,
) -> None:
    """Which implementation would serve a call, and why not the others. Needs no GPU."""
    from flashmap.core import diagnostics
    from flashmap.core.request import DTYPES, KV_DTYPES, VerifyRequest

    _one_of("--mask", mask, ("chain", "tree", "full", "qlen", "packed"))
    _one_of("--dtype", dtype, DTYPES)
    _one_of("--kv-dtype", kv_dtype or dtype, tuple(dict.fromkeys((dtype, *(d for d in KV_DTYPES if d.startswith("fp8"))))))
    _one_of("--kv-layout", kv_layout, ("paged", "slots"))
    _one_of("--draft", draft, ("cache", "slots", "dense"))
    fp8 = (kv_dtype or dtype).startswith("fp8")
    _one_of("--scales", scales or "none", ("none", "host", "device"))
    kv_heads = kv_heads or (1 if mla else 8)
    head_dim = head_dim or (576 if mla else 128)
    v_head_dim = v_head_dim or (min(512, head_dim) if mla else head_dim)
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} is no multiple of --kv-heads {kv_heads}")
    if mla and kv_heads != 1:
        raise ValueError(f"--kv-heads {kv_heads} does not go with --mla, which has 1")
    if mla and v_head_dim > head_dim:
        raise ValueError(f"--v-head-dim {v_head_dim} does not go with --mla: it is at most --head-dim {head_dim}")
    tree = mask != "chain"
    if window is not None and tree and not positions:
        raise ValueError(f"--window {window} with --mask {mask} needs --positions: siblings of a tree share one")
    request = VerifyRequest(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        num_requests=requests,
        max_query_len=tokens,
        kv_layout=kv_layout,
        page_size=page_size if kv_layout == "paged" else 1,
        max_kv_len=-(-context // page_size) * page_size if kv_layout == "paged" else None,
        latent=mla,
        draft=draft,
        mask=None if not tree else "qlen" if mask == "tree" else mask,
        window=window,
        positions=positions,
        kv_start=kv_start,
        sinks=sinks,
        softcap=softcap,
        return_lse=lse,
        scales=scales or ("host" if fp8 else "none"),
    )
    explanation = diagnostics.explain(request, _device(arch, capturing=capturing), impl=impl, engine_kernel=engine_kernel)
    if json:
        typer.echo(diagnostics.as_json(explanation))
        return
    device = explanation.device
    typer.echo(f"{explanation.summary}, {requests} request{'s' if requests > 1 else ''}, on {device.name or device.type}")
    roles = {
        "winner": "is chosen",
        "able": "could serve it, and is tried after the one above",
        "named": "could serve it, but only runs when it is named",
        "declined": "cannot serve it",
    }
    if explanation.winner is None:
        typer.echo("nobody here: an engine runs its own kernel, a direct call raises Declined")
    for candidate in explanation.candidates:
        role = "keeps the call" if candidate.name == "engine" else roles[candidate.role]
        typer.echo(f"{typer.style(candidate.name, bold=candidate.role == 'winner')} {role}{':' if candidate.reasons else ''}")
        for reason in candidate.reasons:
            typer.echo(f"    [{reason.code}] {reason.text}" + (f". Fix: {reason.fix}" if reason.fix else ""))


@app.command()
@_errors_in_one_line
def check(
    impl: Annotated[list[str] | None, typer.Option(help="An implementation; may be repeated.", show_default="all that run here")] = None,
    size: Annotated[str, typer.Option(help="small, or full (minutes on a CPU).")] = "small",
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, fp16 or bf16; may be repeated.", show_default="all three")] = None,
    graphs: Annotated[bool, typer.Option("--graphs", help="On a GPU, also capture and replay each case.")] = False,
    json: Json = False,
) -> None:
    """Run the conformance grid on this machine. Exit code 1 when a case fails, or an implementation that was asked for serves none."""
    from flashmap.core import diagnostics, registry
    from flashmap.core.request import DTYPES

    _one_of("--size", size, ("small", "full"))
    for name in dtype or ():
        _one_of("--dtype", name, DTYPES)
    for name in impl or ():
        _one_of("--impl", name, registry.names())
    device = _device(_HERE)
    if graphs and device.type != "cuda":
        raise ValueError("--graphs needs a CUDA device: leave it out")
    tallies = []
    for name in impl or registry.names():
        tally = _check_one(name, device.type, size, tuple(dtype or DTYPES), graphs, quiet=json)
        if not json:
            typer.echo(str(tally))
        tallies.append(tally)
    if json:
        typer.echo(diagnostics.as_json(tuple(tallies)))
    raise typer.Exit(int(any(tally.failed or (impl and not tally.ok) for tally in tallies)))


@app.command()
@_errors_in_one_line
def demo(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a DeepSeek with an MTP layer.", show_default="the checkout's small one")
    ] = None,
    json: Json = False,
) -> None:
    """A small DeepSeek-shaped model with MTP in vLLM on the CPU, with and without FlashMap; then the op's own table."""
    run = import_module("flashmap.demo").main  # imported here: it starts an engine
    raise typer.Exit(run(json=json, model=model))


app.command()(_errors_in_one_line(bench))


@dataclass(slots=True)
class _Tally:
    """What the grid gave for one implementation. ``worst`` is the largest error as a part of what is allowed."""

    name: str
    ok: int = 0
    declined: int = 0
    failed: int = 0
    worst: float = 0.0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        text = f"{self.name}: {self.ok} ok, {self.declined} declined, {self.failed} failed"
        if self.ok:
            text += f", largest error {self.worst:.2f} of what is allowed"
        text += f", {self.seconds:.0f} s"
        return text + "".join(f"\n    declined {times} times: {reason}" for reason, times in self.reasons.items())


def _check_one(name: str, device: str, size: str, dtypes: tuple[str, ...], graphs: bool, *, quiet: bool) -> _Tally:
    from flashmap.core import registry
    from flashmap.core.testing import cases, check_replay
    from flashmap.core.testing import check as check_grid

    tally, start = _Tally(name), time.monotonic()
    grid = list(cases(device, dtypes, size))
    live = not quiet and sys.stdout.isatty()
    for number, case in enumerate(grid, 1):
        if live:
            typer.echo(f"\r\033[K{name}: {number}/{len(grid)} {case}", nl=False)
        (result,) = check_grid(name, device, grid=[case])
        if result.outcome == "ok" and graphs and registry.get(name).capability.capturable:
            try:
                result = check_replay(name, case, device)
            except Exception as error:  # reported with its case, as the kit does
                result = replace(result, outcome="failed", reasons=(f"under capture: {type(error).__name__}: {error}",))
        setattr(tally, result.outcome, getattr(tally, result.outcome) + 1)
        if result.outcome == "ok":
            tally.worst = max(tally.worst, result.error / (result.bound or 1.0))
        elif result.outcome == "declined":
            tally.reasons[result.reasons[0]] = tally.reasons.get(result.reasons[0], 0) + 1
        else:
            tally.failures.append(str(result))
            if not quiet:
                typer.echo(f"{chr(13) if live else ''}FAILED {name} {result}")
    if live:
        typer.echo("\r\033[K", nl=False)
    tally.seconds = time.monotonic() - start
    return tally


def _device(arch: str, *, capturing: bool = False) -> DeviceInfo:
    from flashmap.core.request import DeviceInfo

    if arch not in (_HERE, "cpu"):
        return DeviceInfo.known(arch, capturing=capturing)
    import torch

    device = DeviceInfo.of(torch.device("cuda" if arch == _HERE and torch.cuda.is_available() else "cpu"))
    return replace(device, capturing=capturing)


def _one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{option} {value!r} is not one of {', '.join(allowed)}")


def _refuse(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """On a terminal, by rich where it is installed; else aligned columns, which other programs can read."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(*columns, box=None, pad_edge=False)
            for row in rows:
                table.add_row(*row)
            Console().print(table)
            return
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    for row in (columns, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
