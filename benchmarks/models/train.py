"""Make the small models again: ``python -m benchmarks.models.train --out DIR`` on one GPU, ``--smoke`` for a minute on a CPU.

Two targets learn to predict the next byte. Then each drafter learns what its frozen target would say, over several of its own
steps: from the second step on it reads the hidden state and the keys that it made itself, as it will when it drafts.

Writes the model folders (`checkpoints.py`) and how it went, with a loss curve where matplotlib is installed.
The same seed, text and GPU give the same models up to the order of the GPU's sums.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from . import data
from .architecture import MTP, POSITIONS, DeepSeek, Drafter, Eagle, Eagle3, Llama, Target, causal
from .checkpoints import DEEPSEEK, LLAMA, save


@dataclass(frozen=True, slots=True)
class Recipe:
    """``steps`` of ``windows`` x ``length`` bytes each. ``unroll`` is how many steps a drafter goes on with what it made itself."""

    steps: int
    windows: int
    length: int
    learning_rate: float
    unroll: int = 0


TARGET = Recipe(steps=2000, windows=32, length=POSITIONS, learning_rate=3e-3)
DRAFTER = Recipe(steps=1000, windows=24, length=1024, learning_rate=2e-3, unroll=5)
WARM_UP = 100
SMOKE = {"steps": 4, "windows": 1, "length": 96}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the models and the log")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=[DEEPSEEK, LLAMA], help="one target and its drafters (default: both)")
    parser.add_argument("--steps", type=float, default=1.0, help="factor on every number of steps (default 1)")
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few bytes: shows that all of it runs")
    args = parser.parse_args()
    small = SMOKE if args.smoke else {}
    recipes = [replace(recipe, **{"steps": max(2, round(recipe.steps * args.steps)), **small}) for recipe in (TARGET, DRAFTER)]
    args.out.mkdir(parents=True, exist_ok=True)
    for name in [args.only] if args.only else [DEEPSEEK, LLAMA]:
        _train(name, recipes, args)


def _train(name: str, recipes: list[Recipe], args: argparse.Namespace) -> None:
    """A target and its drafters: their folders, and how it went in ``{name}.training.{jsonl,json,svg}``."""
    torch.manual_seed(args.seed)
    start = time.monotonic()
    card: dict[str, Any] = {
        "text": f"standard library of Python {platform.python_version()}, sha256 {data.digest()}",
        "bytes": {"train": len(data.stream(held_out=False)), "held_out": len(data.stream(held_out=True))},
        "seed": args.seed,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "bits_per_byte_of_5_gram": None if args.smoke else round(data.ngram_bits(), 3),
    }
    log_path = args.out / f"{name}.training.jsonl"
    with open(log_path, "w", buffering=1) as log:
        target = Target(DeepSeek() if name == DEEPSEEK else Llama()).to(args.device)
        _train_target(target, recipes[0], Report("target", log), args.seed)
        bits = held_out_bits(target, windows=1 if args.smoke else 97)
        card["target"] = {"parameters": _size(target), "bits_per_byte": round(bits, 3)}
        target.requires_grad_(False).eval()
        drafters = []
        for kind in [MTP] if name == DEEPSEEK else [Eagle, Eagle3]:
            drafter: Drafter = kind(target).to(args.device)
            last = _train_drafter(drafter, recipes[1], Report(kind.__name__, log), args.seed)
            card[kind.__name__] = {"parameters": _size(drafter), "cross_entropy_by_step": last}
            drafters.append(drafter.eval())
    card["seconds"] = round(time.monotonic() - start)
    (args.out / f"{name}.training.json").write_text(json.dumps(card, indent=2) + "\n")
    print(json.dumps(card, indent=2))
    for folder in save(target, drafters, args.out):
        print(f"{folder}: {(folder / 'model.safetensors').stat().st_size / 1e6:.1f} MB", flush=True)
    _plot(log_path)


class Report:
    """A progress bar, and a line of the log every few steps."""

    def __init__(self, name: str, log: Any) -> None:
        self.name, self.log, self.start = name, log, time.monotonic()
        self._text = ""
        columns = (
            TextColumn("{task.description:<9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, refresh_per_second=2)

    def steps(self, count: int) -> Iterator[int]:
        with self.bar:
            task = self.bar.add_task(self.name, total=count, loss="")
            for step in range(count):
                yield step
                self.bar.update(task, completed=step + 1, loss=self._text)

    def loss(self, step: int, loss: Tensor) -> None:
        if step % 20 == 0:  # reading it waits for the GPU
            value = float(loss)
            self._text = f"loss {value:.3f}"
            row = {"model": self.name, "step": step, "loss": round(value, 4), "seconds": round(time.monotonic() - self.start, 1)}
            print(json.dumps(row), file=self.log)


def _train_target(target: Target, recipe: Recipe, report: Report, seed: int) -> None:
    optimizer = _Optimizer(target, recipe)
    batches = _batches(recipe, seed, next(target.parameters()).device)
    for step in report.steps(recipe.steps):
        text = next(batches)
        positions = torch.arange(recipe.length, device=text.device)
        with _autocast(text):
            logits, _, _ = target(text[:, :-1], positions, causal)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
        optimizer.step(step, loss)
        report.loss(step, loss.detach())


def _train_drafter(drafter: Drafter, recipe: Recipe, report: Report, seed: int) -> list[float]:
    """Returns the last loss of each of its own steps: cross entropy to the target's distribution, nats."""
    optimizer = _Optimizer(drafter, recipe)
    batches = _batches(recipe, seed + 1, next(drafter.parameters()).device)
    losses: list[Tensor] = []
    for step in report.steps(recipe.steps):
        text = next(batches)[:, :-1]
        positions = torch.arange(recipe.length, device=text.device)
        roots = recipe.length - recipe.unroll
        with _autocast(text):
            with torch.no_grad():
                wanted, hidden, captured = drafter.target(text, positions, causal)
                wanted = wanted.float().softmax(-1)
            hidden, attend, losses = drafter.features(hidden, captured)[:, :roots], _Unrolled(), []
            for ahead in range(recipe.unroll):
                # Root i reads token i + 1 + ahead, at position i + ahead, and guesses what the target says there.
                seen = slice(1 + ahead, 1 + ahead + roots)
                logits, hidden = drafter(text[:, seen], hidden, positions[:roots] + ahead, attend)
                losses.append(F.cross_entropy(logits.flatten(0, 1).float(), wanted[:, seen].flatten(0, 1)))
        loss = torch.stack([0.9**ahead * value for ahead, value in enumerate(losses)]).sum()
        optimizer.step(step, loss)
        report.loss(step, losses[0].detach())
    return [round(float(value.detach()), 3) for value in losses]


