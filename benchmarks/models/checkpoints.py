"""Model folders as vLLM and sglang load them: config.json, model.safetensors, and a tokenizer whose token ids are byte values.

`save` writes them, `load_target` and `load_drafter` read them back into `architecture.py`'s modules.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .architecture import MTP, POSITIONS, DeepSeek, Drafter, Eagle, Eagle3, Llama, Target
from .data import BOS, EOS

HERE = Path(__file__).resolve().parent
# The drafter's folder is the target's where it is an MTP layer.
DEEPSEEK, LLAMA, EAGLE, EAGLE_SGLANG, EAGLE3 = (
    "deepseek_v3_tiny",
    "llama_tiny",
    "llama_tiny_eagle",
    "llama_tiny_eagle_sglang",
    "llama_tiny_eagle3",
)
_TARGETS = {DEEPSEEK: DeepSeek, LLAMA: Llama}
_DRAFTERS: dict[str, type[Drafter]] = {DEEPSEEK: MTP, EAGLE: Eagle, EAGLE3: Eagle3}


def save(target: Target, drafters: list[Drafter], folder: Path) -> list[Path]:
    """Write a target and its drafters below ``folder``; the folders that were written."""
    weights = dict(target.state_dict())
    config = target.shape.config()
    written = []
    for drafter in drafters:
        found = dict(drafter.state_dict())
        if isinstance(drafter, MTP):
            layer = f"model.layers.{target.shape.num_hidden_layers}."
            copies = {"embed_tokens.weight": weights["model.embed_tokens.weight"], "shared_head.head.weight": weights["lm_head.weight"]}
            weights |= {layer + name: value for name, value in (found | copies).items()}
            continue
        shape = {**config, "num_hidden_layers": 1}
        if isinstance(drafter, Eagle3):
            changes = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config["vocab_size"]}
            written.append(_write(folder / EAGLE3, {**shape, **changes}, found))
        else:
            written.append(_write(folder / EAGLE, shape, found))
            # sglang names the class in the config, and its fc has a bias.
            found["fc.bias"] = torch.zeros_like(found["fc.weight"][:, 0])
            written.append(_write(folder / EAGLE_SGLANG, {**shape, "architectures": ["LlamaForCausalLMEagle"]}, found))
    return [_write(folder / (LLAMA if isinstance(target.shape, Llama) else DEEPSEEK), config, weights), *written]


def load_target(name: str, folder: Path = HERE) -> Target:
    """The target in ``folder``/``name``, in fp32, in evaluation mode."""
    target = Target(_TARGETS[name]())
    weights = load_file(folder / name / "model.safetensors")
    target.load_state_dict({key: weights[key] for key in target.state_dict()})
    return target.eval()


def load_drafter(name: str, target: Target, folder: Path = HERE) -> Drafter:
    """The drafter in ``folder``/``name`` (for MTP the target's own folder), in fp32, in evaluation mode."""
    drafter = _DRAFTERS[name](target)
    weights = load_file(folder / name / "model.safetensors")
    layer = f"model.layers.{target.shape.num_hidden_layers}." if isinstance(drafter, MTP) else ""
    drafter.load_state_dict({key: weights[layer + key] for key in drafter.state_dict()})
    return drafter.eval()


def _write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name, content in _tokenizer().items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    stored = {}
    for name, value in weights.items():
        kind = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16  # as in DeepSeek's own checkpoints
        stored[name] = value.detach().to("cpu", kind).clone(memory_format=torch.contiguous_format)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tokenizer() -> dict[str, Any]:
    """A byte-level tokenizer without merges: token id = byte value, and the two specials."""
    # GPT-2's way to write a byte as a visible character: printable Latin-1 stands for itself, the others follow from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    character = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    specials = {BOS: "<|file|>", EOS: "<|end|>"}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": i, "content": text, **flags} for i, text in specials.items()],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": {"type": "BPE", "vocab": {character[byte]: byte for byte in range(256)}, "merges": []},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": specials[BOS],
            "eos_token": specials[EOS],
            "model_max_length": POSITIONS,
            "clean_up_tokenization_spaces": False,
        },
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS},
    }
