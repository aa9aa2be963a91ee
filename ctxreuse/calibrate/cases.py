"""Evaluation cases of chunk reuse: a prompt of chunks, earlier prompts that hold them, and the text that follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from ctxreuse.calibrate.texts import opening
from ctxreuse.engines.text import Message, TextModel
from ctxreuse.errors import EngineError
from ctxreuse.identity.keys import Tokens

__all__ = ["KINDS", "EvalCase", "Kind", "KindCase", "Shape", "SourcePosition", "cases_by_kind", "eval_cases"]

#: Where a chunk stood in its source: at the beginning of the prompt, behind nothing but the mark that the model expects
#: there (without it Gemma 3 is lost: chunks that began a prompt without one had a KL of .20, with it they have .05), or
#: behind other tokens.
Kind = Literal["head", "behind"]
KINDS: tuple[Kind, ...] = ("head", "behind")

_PROBE = "\x00"
# Two systems, so that half of the chunks come from behind another beginning than that of the prompt they are used in.
_SYSTEMS = (
    "Answer from the documents below, in few words, and say so if they do not hold the answer.",
    "You are a careful assistant. Read what follows, name the document that you used, and do not make anything up.",
)
#: Ids after a prompt that are not scored: the one that ends the prompt, and the last one, which is a target only.
_UNSCORED = 2


class Shape(NamedTuple):
    """How large a case is: ``chunks`` of ``width`` tokens, and ``following`` tokens that are scored."""

    chunks: int
    width: int
    following: int = 128

    @property
    def name(self) -> str:
        return f"{self.chunks} x {self.width}"

    @property
    def tokens(self) -> int:
        """Tokens of all chunks."""
        return self.chunks * self.width


class SourcePosition(NamedTuple):
    """A prompt that was computed before, int32 ids, and the rows at which chunks of the case begin in it."""

    prompt: Tokens
    at: dict[int, int]


class EvalCase(NamedTuple):
    """A prompt: ``lead``, ``chunks`` int32 [width], ``following`` int32 [n + 2].

    Scored are the n positions after the first id of ``following``, which ends the prompt; the last id is a target only.

    ``mixed``: the chunks are of different documents, ``following`` goes on after the last one; else all are one text.
    ``sources``: by kind, the earlier prompts that hold the chunks; each chunk is in one of them. Sources fill whole
    blocks of that many tokens.
    """

    lead: Tokens
    chunks: tuple[Tokens, ...]
    following: Tokens
    mixed: bool
    sources: dict[Kind, tuple[SourcePosition, ...]]

    @property
    def tokens(self) -> Tokens:
        """The lead and the chunks."""
        return np.concatenate([self.lead, *self.chunks]).astype("<i4")

    def start(self, chunk: int) -> int:
        """The position of a chunk's first token."""
        return len(self.lead) + sum(map(len, self.chunks[:chunk]))


def eval_cases(texts: Sequence[str], text: TextModel, count: int, shape: Shape, block_tokens: int) -> list[EvalCase]:
    """Make up to ``count`` cases, of one text and of mixed documents in turn; fewer if the texts do not suffice.

    A chunk that stood ``behind`` is taken from a prompt with other chunks and another document before it, in another
    order, and every second of these prompts has another system text.
    """
    documents = _Documents([text.encode(document, markers=False) for document in texts])
    leads, first = [_lead(text, system) for system in _SYSTEMS], opening(text)
    found: list[EvalCase] = []
    while len(found) < count:
        mixed = len(found) % 2 == 1
        pieces = _pieces(documents, shape, mixed=mixed)
        # Half a chunk: no chunk stands where it stood.
        unrelated = documents.take(shape.width // 2)
        if pieces is None or unrelated is None:
            break
        chunks, following = pieces[:-1], pieces[-1]
        sources: dict[Kind, tuple[SourcePosition, ...]] = {
            "head": tuple(_source(first, {i: c}, unrelated, block_tokens) for i, c in enumerate(chunks)),
            "behind": _behind(leads, chunks, unrelated, block_tokens),
        }
        found.append(EvalCase(leads[0], tuple(chunks), following, mixed, sources))
    return found


class KindCase(NamedTuple):
    """A case, and the kind of its text."""

    text_kind: str
    case: EvalCase


def cases_by_kind(
    kinds: Mapping[str, Sequence[str]], text: TextModel, count: int, shape: Shape, block_tokens: int
) -> list[KindCase]:
    """Up to ``count`` cases, as evenly as may be from texts of all kinds; see `eval_cases`."""
    share = -(-count // max(len(kinds), 1))
    made = {kind: eval_cases(documents, text, share, shape, block_tokens) for kind, documents in kinds.items()}
    found = [KindCase(kind, made[kind][i]) for i in range(share) for kind in made if i < len(made[kind])]
    return found[:count]


class _Documents:
    """Token ids of texts, given out piece by piece; the texts take turns, and no id is given twice."""

    def __init__(self, ids: Sequence[Tokens]) -> None:
        self._ids, self._at, self._turn = list(ids), [0] * len(ids), 0

    def take(self, length: int) -> Tokens | None:
        """The next ``length`` ids in a row of the next text that has as many left; None if there is none."""
        for _ in range(len(self._ids)):
            number = self._turn % len(self._ids)
            self._turn += 1
            at = self._at[number]
            if len(self._ids[number]) - at >= length:
                self._at[number] = at + length
                return np.ascontiguousarray(self._ids[number][at : at + length], "<i4")
        return None


def _pieces(documents: _Documents, shape: Shape, *, mixed: bool) -> list[Tokens] | None:
    """The chunks and what follows them, which goes on where the last one ends."""
    own = documents.take((shape.width if mixed else shape.tokens) + shape.following + _UNSCORED)
    others = [documents.take(shape.width) for _ in range(shape.chunks - 1 if mixed else 0)]
    if own is None:
        return None
    pieces = [other for other in others if other is not None]
    if len(pieces) < len(others):
        return None
    while len(pieces) < shape.chunks:
        pieces.append(own[: shape.width])
        own = own[shape.width :]
    return [*pieces, own]


def _lead(text: TextModel, system: str) -> Tokens:
    """What stands before the documents in a model's own chat format."""
    for messages in (
        [Message("system", system), Message("user", _PROBE)],
        [Message("user", f"{system}\n\n{_PROBE}")],  # for templates without a system
    ):
        try:
            return text.encode(text.render(messages, generate=False).split(_PROBE)[0])
        except EngineError:
            continue
    return text.encode(f"{system}\n\n")


def _behind(
    leads: Sequence[Tokens], chunks: Sequence[Tokens], unrelated: Tokens, block_tokens: int
) -> tuple[SourcePosition, ...]:
    """Two earlier prompts: the later half of the chunks in falling order, and the earlier half behind another lead."""
    half = len(chunks) // 2
    parts = [range(len(chunks) - 1, half - 1, -1), range(half - 1, -1, -1)]
    return tuple(
        _source(np.concatenate([lead, unrelated]), {i: chunks[i] for i in part}, unrelated, block_tokens)
        for lead, part in zip(leads, parts)
        if part
    )


def _source(before: Tokens, chunks: dict[int, Tokens], filler: Tokens, block_tokens: int) -> SourcePosition:
    at, row = {}, len(before)
    for number, chunk in chunks.items():
        at[number] = row
        row += len(chunk)
    # What is stored ends with a whole block.
    spare = np.resize(filler, -row % block_tokens)
    return SourcePosition(np.concatenate([before, *chunks.values(), spare]).astype("<i4"), at)