class _Unrolled:
    """``attend`` over a drafter's own steps: root i sees the first step's keys up to i, and its own of the later steps."""

    def __init__(self) -> None:
        self.first: tuple[Tensor, Tensor] | None = None
        self.later: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, scale: float) -> Tensor:
        assert v is not None
        repeats = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
        if self.first is None:
            self.first = k, v
            return causal(layer, q, k, v, scale)
        self.later.append((k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, self.first[0]).float() * scale
        own = torch.stack([(q * key).sum(-1).transpose(1, 2) for key, _ in self.later], -1).float() * scale
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        weights = torch.cat((scores.masked_fill(future, -math.inf), own), -1).softmax(-1).to(q.dtype)
        out = torch.einsum("bhij,bjhd->bihd", weights[..., : k.shape[1]], self.first[1])
        for i, (_, value) in enumerate(self.later):
            out = out + weights[..., k.shape[1] + i].transpose(1, 2).unsqueeze(-1) * value
        return out


class _Optimizer:
    """AdamW, warmed up, then down along a cosine to a hundredth."""

    def __init__(self, module: nn.Module, recipe: Recipe) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        matrices, others = [p for p in self.parameters if p.dim() > 1], [p for p in self.parameters if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
        self.inner = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=self.parameters[0].is_cuda)

        def factor(step: int) -> float:
            done = step / recipe.steps
            return min(1.0, (step + 1) / WARM_UP) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.inner, factor)

    def step(self, step: int, loss: Tensor) -> None:
        self.inner.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.inner.step()
        self.schedule.step()


def _batches(recipe: Recipe, seed: int, device: torch.device) -> Iterator[Tensor]:
    """int64 [windows, length + 1] for ever, from random places of the training text."""
    text = torch.from_numpy(data.stream(held_out=False).astype("int32")).to(device)
    draw = torch.Generator(device).manual_seed(seed)
    offsets = torch.arange(recipe.length + 1, device=device)
    while True:
        starts = torch.randint(len(text) - recipe.length - 1, (recipe.windows, 1), device=device, generator=draw)
        yield text[starts + offsets].long()


@torch.no_grad()
def held_out_bits(target: Target, *, windows: int = 97) -> float:
    """Bits per byte on the first held-out text, the same that `data.ngram_bits` measures, in windows without what went before."""
    device = next(target.parameters()).device
    text = torch.from_numpy(data.stream(held_out=True)[: windows * POSITIONS + 1].astype("int64")).to(device)
    positions = torch.arange(POSITIONS, device=device)
    total = 0.0
    for i in range(windows):
        piece = text[i * POSITIONS : (i + 1) * POSITIONS + 1]
        logits, _, _ = target(piece[None, :-1], positions, causal)
        total += float(F.cross_entropy(logits[0].float(), piece[1:]))
    return total / windows / math.log(2)


def _autocast(like: Tensor) -> torch.autocast:
    return torch.autocast(like.device.type, torch.bfloat16, enabled=like.is_cuda)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _plot(log: Path) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        print("No loss curve: install matplotlib (flashmap-verify[bench]) for it.")
        return
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        axes.plot([row["step"] for row in own], [row["loss"] for row in own], label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="cross entropy, nats a byte\n(drafters: first step, to the target's)", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(log.with_suffix(".svg"))


if __name__ == "__main__":
    main()
