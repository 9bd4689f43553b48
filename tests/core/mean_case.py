"""Calls whose result can be done in the head: all queries and keys are zero, so a row of out is the mean of the values it sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from flashmap.core import DeviceInfo, PagedKV, SlotKV, TreeMask, VerifyRequest, registry, verify_attention

NAN = float("nan")
DIM = 32


def tokens(values: Sequence[float], *, heads: int = 1, dim: int = DIM) -> torch.Tensor:
    """[n, heads, dim]: every column of token i is values[i]."""
    return torch.tensor(values, dtype=torch.float32)[:, None, None].expand(-1, heads, dim).contiguous()


def mean_case(
    prefixes: Sequence[Sequence[float]],
    drafts: Sequence[Sequence[float]],
    *,
    draft: str = "cache",
    layout: str = "slots",
    page_size: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **more: Any,
) -> dict[str, Any]:
    """verify_attention's arguments: request r has the prefix values prefixes[r] and the draft values drafts[r]."""
    lens = [len(d) for d in drafts]
    stored = [[*p, *(d if draft != "dense" else [])] for p, d in zip(prefixes, drafts, strict=True)]
    size = page_size if layout == "paged" else 1
    flat, tables = [NAN] * size, []  # page 0 is nobody's
    for values in stored:
        pages = -(-len(values) // size)
        tables.append([len(flat) // size + i for i in range(pages)])
        flat += [*values, *[NAN] * (pages * size - len(values))]
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    v = tokens(flat).to(dtype)
    k = torch.where(v.isnan(), v, torch.zeros_like(v))
    listed = [len(s) - (n if draft == "slots" else 0) for s, n in zip(stored, lens, strict=True)]
    if layout == "paged":
        width = max((len(t) for t in tables), default=0) + 1
        table = torch.tensor([[*t, *[-1] * (width - len(t))] for t in tables], dtype=torch.int32)
        k, v = k.view(-1, size, 1, DIM), v.view(-1, size, 1, DIM)
        kv: PagedKV | SlotKV = PagedKV(k.to(device), v.to(device), table.to(device), torch.tensor(listed).int().to(device))
    else:
        indices = [i for t, n in zip(tables, listed, strict=True) for i in t[:n]]
        indptr = torch.tensor([0, *listed]).cumsum(0).int()
        kv = SlotKV(k.to(device), v.to(device), indptr.to(device), torch.tensor([*indices, -1]).int().to(device))
    arguments: dict[str, Any] = {
        "q": torch.zeros(sum(lens), 1, DIM, dtype=dtype, device=device),
        "kv": kv,
        "cu_seqlens_q": starts.to(device),
        "max_query_len": max(lens, default=0),
        **more,
    }
    values = tokens([x for d in drafts for x in d]).to(device, dtype)
    if draft == "dense":
        arguments["draft_kv"] = (torch.zeros_like(values), values)
    elif draft == "slots":
        slots = [
            t[i // size] * size + i % size for t, p, d in zip(tables, prefixes, drafts, strict=True) for i in range(len(p), len(p) + len(d))
        ]
        arguments["draft_slots"] = torch.tensor(slots).int().to(device)
    return arguments


def rows(out: torch.Tensor) -> list[float]:
    """One number for each row of out, whose columns and heads must agree."""
    assert torch.equal(out, out[:, :1, :1].expand_as(out))
    return out[:, 0, 0].float().tolist()


def near(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Any:
    return pytest.approx(list(values), rel=1e-5 if dtype == torch.float32 else 2e-3)


def attend(impl: str, arguments: dict[str, Any]) -> Any:
    """verify_attention by the implementation of that name; the test is skipped where it does not serve the call."""
    request = VerifyRequest.of(**arguments)
    reasons = registry.get(impl).why_not(request, DeviceInfo.of(arguments["q"].device))
    if reasons:
        pytest.skip(f"{impl}: {'; '.join(map(str, reasons))}")
    return verify_attention(**arguments, impl=impl)


def bits(*trees: str) -> list[torch.Tensor]:
    """Masks from rows of 0 and 1: bits("100 110 101")."""
    return [torch.tensor([[int(c) for c in row] for row in tree.split()], dtype=torch.uint8) for tree in trees]


def tree_mask(trees: Sequence[torch.Tensor], layout: str, before: Sequence[int] = (), *, noise: int = 0, device: str = "cpu") -> TreeMask:
    """The trees in a layout; for "full", ``before`` entries of ``noise`` in front of each row."""
    if layout == "packed":
        words = [[sum(int(b) << j for j, b in enumerate(row))] for tree in trees for row in tree.tolist()]
        return TreeMask(torch.tensor(words, dtype=torch.int64, device=device), layout)
    if layout == "qlen":
        most = max(tree.shape[0] for tree in trees)
        data = torch.full((len(trees), most, most), noise, dtype=torch.uint8)
        for r, tree in enumerate(trees):
            data[r, : tree.shape[0], : tree.shape[0]] = tree
        return TreeMask(data.to(device), layout)
    flat = [
        torch.cat((torch.full((tree.shape[0], n), noise, dtype=torch.uint8), tree), 1).flatten()
        for tree, n in zip(trees, before, strict=True)
    ]
    return TreeMask(torch.cat(flat).to(device), layout)
