"""The committed folders: their size, their tokenizer, what loading and saving make of them, and how well the targets predict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.models import data
from benchmarks.models.checkpoints import DEEPSEEK, EAGLE, EAGLE3, EAGLE_SGLANG, HERE, LLAMA, load_drafter, load_target, save
from benchmarks.models.train import held_out_bits

FOLDERS = (DEEPSEEK, LLAMA, EAGLE, EAGLE_SGLANG, EAGLE3)
FAMILIES = [(DEEPSEEK, (DEEPSEEK,)), (LLAMA, (EAGLE, EAGLE3))]


def test_all_of_them_together_are_small_and_in_bf16() -> None:
    assert sum(path.stat().st_size for name in FOLDERS for path in (HERE / name).iterdir()) <= 32 << 20
    for name in FOLDERS:
        kinds = {key.rsplit(".", 1)[-1]: value.dtype for key, value in load_file(HERE / name / "model.safetensors").items()}
        assert kinds.pop("e_score_correction_bias", torch.float32) == torch.float32
        assert set(kinds.values()) == {torch.bfloat16}


@pytest.mark.parametrize("name, drafters", FAMILIES)
def test_saving_what_was_loaded_gives_the_same_files(tmp_path: Path, name: str, drafters: tuple[str, ...]) -> None:
    target = load_target(name)
    written = save(target, [load_drafter(drafter, target) for drafter in drafters], tmp_path)
    assert {path.name for path in written} == {n for n in FOLDERS if n.startswith("llama") == name.startswith("llama")}
    for folder in written:
        for path in (HERE / folder.name).iterdir():
            if path.suffix == ".json":
                assert json.loads((folder / path.name).read_text()) == json.loads(path.read_text()), path
        own, again = (load_file(place / "model.safetensors") for place in (HERE / folder.name, folder))
        assert own.keys() == again.keys()
        assert all(torch.equal(own[key], again[key]) for key in own), folder.name


def test_sglangs_eagle_is_vllms_with_a_bias_of_zero() -> None:
    theirs, ours = (load_file(HERE / name / "model.safetensors") for name in (EAGLE_SGLANG, EAGLE))
    assert not theirs.pop("fc.bias").any()
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in ours)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_token_is_a_byte(name: str) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tests/vllm tests it with the engine's")
    tokenizer = tokenizers.Tokenizer.from_file(str(HERE / name / "tokenizer.json"))
    text = "def f(x):\n\treturn 'Grüße, 世界'  # \x00 \x7f\r\n"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.token_to_id("<|file|>") == data.BOS and tokenizer.token_to_id("<|end|>") == data.EOS


@pytest.fixture(scope="module")
def of_5_gram() -> float:
    return data.ngram_bits(5, sample=8 * 2048 + 1)


@pytest.mark.parametrize("name", [DEEPSEEK, LLAMA])
def test_a_target_predicts_held_out_text_better_than_a_5_gram(name: str, of_5_gram: float, record_property) -> None:
    """On the same 16,384 bytes, after the same training text (that of this Python's library)."""
    found = held_out_bits(load_target(name), windows=8)
    record_property("bits_per_byte", found)
    record_property("bits_per_byte_of_5_gram", of_5_gram)
    assert found < of_5_gram
