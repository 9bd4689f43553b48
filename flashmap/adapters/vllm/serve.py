"""What the backends of this adapter share: who serves, up to which query length, and what a builder has to say of it.

A backend of ours is two of vLLM's classes with a mixin in front: dense.py or latent.py for the implementation, ``Builder``
here for the metadata builder. Nothing here imports vLLM at its head: vLLM's classes come from the modules of the backends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from flashmap.adapters.patching import strict
from flashmap.adapters.serving import Serving
from flashmap.adapters.vllm import translate
from flashmap.core import dispatch
from flashmap.core.request import DeviceInfo, Limits, VerifyRequest

logger = logging.getLogger(__name__)
SERVING = Serving("vllm", "vLLM")
ROLE = "verify"
Parent: Any = object  # what a mixin takes for vLLM's class


def left(kernel: str, code: str) -> None:
    """vLLM's kernel keeps a call. What is no verification is no news."""
    SERVING.left(kernel, ROLE, code, level=logging.DEBUG if code in ("decode", "prefill", "metadata") else logging.INFO)


def layer_name(layer: Any) -> str:
    return getattr(layer, "layer_name", None) or type(layer).__name__


def missing_attributes(impl: Any, names: Iterable[str], kernel: str) -> tuple[str, ...]:
    """Attributes that we rely on and a made implementation lacks, with one WARNING that names them."""
    missing = tuple(name for name in names if not hasattr(impl, name))
    if missing:
        SERVING.tell(logging.WARNING, kernel, ROLE, "contract", f"left to vLLM: its implementation has no {', '.join(missing)}")
    return missing


class Builder(Parent):
    """Mixin for metadata builders: takes what calls need before graphs are captured, and declares the graphs that we can be in."""

    flashmap_impl: ClassVar[Any]  # our implementation, whose layers are asked

    def __init__(
        self, kv_cache_spec: Any, layer_names: Sequence[str], vllm_config: Any, device: torch.device, *args: Any, **kwargs: Any
    ) -> None:
        impls = self._flashmap_impls(vllm_config, layer_names)
        lengths = translate.lengths(vllm_config.speculative_config)
        ours = self._flashmap_serves(vllm_config, kv_cache_spec, device, impls)
        self.flashmap_before(vllm_config, ours)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, *args, **kwargs)
        for impl in impls:
            impl.flashmap_built(lengths, self.reorder_batch_threshold, vllm_config)
        if not ours:
            return
        try:
            self._flashmap_prepare(vllm_config, kv_cache_spec, device, impls, lengths)
        except Exception as error:  # while the engine starts: it goes on with its own kernels
            if strict():
                raise
            for impl in impls:
                impl.flashmap_missing = ("prepared kernels",)
            text = f"left to vLLM: preparing failed ({type(error).__name__}: {error})"
            SERVING.tell(logging.WARNING, impls[0].flashmap_kernel, ROLE, "prepare", text)

    def flashmap_before(self, vllm_config: Any, ours: bool) -> None:
        """Called before vLLM's ``__init__``; ``ours``: verify batches of these layers go to the op."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Where verify batches are ours: batches of one query length, whose rows and bound are known at capture.

        In place of ALWAYS, by which a graph that was captured with one token a request is replayed for verify batches, and of less.
        """
        theirs = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        impls = cls._flashmap_impls(vllm_config)
        return type(theirs).UNIFORM_BATCH if cls._flashmap_serves(vllm_config, kv_cache_spec, _here(), impls) else theirs

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """0.33: a captured call of ours reads each request's length on the device, up to that of a verify batch."""
        impls = cls._flashmap_impls(vllm_config)
        if cls._flashmap_serves(vllm_config, kv_cache_spec, _here(), impls, vllm_config.scheduler_config.max_num_seqs):
            return translate.lengths(vllm_config.speculative_config)[0]
        theirs = getattr(super(), "get_varlen_cudagraph_max_query_len", None)
        return None if theirs is None else theirs(vllm_config, kv_cache_spec)  # 0.26 does not ask

    @classmethod
    def _flashmap_impls(cls, vllm_config: Any, names: Iterable[str] | None = None) -> list[Any]:
        """Our implementations among the layers."""
        layers = vllm_config.compilation_config.static_forward_context
        found = [getattr(layers.get(name), "impl", None) for name in (layers if names is None else names)]
        return [impl for impl in found if isinstance(impl, cls.flashmap_impl) and not impl.flashmap_missing]

    @classmethod
    def _flashmap_serves(cls, vllm_config: Any, spec: Any, device: torch.device, impls: list[Any], requests: int = 1) -> bool:
        """Whether verify batches of ``requests`` requests go to the op in all of these layers."""
        lengths = translate.lengths(vllm_config.speculative_config)
        if not lengths or not impls or vllm_config.parallel_config.decode_context_parallel_size > 1:
            return False
        return all(_winner(impl, request, device) for impl, request in _requests(impls, vllm_config, spec, lengths[:1], requests))

    @classmethod
    def _flashmap_prepare(cls, vllm_config: Any, spec: Any, device: torch.device, impls: list[Any], lengths: tuple[int, ...]) -> None:
        """Compile and take scratch: each implementation that serves some size of batch, for the largest that it does."""
        most, keys = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len
        for impl, request in _requests(impls, vllm_config, spec, lengths, most):
            sizes = {_winner(impl, replace(request, num_requests=n), device): n for n in range(1, most + 1)}
            for winner, requests in sizes.items():
                if winner is not None:
                    limits = Limits(requests, request.max_query_len, keys)
                    SERVING.prepare(replace(request, num_requests=requests), limits, device, winner)


def _requests(impls: list[Any], vllm_config: Any, spec: Any, lengths: tuple[int, ...], requests: int) -> list[tuple[Any, VerifyRequest]]:
    """Verify batches of these layers, one of each kind."""
    keys = vllm_config.model_config.max_model_len
    found: dict[VerifyRequest, Any] = {}
    for impl in impls:
        for length in lengths:
            request = impl.flashmap_request(vllm_config.model_config.dtype, requests, length, spec.block_size, keys)
            found.setdefault(request, impl)
    return [(impl, request) for request, impl in found.items()]


def _winner(impl: Any, request: VerifyRequest, device: torch.device) -> str | None:
    return dispatch.route(request, DeviceInfo.of(device), impl.flashmap_kernel).winner


def _here() -> torch.device:
    """Where vLLM's worker runs: a builder's class is asked without a device."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
