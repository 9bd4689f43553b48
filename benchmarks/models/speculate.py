"""Speculative decoding in a page of PyTorch, on `flashmap.core.verify_attention`: what an engine does, for the small models.

A step: the drafter proposes a tree (a chain for ``topk`` 1) below each request's newest token, one forward of the target checks
all of it under the tree's mask, and the longest path that the target would have taken itself is kept. Greedy, so the text is
the one that the target writes alone; how it was attended decides what is accepted.

    python -m benchmarks.models.speculate --model llama_tiny --drafter llama_tiny_eagle --topk 4 --draft-tokens 8
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flashmap.core import PagedKV, TreeMask, verify_attention

from . import data
from .architecture import Drafter, Latent, Target
from .checkpoints import DEEPSEEK, EAGLE, EAGLE3, HERE, LLAMA, load_drafter, load_target

CHUNK = 64  # prompt tokens a forward


@dataclass(frozen=True, slots=True)
class Result:
    """``tokens``: the new ones of each request. ``steps``: verify steps; ``verified``: of each request, until it was done."""

    tokens: list[list[int]]
    steps: int
    verified: list[int]

    @property
    def tokens_per_step(self) -> float:
        """New tokens over verify steps, of all requests. 1.0 is what decoding without a drafter takes."""
        return sum(map(len, self.tokens)) / sum(self.verified)


@torch.no_grad()
def generate(
    target: Target,
    prompts: list[list[int]],
    new_tokens: int,
    *,
    drafter: Drafter | None = None,
    steps: int = 3,
    topk: int = 1,
    draft_tokens: int | None = None,
    verify: Callable[..., Tensor] = verify_attention,  # the target's attention in verify steps; what it returns is used
) -> Result:
    """Continue ``prompts`` by ``new_tokens`` each. ``steps``, ``topk`` and ``draft_tokens`` (the root included) are sglang's."""
    if draft_tokens is None:
        draft_tokens = steps + 1
    if drafter is None:
        draft_tokens = 1
    capacity = max(map(len, prompts)) + new_tokens + 2 * draft_tokens
    main = _Cached(target, len(prompts), capacity)
    draft = None
    if drafter is not None:
        draft = _Cached(drafter, len(prompts), capacity)
        main.features = drafter.features
    wanted = [len(prompt) + new_tokens for prompt in prompts]
    texts = [list(prompt) for prompt in prompts]
    done, verified = 0, [0] * len(prompts)

    # The prompts, in chunks. What the target says of the last token of each is its first new one.
    features: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), CHUNK):
        pieces = [prompt[start : start + CHUNK] for prompt in prompts]
        logits, hidden = main.forward(pieces, verify=verify_attention)
        for r, piece in enumerate(pieces):
            if piece:
                features[r].append(hidden[r])
                if start + len(piece) == len(prompts[r]):
                    texts[r].append(int(logits[r][-1].argmax()))
        main.keep([list(range(len(piece))) for piece in pieces])
    fresh = [torch.cat(rows) for rows in features]

    while any(len(text) < length for text, length in zip(texts, wanted, strict=True)):
        if draft is None:
            trees = [_Tree([text[-1]], [-1]) for text in texts]
        else:
            trees = _draft(draft, texts, fresh, steps, topk, draft_tokens)
        logits, hidden = main.forward([tree.tokens for tree in trees], parents=[tree.parents for tree in trees], verify=verify)
        paths = []
        for r, tree in enumerate(trees):
            path, token = tree.accept(logits[r].argmax(-1).tolist())
            if len(texts[r]) < wanted[r]:
                verified[r] += 1
            else:
                path = []  # this one is done; nothing more is kept
            if path:
                texts[r] += [*(tree.tokens[i] for i in path[1:]), token]
            paths.append(path)
        main.keep(paths)
        fresh = [hidden[r][path] for r, path in enumerate(paths)]
        done += 1
    return Result([t[len(p) : n] for t, p, n in zip(texts, prompts, wanted, strict=True)], done, verified)


@dataclass(frozen=True, slots=True)
class _Tree:
    """Tokens with the index of each one's parent, which comes before it. The first is the root (parent -1)."""

    tokens: list[int]
    parents: list[int]

    def accept(self, said: list[int]) -> tuple[list[int], int]:
        """The path from the root along which the target (``said``: its choice after each token) agrees, and what it says next."""
        path = [0]
        while True:
            token = said[path[-1]]
            agreed = [i for i, parent in enumerate(self.parents) if parent == path[-1] and self.tokens[i] == token]
            if not agreed:
                return path, token
            path.append(agreed[0])


