"""SGLang's triton backend with verify batches, and the draft's decoding, served by the op. Imported once SGLang has imported that backend.

``forward_extend`` stays SGLang's, with its KV write and metadata. While it runs for a batch of a served mode, the
instance's ``extend_attention_fwd``, the kernel that it calls last (0.5.17: itself, 0.5.23: through
``_forward_extend_kernel``), is ours, which runs the op or SGLang's kernel. ``forward_decode`` with ``decode_attention_fwd`` likewise, on
the instances that a drafter decodes with, where a token is a request of one. That takes the place of the
hook upstream has for one AMD chip (``verify_splitkv_fwd``, sgl-project/sglang#39316), which sees no draft-extend; it can go when
SGLang lets a plugin choose the kernel of a batch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from flashmap import env
from flashmap.adapters.patching import Contract, Hook, wrap
from flashmap.adapters.serving import Batch
from flashmap.adapters.sglang import serve, translate
from flashmap.core.request import DeviceInfo

KERNEL = "sglang.triton"
MODULE = "sglang.srt.layers.attention.triton_backend"
_EXTEND = "sglang.kernels.ops.attention.extend_attention"
_DECODE = "sglang.kernels.ops.attention.decode_attention"
_MODE = "sglang.srt.model_executor.forward_batch_info:ForwardMode"

CONTRACTS = (
    Contract(f"{MODULE}:TritonAttnBackend.__init__", ("model_runner",), uses=("extend_attention_fwd", "decode_attention_fwd", "skip_prefill", "enable_deterministic", "dcp_size", "topk")),
    Contract(f"{MODULE}:TritonAttnBackend.forward_extend", ("q", "k", "v", "layer", "forward_batch")),
    Contract(f"{MODULE}:TritonAttnBackend.forward_decode", ("q", "k", "v", "layer", "forward_batch"), uses=("decode_attention_fwd",)),
    Contract(f"{MODULE}:TritonAttnBackend.init_cuda_graph_state", ("max_bs", "max_num_tokens")),
    Contract(f"{MODULE}:TritonAttnBackend.get_cuda_graph_seq_len_fill_value"),
    Contract(
        f"{_EXTEND}:extend_attention_fwd",
        (
            "q_extend", "k_extend", "v_extend", "o_extend", "k_buffer", "v_buffer", "qo_indptr", "kv_indptr", "kv_indices", "custom_mask",
            "is_causal", "mask_indptr", "max_len_extend", "k_scale", "v_scale", "sm_scale", "logit_cap", "sliding_window_size", "sinks",
            "window_kv_offsets", "xai_temperature_len", "page_size", "score_mod", "aux_tensors",
        ),
        in_order=16,
    ),
    Contract(f"{_DECODE}:decode_attention_fwd", translate.DECODE_PARAMETERS, in_order=len(translate.DECODE_PARAMETERS)),
    Contract(f"{_MODE}.is_target_verify"),
    Contract(f"{_MODE}.is_draft_extend_v2"),
    Contract(f"{_MODE}.is_decode"),
)  # fmt: skip


def hook(modes: tuple[str, ...]) -> tuple[Hook, ...]:
    """Hook the backend, for these forward modes."""
    extend, hooks = tuple(mode for mode in modes if mode != "draft_decode"), []
    if extend:
        why = f"{' and '.join(serve.MODES[mode][1] for mode in extend)} go to FlashMap's op"
        hooks.append(wrap(f"{MODULE}:TritonAttnBackend.forward_extend", functools.partial(forward_extend, extend), why))
    if "draft_decode" in modes:
        hooks.append(wrap(f"{MODULE}:TritonAttnBackend.forward_decode", forward_decode, "a drafter's decoding goes to FlashMap's op"))
    why = "scratch for the largest graph is taken before capture"
    hooks.append(wrap(f"{MODULE}:TritonAttnBackend.init_cuda_graph_state", init_cuda_graph_state, why))
    return tuple(hooks)


@torch.compiler.disable
def forward_extend(
    modes: tuple[str, ...], original: Any, self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """SGLang's ``forward_extend`` around our kernel, where the batch is one of verification."""
    engine = functools.partial(original, self, q, k, v, layer, forward_batch, *args, **kwargs)
    role = serve.role(forward_batch.forward_mode, modes)
    return engine() if role is None else _around(engine, "extend_attention_fwd", _Extend, self, layer, forward_batch, role)


