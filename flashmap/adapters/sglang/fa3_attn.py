"""SGLang's fa3 backend with verify batches served by the op. Imported once SGLang has imported that backend.

``forward_extend`` stays SGLang's, with its KV write and metadata. While it runs for a batch of a served mode, its calls of
the module's ``flash_attn_with_kvcache`` and ``merge_state_v2_wrapper`` come here. A chain is one such call, which the op
takes as it is. A tree (topk > 1) is a call for the prefix, one for the draft tokens and a merge: the op answers the first
with the whole result, and the other two do nothing.

SGLang folds a tree's mask into a table of slots for each row before the first layer, and may not keep the mask. What the
op needs is made from that table, once a step: after ``init_forward_metadata``, and inside the graph, where SGLang records
``init_forward_metadata_in_graph``. So a replay needs no Python, and reads memory at fixed addresses alone.

Latent attention with trees and pages of several tokens is wrong in SGLang 0.5.16 to 0.5.23 without us: the second call shows
a table of slots together with a cache seen as pages. These hooks can go when SGLang lets a plugin choose the kernel of a batch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from flashmap.adapters.patching import Contract, Hook, wrap
from flashmap.adapters.sglang import serve, translate

KERNEL = "sglang.fa3"
MODULE = "sglang.srt.layers.attention.flashattention_backend"
_BACKEND = f"{MODULE}:FlashAttentionBackend"
_MODE = "sglang.srt.model_executor.forward_batch_info:ForwardMode"

CONTRACTS = (
    Contract(f"{_BACKEND}.__init__", ("model_runner",), uses=("topk", "fa_impl_ver", "use_mla", "num_splits", "page_size")),
    Contract(
        f"{_BACKEND}.forward_extend",
        ("q", "k", "v", "layer", "forward_batch"),
        uses=("flash_attn_with_kvcache", "merge_state_v2_wrapper", "forward_metadata_spec_decode_expand"),
    ),
    Contract(f"{_BACKEND}.init_forward_metadata", ("forward_batch",)),
    Contract(f"{_BACKEND}.init_forward_metadata_in_graph", ("forward_batch",)),
    Contract(f"{_BACKEND}.init_cuda_graph_state", ("max_bs", "max_num_tokens")),
    Contract(f"{MODULE}:FlashAttentionMetadata", fields=("cache_seqlens_int32", "page_table")),
    Contract(f"{MODULE}:flash_attn_with_kvcache", ("q", "k_cache", "v_cache", "qv", "page_table", "cache_seqlens", "cu_seqlens_q", "max_seqlen_q", "softmax_scale", "causal", "window_size", "softcap", "return_softmax_lse")),
    Contract(f"{MODULE}:merge_state_v2_wrapper"),
    Contract(f"{_MODE}.is_target_verify"),
    Contract(f"{_MODE}.is_draft_extend_v2"),
)  # fmt: skip


def hook(modes: tuple[str, ...]) -> tuple[Hook, ...]:
    """Hook the backend, for these forward modes."""
    why = f"{' and '.join(serve.MODES[mode][1] for mode in modes)} go to FlashMap's op"
    hooks = [
        wrap(f"{_BACKEND}.forward_extend", functools.partial(forward_extend, modes), why),
        wrap(f"{_BACKEND}.init_cuda_graph_state", init_cuda_graph_state, "scratch for the largest graph is taken before capture"),
        wrap(f"{MODULE}:flash_attn_with_kvcache", flash_attn_with_kvcache, why),
        wrap(f"{MODULE}:merge_state_v2_wrapper", merge_state_v2_wrapper, "the op's answer is merged already"),
    ]
    if "target_verify" in modes:
        trees = "trees in the op's form, once a step"
        hooks += [wrap(f"{_BACKEND}.{name}", make_tree, trees) for name in ("init_forward_metadata", "init_forward_metadata_in_graph")]
    return tuple(hooks)


class _Now(threading.local):
    """The call of ``forward_extend`` that this thread is in, if it is one for us."""

    call: _Call | None = None


_now = _Now()


class _Call:
    """One call of ``forward_extend``. ``ours`` is the op's answer to a tree's first kernel call, until the merge hands it over."""

    def __init__(self, backend: Any, layer: Any, role: str, tree: translate.Tree | None) -> None:
        self.backend, self.layer, self.role, self.tree = backend, layer, role, tree
        self.reached = False
        self.ours: torch.Tensor | None = None
        self.compares = False


@torch.compiler.disable
def forward_extend(
    modes: tuple[str, ...], original: Any, self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """SGLang's ``forward_extend``, with its kernel calls answered below, where the batch is one of verification."""

    def engine() -> Any:
        return original(self, q, k, v, layer, forward_batch, *args, **kwargs)

    role = serve.role(forward_batch.forward_mode, modes)
    if role is None:
        return engine()
    is_tree = forward_batch.forward_mode.is_target_verify() and self.topk > 1
    tree = getattr(self.forward_metadata_spec_decode_expand, _TREE, None) if is_tree else None
    code = _reason(self, layer, forward_batch, is_tree, tree)
    if code is not None:
        serve.left(KERNEL, role, code)
        return engine()
    _now.call = call = _Call(self, layer, role, tree)
    try:
        done = engine()
    finally:
        _now.call = None
    if not call.reached:
        serve.left(KERNEL, role, "not_reached", "this call of forward_extend ran another kernel")
    return done