def _draft(draft: _Cached, texts: list[list[int]], fresh: list[Tensor], steps: int, topk: int, draft_tokens: int) -> list[_Tree]:
    """EAGLE-2's trees: of each depth's topk^2 candidates the topk likeliest go on; of all of them the likeliest are verified."""
    # First the drafter catches up with what the target has read: pairs of (its hidden state, the token after it).
    pairs = [text[len(text) - len(rows) :] if len(rows) else [] for text, rows in zip(texts, fresh, strict=True)]
    last: list[tuple[Tensor, Tensor] | None] = [None] * len(texts)
    for start in range(0, max(map(len, pairs)), CHUNK):
        pieces = [pair[start : start + CHUNK] for pair in pairs]
        logits, hidden = draft.forward(pieces, [rows[start : start + CHUNK] for rows in fresh], verify=verify_attention)
        for r, piece in enumerate(pieces):
            if piece:
                last[r] = logits[r][-1], hidden[r][-1]
        draft.keep([list(range(len(piece))) for piece in pieces])

    # Candidate i of a request: its token, its parent candidate (-1: the root), its depth's hidden state, its log probability.
    tokens: list[list[int]] = [[] for _ in texts]
    parents: list[list[int]] = [[] for _ in texts]
    scores: list[list[float]] = [[] for _ in texts]
    inputs: list[list[Tensor]] = [[] for _ in texts]
    grown: list[list[int]] = [[] for _ in texts]  # the candidates that went on, in order: the rows of the drafter's forward
    alive = [r for r, found in enumerate(last) if found is not None]
    for r in alive:
        logits_r, hidden_r = last[r]  # type: ignore[misc]
        _add(tokens[r], parents[r], scores[r], inputs[r], logits_r, hidden_r, -1, 0.0, topk)
    for depth in range(1, steps):
        for r in alive:
            level = [i for i in range(len(tokens[r])) if _depth(parents[r], i) == depth]
            grown[r] += sorted(level, key=lambda i: -scores[r][i])[:topk]
        logits, hidden = draft.forward(
            [[tokens[r][i] for i in grown[r]] for r in range(len(texts))],
            [torch.stack([inputs[r][i] for i in grown[r]]) if grown[r] else fresh[r][:0] for r in range(len(texts))],
            parents=[[grown[r].index(parents[r][i]) if parents[r][i] >= 0 else -1 for i in grown[r]] for r in range(len(texts))],
            verify=verify_attention,
        )
        for r in alive:
            for row, i in list(enumerate(grown[r]))[-topk:]:
                _add(tokens[r], parents[r], scores[r], inputs[r], logits[r][row], hidden[r][row], i, scores[r][i], topk)

    trees = []
    for r, text in enumerate(texts):
        chosen = sorted(sorted(range(len(tokens[r])), key=lambda i: -scores[r][i])[: draft_tokens - 1])
        place = {-1: 0} | {i: n for n, i in enumerate(chosen, start=1)}
        trees.append(_Tree([text[-1], *(tokens[r][i] for i in chosen)], [-1, *(place[parents[r][i]] for i in chosen)]))
    return trees


def _add(tokens: list[int], parents: list[int], scores: list[float], inputs: list[Tensor], logits: Tensor, hidden: Tensor, parent: int, score: float, topk: int) -> None:  # fmt: skip
    likely = logits.float().log_softmax(-1).topk(topk)
    for value, token in zip(likely.values.tolist(), likely.indices.tolist(), strict=True):
        tokens.append(token)
        parents.append(parent)
        scores.append(score + value)
        inputs.append(hidden)


def _depth(parents: list[int], i: int) -> int:
    return 1 if parents[i] < 0 else 1 + _depth(parents, parents[i])


