"""Validation of arguments before anything is stored: text valid in UTF-8, settings that exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.errors import SessionError
from ctxreuse_agents.segments import Draft

__all__ = ["check_text", "choose_sampling", "question_of"]

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