def flash_attn_with_kvcache(original: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's kernel, or the op in its place. The second call for a tree is answered by what the first left behind."""
    call = _now.call
    if call is None or args:
        return original(*args, **kwargs)
    if call.reached:
        return original(**kwargs) if call.ours is None or call.compares else (call.ours, _no_lse(call.ours))
    call.reached = True
    ours = _attend(call, kwargs)
    if ours is None:
        return original(**kwargs)
    if call.tree is not None:
        call.ours = ours
        # Upstream's second call reads out of bounds for a latent cache of larger pages: nothing to compare with.
        call.compares = serve.checking(ours.device) and not _wrong_upstream(call.backend)
        return original(**_elsewhere(kwargs)) if call.compares else (ours, _no_lse(ours))
    if serve.checking(ours.device):
        serve.compare(call.layer, call.role, ours, original(**_elsewhere(kwargs)))
    return ours


def merge_state_v2_wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """SGLang's merge of a tree's two parts, or the op's answer, which is whole."""
    call = _now.call
    if call is None or call.ours is None:
        return original(*args, **kwargs)
    if call.compares:
        serve.compare(call.layer, call.role, call.ours, original(*args, **kwargs)[0])
    return call.ours, None


def make_tree(original: Any, self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's metadata of a step, and beside its table of a tree the same for the op."""
    done = original(self, forward_batch, *args, **kwargs)
    if self.topk > 1 and forward_batch.forward_mode.is_target_verify():
        table = self.forward_metadata_spec_decode_expand
        setattr(table, _TREE, translate.Tree.of(table.page_table, table.cache_seqlens_int32))
    return done


def init_cuda_graph_state(original: Any, self: Any, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any) -> Any:
    """Keeps the maxima."""
    done = original(self, max_bs, max_num_tokens, *args, **kwargs)
    serve.remember_limits(self, max_bs)
    return done


_TREE = "flashmap_tree"  # on SGLang's metadata of a tree, so that it lives and dies with it


def _reason(backend: Any, layer: Any, forward_batch: Any, is_tree: bool, tree: translate.Tree | None) -> str | None:
    """Why this call of ``forward_extend`` is not one for the op, as far as its kernel's arguments do not tell: a code, or None."""
    if backend.fa_impl_ver != 3:
        return "fa_version"
    if backend.num_splits == 1:
        return "deterministic"
    if getattr(forward_batch, "attn_cp_metadata", None) is not None:
        return "cp"
    if layer.is_cross_attention:
        return "cross_attention"
    if getattr(backend.forward_metadata, "local_attn_metadata", None) is not None and getattr(layer, "use_irope", False):
        return "local_attention"
    if not is_tree:
        return None
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        return "window"  # SGLang shows these layers every row as a request of its own
    algorithm = getattr(forward_batch, "spec_algorithm", None)
    if algorithm is not None and getattr(algorithm, "is_uno", bool)():
        return "uno"
    return "metadata" if tree is None else None


def _attend(call: _Call, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The op's answer to a kernel call, or None: the engine's kernel has to give it."""
    right = call.tree is None or not _wrong_upstream(call.backend)
    batch = translate.paged(kwargs, call.tree)
    return serve.attend(batch, KERNEL, call.role, call.backend, kwargs.get("out"), right=right)


def _wrong_upstream(backend: Any) -> bool:
    """Whether SGLang's own answer to a tree is wrong."""
    return bool(backend.use_mla and backend.page_size > 1)


def _elsewhere(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same call, but for where the output goes: ours is there."""
    return {name: value for name, value in kwargs.items() if name != "out"}


@functools.cache
def _zero(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, 1, device=device)


def _no_lse(ours: torch.Tensor) -> torch.Tensor:
    """What SGLang transposes and hands to the merge, which does not read it."""
    return _zero(ours.device)