class _Cached:
    """A model with a KV cache: one page a request, as long as its text can get."""

    def __init__(self, model: Target | Drafter, requests: int, capacity: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.rank: int | None = None  # of latent attention
        for module in model.modules():
            if isinstance(module, Latent):
                module.absorbed, self.rank = True, module.rank
        self.lens = torch.zeros(requests, dtype=torch.int32, device=self.device)
        self.table = torch.arange(requests, dtype=torch.int32, device=self.device)[:, None]
        self.capacity = capacity
        self.pages: dict[int, list[Tensor | None]] = {}  # by layer: K and V, [requests, capacity, Hkv, D]
        self.pending: dict[int, tuple[Tensor, Tensor | None]] = {}  # by layer: K and V of the last forward's tokens
        self.cu = torch.zeros(1, dtype=torch.int32)
        self.features: Callable[[Tensor, Tensor | None], Tensor] = lambda hidden, captured: hidden

    def forward(
        self,
        tokens: list[list[int]],
        features: list[Tensor] | None = None,
        *,
        parents: list[list[int]] | None = None,
        verify: Callable[..., Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Logits and features (for a drafter: hidden states) of each request's tokens, which follow its cache as a chain or a tree."""
        lengths = [len(row) for row in tokens]
        self.cu = torch.tensor([0, *lengths], device=self.device).cumsum(0).int()
        depths = [list(range(n)) for n in lengths]
        if parents is not None:
            depths = [[_depth(row, i) - 1 for i in range(len(row))] for row in parents]
        positions = torch.cat([int(n) + torch.tensor(d, dtype=torch.int64) for n, d in zip(self.lens, depths, strict=True)]).to(self.device)
        mask = None if parents is None else TreeMask(self._sees(parents, max(lengths)), "qlen")

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor | None, scale: float) -> Tensor:
            if layer not in self.pages:
                self.pages[layer] = [None if x is None else x.new_zeros(len(tokens), self.capacity, *x.shape[1:]) for x in (k, v)]
            self.pending[layer] = k, v
            pages_k, pages_v = self.pages[layer]
            kv = PagedKV(pages_k, pages_v, self.table, self.lens, v_head_dim=self.rank if v is None else None)
            return verify(q, kv, cu_seqlens_q=self.cu, max_query_len=max(lengths), draft_kv=(k, v), mask=mask, scale=scale)

        flat = torch.tensor([token for row in tokens for token in row], device=self.device)
        if isinstance(self.model, Drafter):
            assert features is not None
            logits, hidden = self.model(flat, torch.cat(features), positions, attend)
        else:
            logits, hidden, captured = self.model(flat, positions, attend)
            hidden = self.features(hidden, captured)
        return list(logits.split(lengths)), list(hidden.split(lengths))

    def keep(self, rows: list[list[int]]) -> None:
        """Append these rows of the last forward to the cache, in order."""
        for r, kept in enumerate(rows):
            at = int(self.lens[r])
            source = int(self.cu[r]) + torch.tensor(kept, dtype=torch.int64, device=self.device)
            for layer, values in self.pending.items():
                for page, value in zip(self.pages[layer], values, strict=True):
                    if page is not None and value is not None:
                        page[r, at : at + len(kept)] = value[source]
        self.lens = self.lens + torch.tensor([len(kept) for kept in rows], dtype=torch.int32, device=self.device)

    def _sees(self, parents: list[list[int]], width: int) -> Tensor:
        """bool [requests, width, width]: a token sees itself and what its parent sees."""
        sees = torch.zeros(len(parents), width, width, dtype=torch.bool)
        for r, row in enumerate(parents):
            for i, parent in enumerate(row):
                if parent >= 0:
                    sees[r, i] = sees[r, parent]
                sees[r, i, i] = True
        return sees.to(self.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=DEEPSEEK, choices=(DEEPSEEK, LLAMA))
    parser.add_argument(
        "--drafter", default=None, choices=(DEEPSEEK, EAGLE, EAGLE3), help="its folder (default: the target's own MTP, or EAGLE)"
    )
    parser.add_argument("--models", type=Path, default=HERE, help="the folder of the model folders")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--topk", type=int, default=1)
    parser.add_argument("--draft-tokens", type=int, help="the root included (default: steps + 1)")
    args = parser.parse_args()
    target = load_target(args.model, args.models)
    drafter = load_drafter(args.drafter or (DEEPSEEK if args.model == DEEPSEEK else EAGLE), target, args.models)
    prompts = data.prompts(args.prompts)
    start = time.monotonic()
    plain = generate(target, prompts, args.new_tokens)
    middle = time.monotonic()
    found = generate(target, prompts, args.new_tokens, drafter=drafter, steps=args.steps, topk=args.topk, draft_tokens=args.draft_tokens)
    end = time.monotonic()
    for prompt, tokens in zip(prompts[:2], found.tokens, strict=False):
        print(f"--- prompt\n{data.text(prompt[-120:])}\n--- continued\n{data.text(tokens)}")
    print(f"{found.tokens_per_step:.2f} tokens a verify step, {end - middle:.1f} s; without a drafter 1.00, {middle - start:.1f} s; "
          f"tokens {'equal' if found.tokens == plain.tokens else 'DIFFERENT'}")  # fmt: skip


if __name__ == "__main__":
    main()
