"""Speculative decoding with trees: a small Llama, its EAGLE drafter, and the op as the attention of the verify step. CPU or GPU.

From a checkout, which has the models (11 MB, they write Python): PYTHONPATH=. python examples/03_tree_speculation.py
How the tree is made and what of it is kept is benchmarks/models/speculate.py, a page of plain PyTorch.
"""

from __future__ import annotations

import torch

from benchmarks.models import checkpoints, data
from benchmarks.models.speculate import generate
from flashmap.core import verify_attention

PROMPTS = (
    "for line in lines:\n    if not line:\n        continue\n    key, value = line.",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n        self._items.",
)
NEW_TOKENS = 64  # bytes: the models' tokens


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = checkpoints.load_target(checkpoints.LLAMA).to(device)
    drafter = checkpoints.load_drafter(checkpoints.EAGLE, target).to(device)
    prompts = [list(prompt.encode()) for prompt in PROMPTS]

    def verify(q, kv, **call):
        """The target's attention in a verify step. Put your own here: if it is wrong, the text changes."""
        return verify_attention(q, kv, **call)

    alone = generate(target, prompts, NEW_TOKENS)
    # Five steps of the drafter. The chain is what it finds likeliest; the tree is the best 7 of what 4 candidates a step give.
    chain = generate(target, prompts, NEW_TOKENS, drafter=drafter, steps=5, verify=verify)
    tree = generate(target, prompts, NEW_TOKENS, drafter=drafter, steps=5, topk=4, draft_tokens=8, verify=verify)

    print(f"{PROMPTS[0]}»{data.text(tree.tokens[0])}«\n")
    for title, result in (("no drafter", alone), ("chain of 6", chain), ("tree of 8", tree)):
        same = "the same text" if result.tokens == alone.tokens else "ANOTHER TEXT"
        print(f"{title}: {result.steps} steps of the target, {result.tokens_per_step:.2f} tokens a step, {same}")


if __name__ == "__main__":
    main()
