"""The text that the small models learn: the sources of Python's standard library, as bytes. Every installation carries it.

A token is a byte; 256 begins a file. One file in ten, chosen by the checksum of its name, is held out: for the losses
of the model card, for prompts, and for the n-gram model that the trained ones must beat.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sysconfig
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

BOS = 256
EOS = 257
VOCAB = 512  # 256 bytes, two specials, and padding to what every kernel takes


@functools.cache
def files(*, held_out: bool) -> tuple[tuple[str, bytes], ...]:
    """(name below the library's folder, content), in the order of the names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(("site-packages/", "dist-packages/")) or (zlib.crc32(name.encode()) % 10 == 0) != held_out:
            continue
        found.append((name, path.read_bytes()))
    return tuple(found)


@functools.cache
def stream(*, held_out: bool) -> np.ndarray:
    """uint16: the files one after another, each begun by BOS."""
    pieces = []
    for _, content in files(held_out=held_out):
        pieces += [np.array([BOS], np.uint16), np.frombuffer(content, np.uint8)]
    return np.concatenate(pieces)


def digest() -> str:
    """Of all the text, held out or not: which library a model was trained on."""
    return hashlib.sha256(stream(held_out=False).tobytes() + stream(held_out=True).tobytes()).hexdigest()[:16]


def windows(count: int, length: int, *, seed: int, held_out: bool) -> np.ndarray:
    """int64 [count, length]: pieces of the text from random places."""
    text = stream(held_out=held_out)
    starts = np.random.default_rng(seed).integers(0, len(text) - length, count)
    return text[starts[:, None] + np.arange(length)].astype(np.int64)


def prompts(count: int, *, longest: int = 300, seed: int = 0) -> list[list[int]]:
    """Beginnings of held-out passages, of different lengths, each cut at a line's end or in the middle of a line."""
    lengths = np.random.default_rng(seed).integers(longest // 4, longest + 1, count)
    return [row[: int(n)].tolist() for row, n in zip(windows(count, longest, seed=seed, held_out=True), lengths, strict=True)]


def text(tokens: Iterable[int]) -> str:
    """What the byte values among ``tokens`` spell."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


@functools.cache
def ngram_bits(order: int = 5, *, sample: int = 200_000) -> float:
    """Bits per byte of an interpolated n-gram model (Witten and Bell 1991) on held-out text, learnt from the rest."""
    train, test = stream(held_out=False).astype(np.int64), stream(held_out=True)[:sample].astype(np.int64)
    probability = np.full(len(test) - order + 1, 1 / 258)
    for length in range(order):
        seen, counts = np.unique(_grams(train, length + 1, order), return_counts=True)
        contexts, first = np.unique(seen // VOCAB, return_index=True)
        kinds = np.diff(np.append(first, len(seen)))
        total = np.add.reduceat(counts, first)
        wanted = _grams(test, length + 1, order)
        at = np.minimum(np.searchsorted(contexts, wanted // VOCAB), len(contexts) - 1)
        known = contexts[at] == wanted // VOCAB
        gram = np.minimum(np.searchsorted(seen, wanted), len(seen) - 1)
        count = np.where(seen[gram] == wanted, counts[gram], 0)
        probability = np.where(known, (count + kinds[at] * probability) / (total[at] + kinds[at]), probability)
    return float(-np.log(probability).mean() / math.log(2))


def _grams(text: np.ndarray, length: int, order: int) -> np.ndarray:
    """The ``length`` tokens that end at each position from ``order`` - 1 on, as one number."""
    joined = np.zeros(len(text) - order + 1, np.int64)
    for back in range(length - 1, -1, -1):
        joined = joined * VOCAB + text[order - 1 - back : len(text) - back]
    return joined
