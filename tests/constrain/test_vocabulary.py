"""A vocabulary spells what its tokenizer encodes, whichever kind it is and wherever it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from ctxreuse.config import EngineConfig
from ctxreuse.engines.llama_cpp.text import read_text
from ctxreuse.engines.process import open_child_engine
from ctxreuse.engines.text import HFText
from support.tiny_gguf import write_tiny_gguf
from support.tiny_text import merging_text, tiny_text

TEXT = 'two\n\none {"größe": "🚀"}\t\x00'


def test_byte_level_tokens_are_their_bytes() -> None:
    for text in (tiny_text(), merging_text()):
        tokens, special = text.vocabulary()
        assert b"".join(tokens[i] for i in text.encode(TEXT)) == TEXT.encode()
        assert [tokens[i] for i in special] == [b"<|im_start|>", b"<|im_end|>"]


def test_blanks_and_bytes_of_the_other_kind_and_markers_that_are_text() -> None:
    words = ["<unk>", "\u2581the", "\u2581", "<0xF0>", "t"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokens, special = HFText(tokenizer).vocabulary()
    assert tokens == [b"<unk>", b" the", b" ", b"\xf0", b"t", b"<tool_call>", b"</s>"]
    assert special == [6]


def test_a_gguf_and_an_engine_in_its_own_process_tell_the_same(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    text = read_text(file)
    assert text is not None
    here = text.vocabulary()
    assert b"".join(here.tokens[i] for i in text.encode(TEXT)) == TEXT.encode()
    assert [here.tokens[i] for i in here.special] == [b"<|im_start|>", b"<|im_end|>"]
    child = open_child_engine(EngineConfig(str(file)))
    try:
        assert child.text is not None
        there = child.text.vocabulary()  # type: ignore[attr-defined]
    finally:
        child.close()
    assert (list(there.tokens), list(there.special)) == (list(here.tokens), list(here.special))


@pytest.mark.model
def test_a_real_vocabulary_is_the_same_from_both_files() -> None:
    from ctxreuse import models as catalog

    gguf = read_text(catalog.get_gguf("smollm2", progress=False))
    folder = HFText.open(catalog.get("smollm2", progress=False))
    assert gguf is not None
    assert folder is not None
    assert gguf.vocabulary() == folder.vocabulary()
