"""The text side of a model whose engine runs in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import msgspec
import numpy as np

from ctxreuse.constrain.vocabulary import Vocabulary
from ctxreuse.engines.pieces import TokenPieces
from ctxreuse.engines.process.connection import Result
from ctxreuse.engines.process.wire import TextFacts
from ctxreuse.engines.text import Message
from ctxreuse.errors import EngineError
from ctxreuse.identity.keys import Tokens

__all__ = ["ChildText"]

#: Texts of so few ids are remembered, and so many of them, until their pieces are here. Each token of an answer needs
#: those of itself, and of itself and the one before; asking for both each time took as long as the rest of what a token
#: costs beside computing it.
_FEW, _REMEMBERED = 4, 1 << 13


class ChildText:
    """See `ctxreuse.engines.text.TextModel`. Each call is one of the process that has the tokenizer.

    But to decode is none once the pieces of all ids are here, if they can be joined.
    """

    def __init__(self, facts: TextFacts, call: Callable[..., Result]) -> None:
        self._facts, self._call = facts, call
        self._remembered = lru_cache(_REMEMBERED)(self._decode)
        self._once = threading.Lock()
        self._pieces: TokenPieces | None = None

    @property
    def stop_ids(self) -> frozenset[int]:
        """See `TextModel.stop_ids`."""
        return self._facts.stop_ids

    @property
    def markers(self) -> frozenset[str]:
        """See `TextModel.markers`."""
        return self._facts.markers

    @property
    def token_chars(self) -> int:
        """See `TextModel.token_chars`."""
        return self._facts.token_chars

    def vocabulary(self) -> Vocabulary:
        """See `ctxreuse.constrain.HasVocabulary`."""
        found = self._call("vocabulary").arrays
        text, ends, special = found[0].tobytes(), found[1].tolist(), found[2].tolist()
        return Vocabulary([text[start:end] for start, end in pairwise([0, *ends])], special)

    def encode(self, text: str, *, markers: bool = True) -> Tokens:
        """See `TextModel.encode`. Raises EngineError for a text that is not valid Unicode."""
        try:
            raw = np.frombuffer(text.encode(), np.uint8)
        except UnicodeError as error:
            raise EngineError(f"the text cannot be tokenised: {error}", fix="Remove lone surrogates") from error
        ids: Tokens = self._call("encode", markers, arrays=[raw], room=4 * raw.nbytes).arrays[0]
        return ids

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        """See `TextModel.decode`."""
        self.prepare()
        given = np.asarray(ids, "<i4")
        joined = None if self._pieces is None else self._pieces.decode(given.tolist())
        if joined is not None:
            return joined
        return self._remembered(*given.tolist()) if len(given) <= _FEW else self._decode(*given.tolist())

    def prepare(self) -> None:
        """Have the pieces fetched, unless they are here or on their way; returns at once.

        Fetched beside the first answer they delay its tokens, and those of all others, by half a second.
        """
        if self._pieces is None and self._once.acquire(blocking=False):  # asked for until it is answered
            threading.Thread(target=self._fetch_pieces, name="engine-pieces", daemon=True).start()

    def _fetch_pieces(self) -> None:
        try:
            found = self._call("pieces", again=False).arrays  # nobody waits: a process that was unloaded stays so
        except EngineError:
            self._once.release()
            return
        if found:
            self._pieces = TokenPieces(found[0].tobytes(), found[1])

    def _decode(self, *ids: int) -> str:
        return self._call("decode", arrays=[np.array(ids, "<i4")]).arrays[0].tobytes().decode()

    @property
    def template(self) -> str:
        """The chat template; "" without one."""
        return self._facts.template

    def render(self, messages: Sequence[Message], *, generate: bool, tools: Sequence[str] = ()) -> str:
        """See `TextModel.render`."""
        try:
            raw = np.frombuffer(msgspec.msgpack.encode((messages, tools)), np.uint8)
        except UnicodeError as error:
            raise EngineError(f"the text cannot be rendered: {error}", fix="Remove lone surrogates") from error
        return self._call("render", generate, arrays=[raw]).arrays[0].tobytes().decode()
