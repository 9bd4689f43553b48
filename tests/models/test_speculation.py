"""Speculation with the small models is real: drafts are accepted, the text is the target's own, and wrong attention changes it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.models import data
from benchmarks.models.architecture import Drafter, Target
from benchmarks.models.checkpoints import DEEPSEEK, EAGLE, EAGLE3, LLAMA, load_drafter, load_target
from benchmarks.models.speculate import Result, generate
from flashmap.core import verify_attention

DRAFTERS = {DEEPSEEK: (DEEPSEEK, 3), EAGLE: (LLAMA, 5), EAGLE3: (LLAMA, 5)}  # their target, and how many steps they go on
TREE = {"topk": 4, "draft_tokens": 8}
NEW_TOKENS = 40
# For the controls, which need the same text everywhere; the library differs from one Python to the next.
FIXED = (
    "import os\nimport sys\n\n\ndef main(argv):\n    ",
    'class Queue:\n    """A first-in, first-out queue.\n\n    ',
    "    def __init__(self, name, value=None):\n        self.name = name\n",
    "    for line in lines:\n        if line.startswith('#'):\n            continue\n        key, ",
)


@pytest.fixture(scope="module")
def held_out() -> list[list[int]]:
    return data.prompts(8, longest=200)


@pytest.fixture(scope="module")
def models() -> Callable[[str], tuple[Target, Drafter]]:
    targets: dict[str, Target] = {}

    def load(drafter: str) -> tuple[Target, Drafter]:
        name, _ = DRAFTERS[drafter]
        targets.setdefault(name, load_target(name))
        return targets[name], load_drafter(drafter, targets[name])

    return load


@pytest.mark.parametrize("name", DRAFTERS)
def test_acceptance(models, held_out, name: str, record_property) -> None:
    """A chain gives more than 1.8 tokens a step, a tree more than the chain, and both the text that the target writes alone."""
    target, drafter = models(name)
    _, steps = DRAFTERS[name]
    plain = generate(target, held_out, NEW_TOKENS)
    assert plain.tokens_per_step < 1.05  # the first token comes from the prompt's own forward
    chain = generate(target, held_out, NEW_TOKENS, drafter=drafter, steps=steps)
    tree = generate(target, held_out, NEW_TOKENS, drafter=drafter, steps=steps, **TREE)
    assert chain.tokens == plain.tokens and tree.tokens == plain.tokens
    record_property("tokens_per_step", (chain.tokens_per_step, tree.tokens_per_step))
    assert 1.8 < chain.tokens_per_step < tree.tokens_per_step


def untouched(q: Tensor, kv: Any, **call: Any) -> Tensor:
    return verify_attention(q, kv, **call)


def zeros(q: Tensor, kv: Any, **call: Any) -> Tensor:
    return torch.zeros_like(verify_attention(q, kv, **call))


def causal(q: Tensor, kv: Any, **call: Any) -> Tensor:
    """As if the tree were a chain: every draft token sees all those before it."""
    return verify_attention(q, kv, **call | {"mask": None})


def another_request(q: Tensor, kv: Any, **call: Any) -> Tensor:
    """Each request gets what the next one should have."""
    out = verify_attention(q, kv, **call)
    ends = call["cu_seqlens_q"].tolist()
    rows = [list(range(start, end)) for start, end in pairwise(ends)]
    taken = [other[min(i, len(other) - 1)] for own, other in zip(rows, rows[1:] + rows[:1], strict=True) for i in range(len(own))]
    return out[taken]


@pytest.fixture(scope="module")
def with_tree(models) -> Callable[..., Result]:
    def run(name: str, verify: Callable[..., Tensor] = verify_attention) -> Result:
        target, drafter = models(name)
        prompts = [list(text.encode()) for text in FIXED]
        return generate(target, prompts, NEW_TOKENS, drafter=drafter, steps=DRAFTERS[name][1], **TREE, verify=verify)

    return run


@pytest.mark.parametrize("name", [DEEPSEEK, EAGLE])
def test_wrong_attention_changes_the_tokens(with_tree, name: str) -> None:
    right = with_tree(name)
    assert with_tree(name, untouched).tokens == right.tokens
    for verify in (zeros, causal, another_request):
        wrong = with_tree(name, verify)
        changed = [a != b for a, b in zip(wrong.tokens, right.tokens, strict=True)]
        assert all(changed), f"{verify.__name__} changes the text of {sum(changed)} requests of {len(changed)}"
