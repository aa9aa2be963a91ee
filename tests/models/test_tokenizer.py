"""The tokenizer built from a GGUF splits as the model was trained and gives every text back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ctxreuse.errors import FormatError
from ctxreuse.models import gguf


@pytest.fixture(scope="module")
def llama_folder(llama_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    gguf.convert(llama_gguf, folder)
    return folder


@pytest.fixture(scope="module")
def gemma_folder(gemma_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    gguf.convert(gemma_gguf, folder)
    return folder


@pytest.fixture(scope="module")
def byte_level(llama_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(llama_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def pieces(gemma_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(gemma_folder / "tokenizer.json"))


def test_each_digit_is_split_off_before_blanks_are_joined(byte_level: Tokenizer) -> None:
    # Without the digit split the blanks before 42 come out as one blank and " 4".
    assert byte_level.encode("  42").tokens == ["ĠĠ", "4", "2"]
    assert byte_level.encode("\n\n1.").tokens == ["ĊĊ", "1", "."]
    assert byte_level.encode(" the the").tokens == ["Ġthe", "Ġthe"]


def test_special_tokens_stay_whole(byte_level: Tokenizer, pieces: Tokenizer) -> None:
    assert byte_level.encode("<|im_start|>a").ids[0] == 1
    assert byte_level.decode([1, 2], skip_special_tokens=True) == ""
    assert pieces.encode("a<eos>", add_special_tokens=False).ids[-1] == 1


def test_user_defined_runs_come_before_merges(pieces: Tokenizer) -> None:
    encoded = pieces.encode("  the the\n\n\n", add_special_tokens=False).tokens
    assert encoded == ["  ", "t", "he", "▁the", "\n\n", "\n"]


def test_begin_of_text_only_where_the_model_wants_it(byte_level: Tokenizer, pieces: Tokenizer) -> None:
    assert pieces.encode("a").ids[0] == 2
    assert byte_level.encode("a").tokens == ["a"]


@given(st.text(max_size=60))
def test_byte_level_gives_every_text_back(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text).ids, skip_special_tokens=False) == text


# SentencePiece itself maps U+2581 and the blank to one letter, so that letter cannot come back.
@given(st.text(st.characters(exclude_characters="▁", exclude_categories=("Cs",)), max_size=60))
def test_pieces_give_every_text_back(pieces: Tokenizer, text: str) -> None:
    encoded = pieces.encode(text, add_special_tokens=False)
    assert pieces.decode(encoded.ids, skip_special_tokens=False) == text
    assert "<unk>" not in encoded.tokens


def test_transformers_opens_the_folder(llama_folder: Path, byte_level: Tokenizer, gemma_folder: Path) -> None:
    auto = AutoTokenizer.from_pretrained(llama_folder, local_files_only=True)
    fast = PreTrainedTokenizerFast.from_pretrained(llama_folder, local_files_only=True)
    text = "the 7   dogs\n\n 12 é"
    assert auto(text)["input_ids"] == fast(text)["input_ids"] == byte_level.encode(text).ids
    assert (auto.bos_token_id, auto.eos_token_id, auto.pad_token_id) == (1, 2, 2)
    assert auto.model_max_length == 128
    chat = auto.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    base = AutoTokenizer.from_pretrained(gemma_folder, local_files_only=True)
    assert base.chat_template is None
    assert base("a")["input_ids"][0] == base.bos_token_id == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer_pre": "qwen2"}, "not known"),
        ({"tokenizer_model": "bert"}, "not known"),
        ({"token_types": [1] * 5}, "do not match"),
        ({"eos_token_id": 5000}, "outside the vocabulary"),
        ({"token_merges": ["no such"]}, "merges do not fit"),
        ({"token_merges": ["Ġ t h", "h e"]}, "merges do not fit"),
        ({"token_merges": ["single"]}, "merges do not fit"),
    ],
)
def test_vocabularies_that_contradict_themselves_are_refused(
    tiny_llama: Any, forms: Any, make_gguf: Any, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = make_gguf(tmp_path / "v.gguf", "llama", tiny_llama[1], forms[0]() | change, {})
    with pytest.raises(FormatError, match=message):
        gguf.convert(path, tmp_path)


def test_doubled_tokens_and_missing_scores_are_refused(
    tiny_llama: Any, tiny_gemma: Any, forms: Any, make_gguf: Any, tmp_path: Path
) -> None:
    doubled = forms[0]()
    doubled["token_list"][10] = doubled["token_list"][11]
    with pytest.raises(FormatError, match="doubled"):
        gguf.convert(make_gguf(tmp_path / "d.gguf", "llama", tiny_llama[1], doubled, {}), tmp_path)
    scoreless = forms[1]()
    del scoreless["token_scores"]
    with pytest.raises(FormatError, match="no score"):
        gguf.convert(make_gguf(tmp_path / "s.gguf", "gemma3", tiny_gemma[1], scoreless, {}), tmp_path)
