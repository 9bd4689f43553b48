"""Inputs for the op: a :class:`Case` says what is in them, :func:`build` makes the arguments, :func:`cases` is the grid.

Everything that the op must not use is poison: NaN in unlisted pages, slots and rows, stale ids in the tails of tables,
noise in the parts of masks that are not read, and a sentinel in ``out``. Third parties import this, so it needs torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashmap.core.inputs import PagedKV, SlotKV, TreeMask

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
SENTINEL = 777.0  # what out holds before the call, rounded to its dtype
_EXTRA_ROWS = 3  # rows past cu_seqlens_q[-1]
_STALE = (-1, 2**31 - 1)  # what tables hold behind their last used entry, and the id of a poisoned page


@dataclass(frozen=True, slots=True)
class Case:
    """One call. ``query_lens`` and ``prefix_lens`` have an entry per request; ``padded`` more have no query tokens.

    ``v_head_dim`` None is Dk, and Dv columns of K where ``latent``. A negative prefix length, where the draft tokens are
    in the cache, lists fewer tokens than L. ``overlong``: the longest request says it has more keys than its table.
    ``slack``: by how much max_query_len exceeds the longest query. ``ids`` names the requests: a request's contents
    depend on ``seed`` and its id alone, so that one can be found again in other company.
    """

    name: str
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int | None = None
    latent: bool = False
    dtype: str = "fp32"
    kv_dtype: str | None = None
    query_lens: tuple[int, ...] = (3, 5, 1)
    prefix_lens: tuple[int, ...] = (37, 0, 70)
    padded: int = 0
    layout: str = "paged"
    page_size: int = 16
    draft: str = "cache"
    mask: str | None = None
    mask_indptr: bool = False
    mask_bytes: str = "uint8"
    window: int | None = None
    positions: bool = False
    kv_start: bool = False
    sinks: bool = False
    softcap: float = 0.0
    scale: float | None = None
    lse: bool = False
    scales: str = "none"
    int64: bool = False
    strided: bool = False
    overlong: bool = False
    slack: int = 0
    seed: int = 0
    ids: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}" + (f"/{self.kv_dtype}" if self.kv_dtype else "")

    @property
    def in_cache(self) -> bool:
        """Whether kv lists the draft tokens."""
        return self.draft == "cache"

    @property
    def stored(self) -> tuple[int, ...]:
        """Tokens of each request that have a place in the cache."""
        pairs = zip(self.query_lens, self.prefix_lens, strict=True)
        return tuple(prefix if self.draft == "dense" else max(prefix + rows, 0) for rows, prefix in pairs)

    @property
    def listed(self) -> tuple[int, ...]:
        """Tokens of each request that kv lists."""
        return self.stored if self.in_cache else self.prefix_lens


def build(case: Case, device: torch.device | str = "cpu", *, like: Case | None = None) -> dict[str, Any]:
    """``verify_attention``'s arguments, ``q`` and ``kv`` among them: ``verify_attention(**build(case))``.

    Every tensor is as large as ``like`` (default: the case itself) needs, so that a captured graph's buffers can be
    refilled by a smaller case.
    """
    return _Builder(case, torch.device(device), like or case).arguments()


class _Builder:
    def __init__(self, case: Case, device: torch.device, limits: Case) -> None:
        self.case, self.device, self.limits = case, device, limits
        self.rng = torch.Generator().manual_seed(case.seed)
        self.dtype = DTYPES[case.dtype]
        self.index = torch.int64 if case.int64 else torch.int32
        self.requests = len(case.query_lens) + case.padded
        self.tokens = sum(limits.query_lens) + _EXTRA_ROWS
        self.max_query_len = max(limits.query_lens, default=0) + limits.slack
        self.v_dim = case.v_head_dim or case.head_dim
        self.starts = [0]
        for rows in (*case.query_lens, *[0] * case.padded):
            self.starts.append(self.starts[-1] + rows)
        self.prefix = [max(p, 0) for p in case.prefix_lens]
        self.ids = case.ids or tuple(range(len(case.query_lens)))
        self.private = [torch.Generator().manual_seed(1000 * case.seed + i) for i in self.ids]
        self.kv_starts = [int(torch.randint(40, (1,), generator=rng)) if case.kv_start else 0 for rng in self.private]

    def arguments(self) -> dict[str, Any]:
        case = self.case
        q = self.rows(case.heads, case.head_dim)
        trees = [self.tree(r, rows) for r, rows in enumerate(case.query_lens)]
        places, kv = self.cache()
        arguments: dict[str, Any] = {
            "q": q,
            "kv": kv,
            "cu_seqlens_q": self.ints(self.starts),
            "max_query_len": self.max_query_len,
            "mask": self.mask(trees),
            "scale": case.scale,
            "softcap": case.softcap,
            "window": case.window,
            "positions": self.positions(trees) if case.positions else None,
            "out": self.out(),
            "return_lse": case.lse,
        }
        if case.sinks:
            sinks = torch.randn(case.heads, generator=torch.Generator().manual_seed(case.seed))
            arguments["sinks"] = sinks.to(self.device, self.dtype)
        if case.scales != "none":
            k_scale, v_scale = 0.75, 1.0 if case.latent else 1.5
            if case.scales == "device":
                arguments["k_scale"] = torch.full((1,), k_scale, device=self.device)
                arguments["v_scale"] = v_scale if case.latent else torch.full((1,), v_scale, device=self.device)
            else:
                arguments |= {"k_scale": k_scale, "v_scale": v_scale}
        if case.draft == "dense":
            k = self.rows(case.kv_heads, case.head_dim)
            arguments["draft_kv"] = (k, None if case.latent else self.rows(case.kv_heads, self.v_dim))
        elif case.draft == "slots":
            drafts = [slots[prefix:] for slots, prefix in zip(places, self.prefix, strict=True)]
            arguments["draft_slots"] = self.ints([s for slots in drafts for s in slots], fill=self.tokens)
        return arguments

    # -- the cache --------------------------------------------------------------------------------------------------

    def cache(self) -> tuple[list[list[int]], PagedKV | SlotKV]:
        """(the slots of each request's stored tokens, kv)."""
        case, size = self.case, self.case.page_size if self.case.layout == "paged" else 1
        pages = sum(-(-n // size) for n in self.limits.stored) + 4
        shuffled = (torch.randperm(pages - 1, generator=self.rng) + 1).tolist()  # page 0 stays poison: clamped ids land there
        tables, places = [], []
        for stored in case.stored:
            table, shuffled = shuffled[: -(-stored // size)], shuffled[-(-stored // size) :]
            tables.append(table)
            places.append([table[i // size] * size + i % size for i in range(stored)])
        k, v = self.pool(pages, size, places)
        stale = (*_STALE, shuffled[0])
        v_head_dim = case.v_head_dim if case.latent else None
        kv_start = self.ints(self.kv_starts, fill=self.requests) if case.kv_start else None
        listed = [*case.listed, *[r % 2 for r in range(case.padded)]]  # engines pad with lengths of 0 or 1
        if case.layout == "paged":
            width = max((-(-n // size) for n in self.limits.listed), default=0) + (0 if case.overlong else 2)
            if case.overlong:
                assert max(listed) == width * size, "the longest request of an overlong case fills its last page"
                listed = [n + 7 if n == width * size else n for n in listed]
            rows = [table[: -(-n // size)] for table, n in zip(tables, case.listed, strict=True)] + [[]] * case.padded
            entries = [page for row in rows for page in (*row, *_repeat(stale, width - len(row)))]
            block_table = torch.tensor(entries, dtype=torch.int32).view(self.requests, width)
            return places, PagedKV(k, v, block_table.to(self.device), self.ints(listed), v_head_dim, kv_start)
        first = 3 if not case.int64 else 0
        indptr, indices = [first], list(_repeat(stale, first))
        for slots, n in zip(places, case.listed, strict=True):
            indices += slots[:n]
            indptr.append(indptr[-1] + n)
        indptr += [indptr[-1]] * case.padded
        indices += _repeat(stale, first + sum(self.limits.listed) + 20 - len(indices))
        return places, SlotKV(k, v, self.ints(indptr), self.ints(indices), v_head_dim, kv_start)

    def pool(self, pages: int, size: int, places: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """K and V full of NaN but for the tokens in ``places``. ``strided``: halves of one buffer, as an engine has them."""
        case = self.case
        heads, dk, dv = case.kv_heads, case.head_dim, 0 if case.latent else self.v_dim
        data = torch.full((pages * size, heads, dk + dv), float("nan"))
        for slots, rng in zip(places, self.private, strict=True):
            data[slots] = torch.randn(len(slots), heads, dk + dv, generator=rng)
        data = data.to(DTYPES[case.kv_dtype or case.dtype])
        data = data.view(pages, size, heads, dk + dv) if case.layout == "paged" else data
        if case.strided and case.layout == "paged" and not case.latent:  # [pages, Hkv, page_size, 2 D], as vLLM
            raw = data.view(torch.uint8) if data.dtype.itemsize == 1 else data
            data = raw.transpose(1, 2).contiguous().view(data.dtype).to(self.device).transpose(1, 2)
            return data[..., :dk], data[..., dk:]
        if case.strided:
            raw = data.view(torch.uint8) if data.dtype.itemsize == 1 else data
            data = torch.cat((raw, raw), dim=-1).view(data.dtype).to(self.device)[..., : dk + dv]
            return data[..., :dk], data[..., dk:] if dv else None
        return data[..., :dk].contiguous().to(self.device), data[..., dk:].contiguous().to(self.device) if dv else None

    # -- rows of tokens ---------------------------------------------------------------------------------------------

    def rows(self, heads: int, dim: int) -> torch.Tensor:
        """[T, heads, dim], NaN past the last request. ``strided``: heads of a wider row, as in a fused projection."""
        data = torch.full((self.tokens, heads + 2 * self.case.strided, dim), float("nan"))
        for first, rows, rng in zip(self.starts, self.case.query_lens, self.private, strict=False):
            data[first : first + rows, :heads] = torch.randn(rows, heads, dim, generator=rng)
        return data.to(self.device, self.dtype)[:, :heads]

    def out(self) -> torch.Tensor:
        wide = self.v_dim + 16 * self.case.strided
        return torch.full((self.tokens, self.case.heads, wide), SENTINEL, dtype=self.dtype, device=self.device)[..., : self.v_dim]

    def positions(self, trees: list[torch.Tensor]) -> torch.Tensor:
        """Depth in the tree, behind the prefix."""
        at = []
        for kv_start, prefix, sees in zip(self.kv_starts, self.prefix, trees, strict=False):
            depth = sees.tril(-1).sum(1) if self.case.mask else torch.arange(sees.shape[0])
            at += (depth + kv_start + prefix).tolist()
        return self.ints(at, fill=self.tokens)

    # -- masks ------------------------------------------------------------------------------------------------------

    def tree(self, r: int, rows: int) -> torch.Tensor:
        """bool [L, L]: a random tree's ancestors; for every fourth request anything, rows without a key among it."""
        rng = self.private[r]
        if self.ids[r] % 4 == 3:
            return torch.rand(rows, rows, generator=rng) < 0.4
        sees = torch.eye(rows, dtype=torch.bool)
        for t in range(1, rows):
            sees[t] |= sees[int(torch.randint(t, (1,), generator=rng))]
        return sees

    def mask(self, trees: list[torch.Tensor]) -> TreeMask | None:
        case, layout, most = self.case, self.case.mask, self.max_query_len
        if layout is None:
            return None
        if layout == "packed":
            words = -(-most // 64) + (1 if case.slack else 0)
            bits = self.random(0, 2, self.tokens, words * 64).bool()
            for first, sees in zip(self.starts, trees, strict=False):
                bits[first : first + sees.shape[0], : sees.shape[0]] = sees
            powers = torch.tensor([1 << i if i < 63 else -(1 << 63) for i in range(64)])
            return TreeMask((bits.view(self.tokens, words, 64) * powers).sum(-1).to(self.device), layout)
        longest = self.limits
        if layout == "full":
            pairs = zip(longest.query_lens, longest.prefix_lens, strict=True)
            size = sum(rows * (40 + max(prefix, 0) + rows) for rows, prefix in pairs) + 5 * self.requests + 11
        else:
            size = (self.requests + 2) * most**2 + (5 * self.requests if case.mask_indptr else 0)
        data, starts, at = self.random(0, 2, size), [], 5 if case.mask_indptr else 0
        for r, sees in enumerate((*trees, *[torch.ones(0, 0)] * case.padded)):
            rows = sees.shape[0]
            skip = self.kv_starts[r] + self.prefix[r] if layout == "full" and r < len(trees) else 0
            if layout == "qlen" and not case.mask_indptr:
                data[r * most**2 : (r + 1) * most**2].view(most, most)[:rows, :rows] = sees
                continue
            starts.append(at)
            data[at : at + rows * (skip + rows)].view(rows, skip + rows)[:, skip:] = sees
            at += rows * (skip + rows) + (5 if case.mask_indptr else 0)
        if case.mask_bytes != "bool":  # any byte that is not zero is true
            data = data * self.random(1, 256, size)
        data = data.to(torch.uint8).view(torch.int8) if case.mask_bytes == "int8" else data.to(getattr(torch, case.mask_bytes))
        if layout == "qlen" and not case.mask_indptr and case.layout == "paged":
            data = data.view(self.requests + 2, most, most)
        return TreeMask(data.to(self.device), layout, self.ints(starts) if case.mask_indptr else None)

    # -- small things -----------------------------------------------------------------------------------------------

    def random(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.rng)

    def ints(self, values: Sequence[int], *, fill: int = 0) -> torch.Tensor:
        """An index tensor, filled up with stale entries."""
        return torch.tensor([*values, *_repeat(_STALE, fill - len(values))], dtype=self.index).to(self.device)


def _repeat(values: Sequence[int], times: int) -> list[int]:
    return [values[i % len(values)] for i in range(times)]


# -- the grid -----------------------------------------------------------------------------------------------------------

# (name, query heads, KV heads, Dk, Dv, latent)
_SHAPES = (
    ("mha64", 2, 2, 64, 64, False),
    ("gqa80", 4, 2, 80, 80, False),
    ("gqa96", 6, 2, 96, 96, False),
    ("mqa128", 4, 1, 128, 128, False),
    ("gqa192v128", 4, 2, 192, 128, False),
    ("gqa256", 2, 1, 256, 256, False),
    ("mla16", 16, 1, 576, 512, True),
)
_TREE_LENS: dict[str, Any] = {"query_lens": (5, 0, 8, 4), "prefix_lens": (37, 4, 0, 20)}
# What a case adds to the plain one, a causal chain in a paged cache; a name says it in the words of VerifyRequest.
_VARIATIONS: dict[str, dict[str, Any]] = {
    "chain": {},
    "slots": {"layout": "slots"},
    "page1": {"page_size": 1},
    "page48": {"page_size": 48},
    "page64 strided": {"page_size": 64, "strided": True},
    "slots strided": {"layout": "slots", "strided": True, "draft": "dense"},
    "draft_slots": {"draft": "slots"},
    "draft_slots tree": {"draft": "slots", "mask": "packed", "layout": "slots", **_TREE_LENS},
    "draft_kv": {"draft": "dense"},
    "draft_kv tree strided": {"draft": "dense", "mask": "packed", "strided": True, **_TREE_LENS},
    "full": {"mask": "full", **_TREE_LENS},
    "full indptr": {"mask": "full", "mask_indptr": True, "mask_bytes": "bool", "draft": "dense", "layout": "slots", **_TREE_LENS},
    "full kv_start": {"mask": "full", "kv_start": True, "mask_bytes": "int8", "slack": 2, **_TREE_LENS},
    "qlen": {"mask": "qlen", "slack": 1, **_TREE_LENS},
    "qlen slots": {"mask": "qlen", "layout": "slots", "mask_bytes": "bool", "int64": True, **_TREE_LENS},
    "qlen indptr": {"mask": "qlen", "mask_indptr": True, "mask_bytes": "int8", **_TREE_LENS},
    "packed": {"mask": "packed", **_TREE_LENS},
    "packed wide": {"mask": "packed", "slack": 1, **_TREE_LENS},
    "packed 65": {"mask": "packed", "query_lens": (65, 2), "prefix_lens": (18, 33)},
    "qlen 64": {"mask": "qlen", "query_lens": (64,), "prefix_lens": (40,)},
    "ragged padded": {"query_lens": (2, 0, 1, 0, 7), "prefix_lens": (1, 0, 0, 4, 33), "padded": 3, "page_size": 4},
    "padded tree slots": {"mask": "full", "layout": "slots", "padded": 2, **_TREE_LENS},
    "short": {"query_lens": (4, 4, 4, 3), "prefix_lens": (-3, -4, -1, 9), "lse": True},
    "short tree": {"query_lens": (4, 4, 6, 3), "prefix_lens": (-3, -4, -2, 9), "mask": "packed", "lse": True},
    "overlong": {"query_lens": (3, 2), "prefix_lens": (45, 10), "overlong": True},
    "overlong draft_kv": {"query_lens": (3, 2), "prefix_lens": (48, 10), "overlong": True, "draft": "dense"},
    "window": {"window": 9},
    "window 0": {"window": 0, "lse": True},
    "window tree": {"window": 6, "mask": "qlen", "positions": True, **_TREE_LENS},
    "window kv_start": {"window": 20, "kv_start": True, "layout": "slots", "int64": True},
    "window full": {"window": 12, "mask": "full", "positions": True, "kv_start": True, "draft": "dense", **_TREE_LENS},
    "positions": {"positions": True, "window": 30, "int64": True},
    "sinks": {"sinks": True, "lse": True},
    "sinks alone": {"sinks": True, "lse": True, "query_lens": (3, 2, 4, 4), "prefix_lens": (0, 5, -4, 0), "mask": "packed"},
    "softcap": {"softcap": 1.5, "scale": 0.3},
    "everything": {
        "window": 25, "mask": "packed", "positions": True, "kv_start": True, "sinks": True, "softcap": 2.0, "lse": True,
        "scales": "device", "strided": True, "int64": True, "draft": "slots", **_TREE_LENS,
    },
    "scales": {"scales": "host"},
    "scales draft_kv": {"scales": "device", "draft": "dense"},
    "fp8_e4m3": {"kv_dtype": "fp8_e4m3", "scales": "host"},
    "fp8_e4m3 tree": {"kv_dtype": "fp8_e4m3", "scales": "device", "draft": "dense", "mask": "packed", "layout": "slots", **_TREE_LENS},
    "fp8_e5m2": {"kv_dtype": "fp8_e5m2", "scales": "device", "strided": True, "page_size": 64},
    "fp8_e5m2 slots": {"kv_dtype": "fp8_e5m2", "scales": "none", "draft": "slots"},
    "lse int64": {"lse": True, "int64": True},
}  # fmt: skip
_EVERY_SHAPE = ("chain", "packed")
_LATENT = ("slots strided", "draft_slots", "draft_kv tree strided", "page64 strided", "fp8_e4m3", "everything", "short", "sinks")


def cases(device: torch.device | str = "cpu", dtypes: Sequence[str] = ("fp32", "fp16", "bf16"), size: str = "small") -> Iterator[Case]:
    """The grid: every feature on a GQA shape, most on a latent cache, a chain and a tree on every shape; for each dtype.

    "small": a few heads and prefixes of up to 70 keys, for interpreters. "full": 32/8 heads, latent caches of 16 and
    128 heads, prefixes of some thousand keys: minutes on a CPU. ``device`` is where they will run; all run anywhere.
    """
    if size not in ("small", "full"):
        raise ValueError(f"size must be 'small' or 'full', got {size!r}")
    for dtype in dtypes:
        if dtype not in ("fp32", "fp16", "bf16"):
            raise ValueError(f"dtypes must be of fp32, fp16, bf16, got {dtype!r}")
        for name, heads, kv_heads, dk, dv, latent in _SHAPES:
            shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": dk, "v_head_dim": dv, "latent": latent}
            for variation in (*_EVERY_SHAPE, *(_LATENT if latent else ())):
                yield from _sized(Case(f"{name} {variation}", dtype=dtype, **shape, **_VARIATIONS[variation]), size)
        for variation, changes in _VARIATIONS.items():
            yield from _sized(Case(f"gqa64 {variation}", dtype=dtype, **changes), size)


def _sized(case: Case, size: str) -> Iterator[Case]:
    if size == "small":
        yield case
        return
    if case.latent:
        yield replace(case, prefix_lens=_longer(case))
        yield replace(case, name=case.name.replace("mla16", "mla128"), heads=128)
    else:
        group = case.heads // case.kv_heads
        kv_heads = 1 if case.kv_heads == 1 else 8
        yield replace(
            case, heads=kv_heads * max(group, 4 if case.name.startswith("gqa64") else group), kv_heads=kv_heads, prefix_lens=_longer(case)
        )


def _longer(case: Case) -> tuple[int, ...]:
    """Prefixes 64 times as long and of no round length; none where an edge of the length is the point."""
    if case.overlong:
        return tuple(p + 64 * case.page_size * (p == max(case.prefix_lens)) for p in case.prefix_lens)
    return tuple(64 * p + 1 if p > 0 else p for p in case.prefix_lens)
