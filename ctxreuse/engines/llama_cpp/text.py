"""The text side of a GGUF: the tokenizer that llama.cpp builds from it, and its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from ctxreuse.constrain.vocabulary import Vocabulary
from ctxreuse.engines.llama_cpp.library import LlamaLibrary, LlamaModel
from ctxreuse.engines.text import HFText
from ctxreuse.errors import EngineError
from ctxreuse.identity.keys import Tokens
from ctxreuse.models.gguf_head import check_head

__all__ = ["LlamaText", "open_text", "read_text"]

#: llama.cpp's number of "no vocabulary".
_NONE = 0


def read_text(file: Path) -> LlamaText | None:
    """Return the text model of a GGUF file; raises what opening its model raises."""
    check_head(file, distinct="tokenizer.ggml.tokens")
    return open_text(LlamaModel(LlamaLibrary.open(""), file))


def open_text(model: LlamaModel) -> LlamaText | None:
    """The text model of a GGUF; None if it has no vocabulary."""
    return LlamaText(model) if model.library.calls.llama_vocab_type(model.vocab) != _NONE else None


class LlamaText(HFText):
    """See `ctxreuse.engines.text.TextModel`; messages are rendered as those of a Hugging Face folder."""

    def __init__(self, model: LlamaModel) -> None:
        calls, vocab = model.library.calls, model.vocab
        self._model, self._calls, self._vocab = model, calls, vocab
        ids = range(model.vocab_size)
        names = {"bos_token": calls.llama_vocab_bos(vocab), "eos_token": calls.llama_vocab_eos(vocab)}
        template = calls.llama_model_chat_template(model.handle, None)
        super().__init__(
            None,
            template=template.decode("utf-8", "replace") if template else None,
            specials={name: self._name(i) for name, i in names.items() if i >= 0},
            stop_ids=frozenset(i for i in ids if calls.llama_vocab_is_eog(vocab, i)),
        )

    def _name(self, token: int) -> str:
        return str(self._calls.llama_vocab_get_text(self._vocab, token).decode("utf-8", "replace"))

    @cached_property
    def markers(self) -> frozenset[str]:
        """See `TextModel.markers`."""
        ids = range(self._model.vocab_size)
        return frozenset(self._name(i) for i in ids if self._calls.llama_vocab_is_control(self._vocab, i))

    def vocabulary(self) -> Vocabulary:
        """See `ctxreuse.constrain.HasVocabulary`."""
        tokens, special = [], []
        room = 1 << 12
        piece, calls, vocab = np.empty(room, np.uint8), self._calls, self._vocab
        at, data = piece.ctypes.data, piece.data
        for i in range(self._model.vocab_size):
            tokens.append(bytes(data[: max(calls.llama_token_to_piece(vocab, i, at, room, 0, True), 0)]))
            if calls.llama_vocab_is_control(vocab, i):
                special.append(i)
        return Vocabulary(tokens, special)

    @property
    def token_chars(self) -> int:
        """See `TextModel.token_chars`: llama.cpp tells of no bound."""
        return 0

    def encode(self, text: str, *, markers: bool = True) -> Tokens:
        """See `TextModel.encode`. Raises EngineError for a text that is not valid Unicode."""
        try:
            raw = text.encode()
        except UnicodeError as error:
            raise EngineError(f"the text cannot be tokenised: {error}", fix="Remove lone surrogates") from error
        ids = np.empty(len(raw) + 8, "<i4")
        count = self._calls.llama_tokenize(self._vocab, raw, len(raw), ids.ctypes.data, len(ids), False, markers)
        if count < 0:
            raise EngineError(f"llama.cpp makes {-count} tokens of {len(raw)} bytes")
        return ids[:count].copy()

    def decode(self, ids: Sequence[int] | Tokens, *, markers: bool = False) -> str:
        """See `TextModel.decode`; with ``markers`` special tokens are spelt out."""
        given = np.ascontiguousarray(ids, "<i4")
        text = np.empty(64 + 16 * len(given), np.uint8)
        while True:
            count = self._calls.llama_detokenize(
                self._vocab, given.ctypes.data, len(given), text.ctypes.data, len(text), False, markers
            )
            if count >= 0:
                return text[:count].tobytes().decode("utf-8", "replace")
            text = np.empty(-count, np.uint8)

    @cached_property
    def _begin(self) -> str:
        return self._specials.get("bos_token", "") if self._calls.llama_vocab_get_add_bos(self._vocab) else ""
