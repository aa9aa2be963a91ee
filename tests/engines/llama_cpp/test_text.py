"""Text of real GGUF files: the ids and prompts that transformers makes for the same model."""

from __future__ import annotations

import numpy as np
import pytest

from ctxreuse import models
from ctxreuse.engines.detokenize import Detokenizer
from ctxreuse.engines.llama_cpp.library import LlamaLibrary, LlamaModel
from ctxreuse.engines.llama_cpp.text import LlamaText, open_text
from ctxreuse.engines.text import Message

TEXTS = (
    "",
    " ",
    "The quick brown fox, jumps over 12,345 lazy dogs!",
    "  two blanks, then a tab:\t and\n\n\nthree lines  \n   ",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": x**2}  # done\n",
    "Das Öl, für 3 €; naïve façade — ‘quoted’ … e\u0301 (decomposed)",
    "Привет, мир! Сколько 42?",
    "你好,世界。これは日本語です。 한국어도 됩니다.",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया ภาษาไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0001f9ff",
    "https://example.com/?q=a&b=%20c#d <div class='x'>&amp;</div>",
    "\x00\x01\x7f\u200b\ufeff\u00a0",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 4,
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <bos><eos><start_of_turn>user\n<end_of_turn>",
)
CHATS = (
    [("user", "Hello")],
    [("system", "Be brief."), ("user", " Hello \n"), ("assistant", "Hi!"), ("user", "Wie geht's?")],
    [("user", "a"), ("assistant", ""), ("user", "<|im_end|> in a text")],
)


def text_of(name: str) -> LlamaText:
    text = open_text(LlamaModel(LlamaLibrary.open(""), models.get_gguf(name, progress=False)))
    assert text is not None
    return text


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2", pytest.param("gemma3-270m", marks=pytest.mark.gemma)])
def test_ids_are_those_of_transformers(name: str) -> None:
    from transformers import AutoTokenizer

    ours, theirs = text_of(name), AutoTokenizer.from_pretrained(models.get(name, progress=False))
    for given in TEXTS:
        ids = theirs.encode(given, add_special_tokens=False)
        assert ours.encode(given).tolist() == ids, given
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), given
        assert ours.decode(ids, markers=True) == theirs.decode(ids), given
        pieces = Detokenizer(ours)
        assert "".join([*map(pieces.add, ids), pieces.flush()]) == ours.decode(ids), given
    assert ours.markers >= set(theirs.all_special_tokens)
    assert theirs.eos_token_id in ours.stop_ids


@pytest.mark.model
def test_prompts_are_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    ours, theirs = text_of("smollm2"), AutoTokenizer.from_pretrained(models.get("smollm2", progress=False))
    for chat in CHATS:
        for generate in (False, True):
            prompt = ours.render([Message(*turn) for turn in chat], generate=generate)
            plain = [{"role": role, "content": content} for role, content in chat]
            assert prompt == theirs.apply_chat_template(plain, tokenize=False, add_generation_prompt=generate)
            ids = theirs.apply_chat_template(plain, add_generation_prompt=generate, return_dict=True)["input_ids"]
            assert np.array_equal(ours.encode(prompt), ids)