def forward_decode(original: Any, self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's ``forward_decode`` around our kernel, where a drafter decodes: its instances alone have no prefill.

    Not hidden from torch.compile as a whole, for a target's decoding, which SGLang may compile, comes through here too.
    """
    engine = functools.partial(original, self, q, k, v, layer, forward_batch, *args, **kwargs)
    role = serve.role(forward_batch.forward_mode, ("draft_decode",)) if self.skip_prefill else None
    return engine() if role is None else _around(engine, "decode_attention_fwd", _Decode, self, layer, forward_batch, role)


@torch.compiler.disable
def _around(engine: Callable[[], Any], name: str, ours: type[_Kernel], backend: Any, layer: Any, forward_batch: Any, role: str) -> Any:
    """``engine()`` with ``ours`` in the place of the backend's kernel ``name``."""
    code = _backend_reason(backend)
    if code is not None:
        serve.left(KERNEL, role, code)
        return engine()
    theirs = getattr(backend, name)
    kernel = ours(theirs, backend, layer, forward_batch, role)
    setattr(backend, name, kernel)
    try:
        done = engine()
    finally:
        setattr(backend, name, theirs)
    if not kernel.reached:
        serve.left(KERNEL, role, "not_reached", f"this call ran another kernel than {name}")
    return done


def init_cuda_graph_state(original: Any, self: Any, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any) -> Any:
    """Keeps the maxima, and with FLASHMAP_SGLANG_QLEN_MASK has SGLang's tree kernel write each request's L x L block alone."""
    done = original(self, max_bs, max_num_tokens, *args, **kwargs)
    serve.remember_limits(self, max_num_tokens if self.skip_prefill else max_bs)
    if env.get("FLASHMAP_SGLANG_QLEN_MASK"):
        _keep_trees_alone(self)
    return done


def _backend_reason(backend: Any) -> str | None:
    """Why no call of this instance is one for the op: a code, or None."""
    if backend.enable_deterministic:
        return "deterministic"
    return "dcp" if backend.dcp_size > 1 else None


class _Kernel:
    """A kernel of the backend for one call: the engine's signature, the op or the engine's kernel."""

    def __init__(self, engine: Any, backend: Any, layer: Any, forward_batch: Any, role: str) -> None:
        self._engine, self._backend, self._layer, self._forward_batch, self._role = engine, backend, layer, forward_batch, role
        self.reached = False

    def _attend(self, batch: Batch | str, out: torch.Tensor, engine: Callable[[torch.Tensor], object] | None) -> bool:
        """Whether ``out`` is the op's. ``engine``: the engine's kernel, for what it would write elsewhere, where it can be asked."""
        if serve.attend(batch, KERNEL, self._role, self._backend, out) is None:
            return False
        if engine is not None and serve.checking(out.device):
            theirs = torch.empty_like(out)
            engine(theirs)
            serve.compare(self._layer, self._role, out, theirs)
        return True


class _Decode(_Kernel):
    """``decode_attention_fwd``: each token is a request of one, the last of its key list."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.reached = True
        if len(args) > len(translate.DECODE_PARAMETERS):
            serve.left(KERNEL, self._role, "argument", "more arguments by position than are known")
            self._engine(*args, **kwargs)
            return
        call = dict(zip(translate.DECODE_PARAMETERS, args, strict=False)) | kwargs

        def engine(into: torch.Tensor) -> None:
            self._engine(**call | {"o": into})

        q, out = call["q"], call["o"]
        if not self._attend(translate.decode(call, _one_each(q.shape[0], q.device)), out, engine):
            engine(out)


_counted: dict[torch.device, list[torch.Tensor]] = {}


def _one_each(count: int, device: torch.device) -> torch.Tensor:
    """int32 [count + 1]: 0, 1, 2 ..., made before a capture or in it, for a graph would not repeat what ran before.

    Captured graphs point at what they were given for ever: a longer one is put beside it, and none is freed.
    """
    known = _counted.setdefault(device, [])
    if known and known[-1].numel() > count:
        return known[-1][: count + 1]
    made = torch.arange(max(count + 1, 1024), dtype=torch.int32, device=device)
    if not DeviceInfo.of(device).capturing:
        known.append(made)
    return made[: count + 1]


class _Extend(_Kernel):
    """``extend_attention_fwd``."""

    def __call__(
        self,
        q_extend: torch.Tensor,
        k_extend: torch.Tensor,
        v_extend: torch.Tensor,
        o_extend: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor | None,
        custom_mask: torch.Tensor | None,
        is_causal: bool,
        mask_indptr: torch.Tensor | None,
        max_len_extend: int,
        k_scale: float,
        v_scale: float,
        sm_scale: float | None = None,
        *,
        logit_cap: float = 0.0,
        sliding_window_size: int = -1,
        sinks: torch.Tensor | None = None,
        window_kv_offsets: torch.Tensor | None = None,
        xai_temperature_len: int = -1,
        page_size: int = 1,
        score_mod: Any = None,
        aux_tensors: Any = None,
        extend_seq_lens_cpu: Any = None,
        **other: Any,
    ) -> None:
        self.reached = True

        def engine(into: torch.Tensor) -> None:
            more = {} if extend_seq_lens_cpu is None else {"extend_seq_lens_cpu": extend_seq_lens_cpu}  # 0.5.23 and later
            self._engine(
                q_extend, k_extend, v_extend, into, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, custom_mask, is_causal,
                mask_indptr, max_len_extend, k_scale, v_scale, sm_scale, logit_cap=logit_cap, sliding_window_size=sliding_window_size,
                sinks=sinks, window_kv_offsets=window_kv_offsets, xai_temperature_len=xai_temperature_len, page_size=page_size,
                score_mod=score_mod, aux_tensors=aux_tensors, **more, **other,
            )  # fmt: skip

        qlen = _trees_alone(self._backend) and custom_mask is not None
        batch = translate.extend(
            translate.Extend(
                q_extend, k_extend, v_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, custom_mask, is_causal, mask_indptr,
                max_len_extend, k_scale, v_scale, sm_scale, logit_cap, sliding_window_size, sinks, window_kv_offsets, xai_temperature_len,
                score_mod, other,
            ),
            chain=self._backend.topk == 1,
            mask_layout="qlen" if qlen else "full",
            positions=self._forward_batch.positions,
        )  # fmt: skip
        if self._attend(batch, o_extend, None if qlen else engine):
            return
        if qlen:
            raise RuntimeError(
                "unset FLASHMAP_SGLANG_QLEN_MASK: this verify batch cannot go to FlashMap's op (the log says why), and its masks are in the "
                f"layout QLEN_ONLY, while SGLang's triton kernel reads FULL_MASK ({self._role}, layer {self._layer.layer_id})"
            )
        engine(o_extend)


# -- QLEN_ONLY ----------------------------------------------------------------------------------------------------------


def _trees_alone(backend: Any) -> bool:
    """Whether the masks of this backend are L x L blocks. SGLang's workers take the layout from the backend's mask."""
    mask = getattr(backend, "_verify_mask", None)
    return mask is not None and mask.mode.name == "QLEN_ONLY"


def _keep_trees_alone(backend: Any) -> None:
    """Give a target's backend a mask buffer in the layout QLEN_ONLY in place of FULL_MASK: max_bs * ND * ctx bytes less, and not filled each step.

    Only where the drafting worker asks the backend for the layout (NGRAM does not), and where no call can be one for SGLang's own kernel
    because of the backend.
    """
    mask, why = getattr(backend, "_verify_mask", None), _backend_reason(backend)
    if mask is None or mask.mode.name != "FULL_MASK":
        return  # a draft runner's, or nothing that verifies
    from sglang.srt.runtime_context import get_spec

    algorithm = str(get_spec().speculative_algorithm)
    if why is not None or algorithm not in _ASKS:
        text = f"FLASHMAP_SGLANG_QLEN_MASK does nothing here: {why or f'the algorithm {algorithm} writes FULL_MASK'}"
        serve.tell(logging.WARNING, KERNEL, serve.MODES["target_verify"][1], "qlen", text)
        return
    # Not width * width alone: at capture the runner copies a mask of its own into it, over as many keys as that has.
    width = backend.num_draft_tokens
    cells = width * (width + backend.get_cuda_graph_seq_len_fill_value())
    backend._verify_mask = type(mask)(
        buffer=mask.buffer.new_zeros(mask.max_bs * cells), mode=type(mask.mode).QLEN_ONLY, max_bs=mask.max_bs, is_read=True
    )


_ASKS = ("EAGLE", "EAGLE3", "STANDALONE", "NEXTN")
