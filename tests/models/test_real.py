"""The real models: fetched into the user's cache once, fluent, and exactly the pinned weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxreuse import models
from ctxreuse.models import cache

# Written for this test.
PARAGRAPH = """The ferry left the harbour at half past six, when the fog was still lying on the water and the gulls had
not yet begun to quarrel over the nets. Anna stood at the rail with her collar turned up and counted the buoys as they
went by. She had made this crossing every Monday for eleven years, first as a pupil, then as a teacher, and she knew the
captain well enough to tell from the sound of the engine whether he had slept. Today he had not. The boat shuddered
twice before it found its rhythm, and an old man beside her laughed and said that it was only clearing its throat. On
the island the school would be cold until noon, because the caretaker refused to light the stove before the children
had arrived; heat, he liked to say, was wasted on empty chairs. She thought about the lesson she would give, about the
tides and the moon, and about the boy in the second row who always asked why the sea did not simply run out."""


def load(folder: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def perplexity(model: Any, tokenizer: Any) -> float:
    tokens = tokenizer(PARAGRAPH.replace("\n", " "), return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        return float(model(tokens, labels=tokens).loss.exp())


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    return load(models.get("smollm2", progress=False))


@pytest.mark.model
def test_smollm2_has_the_known_digests() -> None:
    folder = models.get("smollm2", progress=False)
    card = cache.record_of(folder)
    assert card is not None
    # Conversion is exact arithmetic in a fixed order: these hold on every machine.
    assert models.weights_digest(folder) == "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
    assert models.resolve("smollm2") == folder


@pytest.mark.model
def test_smollm2_is_fluent(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    assert 5 < perplexity(model, tokenizer) < 60
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == tokenizer.eos_token_id  # it stops by itself: the end token is right, too


@pytest.mark.model
def test_smollm2_splits_as_llama_cpp_does() -> None:
    tokenizer = Tokenizer.from_file(str(models.get("smollm2", progress=False) / "tokenizer.json"))
    text = "In 1839,\n\n  42 sailors & 7   dogs: x = 10**3\n\t 1.5 é 漢字"
    assert tokenizer.encode(text).tokens[:10] == ["In", "Ġ", "1", "8", "3", "9", ",", "ĊĊĠĠ", "4", "2"]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.gemma
def test_gemma_is_fluent_past_its_window_layers() -> None:
    folder = models.get("gemma3-270m", progress=False)
    assert models.weights_digest(folder) == "993d1a3640771c62ebdcdb15b7042ee3abdb28aa0b64dcc892e58c1cd9aec5c4"
    assert (folder / "GEMMA_TERMS.html").is_file()
    model, tokenizer = load(folder)
    assert [n for n, kind in enumerate(model.config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert 5 < perplexity(model, tokenizer) < 60
    assert tokenizer.chat_template is None
    text = "In 1839,\n\n  42 sailors & 7   dogs: 漢字 <div>\U0001f9ff  ok"
    tokens = tokenizer(text)["input_ids"]
    assert tokens[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokens[1:]) == text
