"""Log-probabilities of an answer's tokens as the OpenAI API gives them, for chats and for plain completions.

They are of the model's own distribution: the log-softmax of its logits, before biases, penalties and temperature.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import msgspec

from ctxreuse.constrain import HasVocabulary, Vocabulary
from ctxreuse.engines.generate import GeneratedToken

if TYPE_CHECKING:
    from ctxreuse.engines.scoring import TokenScores
    from ctxreuse.engines.text import TextModel

__all__ = [
    "ChatLogprobs",
    "CompletionLogprobs",
    "LogprobReporter",
    "PromptLogprob",
    "TokenLogprob",
    "TopLogprob",
    "mean_logprob",
    "spelling_of",
]

#: What stands for minus infinity, which JSON has no number for.
_LEAST = -9999.0

_spellings: WeakKeyDictionary[TextModel, Vocabulary] = WeakKeyDictionary()


class TopLogprob(msgspec.Struct, frozen=True):
    """A token: as text (U+FFFD for bytes that are no whole character), its log-probability, and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True):
    """A token of the answer, and the likeliest ones in its place, best first."""

    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The tokens of a chat's answer; the marker that ends it is none of them."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The tokens of a completion; ``text_offset``: characters of the choice's text before each. The first token of a
    prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def followed_by(self, other: CompletionLogprobs | None) -> CompletionLogprobs:
        """Return both as one."""
        if other is None:
            return self
        fields = self.__struct_fields__
        return CompletionLogprobs(*([*getattr(self, name), *getattr(other, name)] for name in fields))


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token of a prompt, or one that could stand in its place; ``rank``: 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


class LogprobReporter:
    """Reports on one answer, whose pieces come in order. Not thread-safe.

    Call `spelling_of` before, where waiting for it does no harm.
    """

    def __init__(self, text: TextModel, count: int) -> None:
        """``count``: the likeliest tokens in each place."""
        self._text, self._count, self._offset = text, count, 0
        self._bytes = spelling_of(text).tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def chat(self, pieces: Sequence[GeneratedToken]) -> ChatLogprobs | None:
        """Report on the next pieces; None if none of them is text."""
        found = []
        for piece in pieces:
            if not self._ends(piece):
                one = self._top(piece.token, piece.logprob)
                found.append(TokenLogprob(one.token, one.logprob, one.bytes, self._tops(piece)))
        return ChatLogprobs(found) if found else None

    def completion(self, pieces: Sequence[GeneratedToken]) -> CompletionLogprobs | None:
        """Report on the next pieces; None if none of them is text."""
        report = CompletionLogprobs([], [], [], [])
        for piece in pieces:
            if self._ends(piece):
                continue
            one = self._top(piece.token, piece.logprob)
            report.tokens.append(one.token)
            report.token_logprobs.append(one.logprob)
            report.top_logprobs.append({top.token: top.logprob for top in (*self._tops(piece), one)})
            report.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(bytes(one.bytes)))
        return report if report.tokens else None

    def echoed(self, ids: Sequence[int], scores: TokenScores) -> CompletionLogprobs:
        """Report on a prompt, before the answer's pieces."""
        pieces = [GeneratedToken("", token, None, *of) for token, of in zip(ids, [(None, ()), *_rows(scores)])]
        report = self.completion(pieces) or CompletionLogprobs([], [], [], [])
        return msgspec.structs.replace(
            report,
            token_logprobs=[None, *report.token_logprobs[1:]],
            top_logprobs=[None, *report.top_logprobs[1:]],
        )

    def prompt(self, ids: Sequence[int], scores: TokenScores) -> list[dict[str, PromptLogprob] | None]:
        """Report on a prompt as vLLM does: for each token, by ids, itself and the likeliest in its place."""
        found: list[dict[str, PromptLogprob] | None] = [None]
        for token, rank, (logprob, top) in zip(ids[1:], scores.ranks.tolist(), _rows(scores)):
            listed = {i: (value, place) for place, (i, value) in enumerate(top, 1)} | {int(token): (logprob, rank)}
            found.append(
                {str(i): PromptLogprob(max(value, _LEAST), at, self._top(i, value).token)
                 for i, (value, at) in listed.items()}
            )  # fmt: skip
        return found

    def _ends(self, piece: GeneratedToken) -> bool:
        return piece.finish == "stop" and piece.token in self._text.stop_ids

    def _tops(self, piece: GeneratedToken) -> list[TopLogprob]:
        return [self._top(token, logprob) for token, logprob in piece.top[: self._count]]

    def _top(self, token: int, logprob: float | None) -> TopLogprob:
        raw = self._bytes[token] if token < len(self._bytes) else self._text.decode([token]).encode()
        return TopLogprob(raw.decode("utf-8", "replace"), max(logprob or 0.0, _LEAST), list(raw))


def _rows(scores: TokenScores) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Of each token its log-probability, and the likeliest ones in its place."""
    columns = scores.logprobs.tolist(), scores.top.tolist(), scores.top_logprobs.tolist()
    return [(own, tuple(zip(ids, values))) for own, ids, values in zip(*columns)]


def spelling_of(text: TextModel) -> Vocabulary:
    """Return the bytes of each token; empty for a text model that does not tell. Takes up to a second, once a model."""
    found = _spellings.get(text)
    if found is None:
        found = _spellings[text] = text.vocabulary() if isinstance(text, HasVocabulary) else Vocabulary(())
    return found


def mean_logprob(pieces: Sequence[GeneratedToken]) -> float:
    """Return the mean log-probability of an answer's tokens; 0 for an empty answer."""
    found = [piece.logprob for piece in pieces if piece.logprob is not None]
    return sum(found) / len(found) if found else 0.0
