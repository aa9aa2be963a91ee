"""Validation of arguments before anything is stored: text valid in UTF-8, settings that exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec

from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.errors import SessionError
from ctxreuse.store import NewTurn, Turn
from ctxreuse_agents.segments import Draft

__all__ = ["check_text", "choose_sampling", "edited", "question_of", "texts_of"]

#: Appended to each document.
_BETWEEN = "\n\n"


def choose_sampling(sampling: SamplingParams | None, settings: Mapping[str, Any]) -> SamplingParams:
    """Return sampling with some fields replaced by keyword. Raises TypeError for an unknown field."""
    chosen = dict(settings)
    if isinstance(chosen.get("stop"), str):
        chosen["stop"] = (chosen["stop"],)
    return SamplingParams(**chosen) if sampling is None else msgspec.structs.replace(sampling, **chosen)


def check_text(role: object, content: object, named: str = "content") -> None:
    """Raise SessionError, with a fix, unless both are text that UTF-8 can encode."""
    for what, text in (("role", role), (named, content)):
        if isinstance(text, bytes | bytearray | memoryview):
            raise SessionError(
                f"the {what} is {len(text)} bytes, not text",
                fix="Decode it first: data.decode('utf-8'), or data.decode('utf-8', errors='replace') for mixed files",
            )
        if not isinstance(text, str):
            raise SessionError(f"the {what} is a {type(text).__name__}, not text", fix="Pass a str; json.dumps() data")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise SessionError(
                f"the {what} has a lone surrogate at character {error.start}, which is not valid Unicode",
                fix="Clean it: text.encode('utf-8', 'replace').decode()",
            ) from None
    if not role:
        raise SessionError("the role is empty", fix="Use system, user, assistant or tool")


def question_of(question: str, documents: Sequence[str]) -> Draft:
    """Return the user's turn: each document, then the question, with cuts where documents end.

    Raises SessionError for values that are not text, and for one text in place of a list.
    """
    if isinstance(documents, str | bytes):
        raise SessionError("documents is one text, not a list of them", fix="Give documents=[text]")
    for number, document in enumerate(documents):
        check_text("user", document, f"document {number}")
    check_text("user", question)
    whole = [document + _BETWEEN for document in documents]
    return Draft("user", "".join([*whole, question]), None, tuple(accumulate(map(len, whole))))


def texts_of(content: str, cuts: Sequence[int]) -> list[str]:
    """Return the documents in the text of a turn, and what stands behind them, as `question_of` was given them."""
    *parts, last = (content[start:end] for start, end in pairwise((0, *cuts, len(content))))
    return [*(part.removesuffix(_BETWEEN) for part in parts), last]


def edited(turn: Turn, text: str, span: tuple[int, int] | None) -> NewTurn:
    """Return a turn with ``text`` in place of its text, or of the characters from ``span[0]`` up to ``span[1]``.

    Parts of its text (documents) end where they did, but for those that end inside of what was replaced. Raises
    SessionError for a span that is not in the text, and for what is not text.
    """
    start, end = (0, len(turn.content)) if span is None else span
    if not 0 <= start <= end <= len(turn.content):
        raise SessionError(
            f"characters {start} to {end} are not in a text of {len(turn.content)}",
            fix="Give (start, end) of its content",
        )
    check_text(turn.role, text)
    meta, longer = dict(turn.meta), len(text) - (end - start)
    if isinstance(cuts := meta.pop("cuts", None), list) and span is not None and all(type(cut) is int for cut in cuts):
        kept = [cut if cut <= start else cut + longer for cut in cuts if cut <= start or cut >= end]
        meta["cuts"] = sorted({cut for cut in kept if cut > 0})
    return NewTurn(turn.role, turn.content[:start] + text + turn.content[end:], meta, created=turn.created)
