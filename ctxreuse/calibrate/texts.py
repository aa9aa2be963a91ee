"""Texts to calibrate on, by kind, and windows of token ids cut from them: to learn, to set steps, to report."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ctxreuse.engines.text import Message, TextModel
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.identity.keys import Tokens

__all__ = ["PARTS", "KindWindow", "Part", "Texts", "in_turn", "opening", "read_texts", "windows", "windows_by_kind"]

Part = Literal["calibration", "validation", "held-out"]
PARTS: tuple[Part, ...] = ("calibration", "validation", "held-out")
#: Documents of each part by kind of text; no document, and no piece of one, is in two parts.
Texts = dict[Part, dict[str, list[str]]]

_PROBE = "\x00"
_SHARE = {"calibration": 0.6, "validation": 0.15, "held-out": 0.25}


class KindWindow(NamedTuple):
    """A window of token ids, int32, and the kind of its text."""

    kind: str
    ids: Tokens


def read_texts(paths: Sequence[Path]) -> Texts:
    """The user's files, each a kind of its own and cut into the three parts; ConfigError for one that is no text.

    Files of one name are one kind.
    """
    texts: Texts = {part: {} for part in PARTS}
    for path in paths:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the text cannot be read: {error}", where=str(path), fix="Give UTF-8 files") from error
        at = 0.0
        for part in PARTS:
            cut = text[round(at * len(text)) : round((at + _SHARE[part]) * len(text))]
            texts[part].setdefault(path.name, []).append(cut)
            at += _SHARE[part]
    return texts


def in_turn(kinds: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the documents of all kinds, kind by kind in turn."""
    return [one for row in itertools.zip_longest(*kinds.values()) for one in row if one is not None]


def windows_by_kind(
    kinds: Mapping[str, Sequence[str]], text: TextModel, count: int, length: int, prefix: int = 0
) -> list[KindWindow]:
    """Up to ``count`` windows, as evenly as may be from all kinds, which take turns; see `windows`.

    Kinds whose documents are too short for one window give none.
    """
    share = -(-count // max(len(kinds), 1))
    cut = {
        kind: windows(documents, text, share, length, prefix, first=number)
        for number, (kind, documents) in enumerate(kinds.items())
    }
    found = [KindWindow(kind, cut[kind][i]) for i in range(share) for kind in cut if i < len(cut[kind])]
    return found[:count]


def windows(
    texts: Sequence[str], text: TextModel, count: int, length: int, prefix: int = 0, first: int = 0
) -> list[Tokens]:
    """Up to ``count`` windows of ``length`` ids, from the documents in turn; each begins as a context begins.

    Every second one is a message in the model's own chat format, and what follows its first ``prefix`` ids begins the
    next message, as a question follows a document; the others are the bare text after the mark that the model expects
    at a beginning. With an odd ``first`` it is the first one that is a message. Documents too short for a window give
    none.
    """
    start, turn = _marks(text)
    found: list[Tokens] = []
    ids: dict[int, Tokens] = {}
    offsets = [0] * len(texts)
    while len(found) < count:
        before = len(found)
        for number, document in enumerate(texts):
            if len(found) == count:
                break
            if number not in ids:
                ids[number] = text.encode(document, markers=False)
            message = (first + len(found)) % 2
            opening = start[message]
            between = turn if message and 0 < prefix < length - len(turn) else turn[:0]
            body = ids[number][offsets[number] : offsets[number] + length - len(opening) - len(between)]
            if len(opening) + len(between) + len(body) < length:
                continue
            offsets[number] += len(body)
            at = max(prefix - len(opening), 0) if len(between) else len(body)
            found.append(np.concatenate([opening, body[:at], between, body[at:]]).astype("<i4"))
        if len(found) == before:
            break
    return found


def opening(text: TextModel) -> Tokens:
    """Return the ids that a context of bare text begins with: the mark that the model expects there, if it has one."""
    return _marks(text)[0][0]


def _marks(text: TextModel) -> tuple[tuple[Tokens, Tokens], Tokens]:
    """Ids that come before the bare text and before that of a message, and those between two messages."""
    openings = []
    for messages in ([], [Message("system", _PROBE)]):
        try:
            before = text.render(messages, generate=False).split(_PROBE)[0]
        except EngineError:  # a template that wants other messages than these
            before = ""
        openings.append(text.encode(before))
    try:
        pieces = text.render([Message("system", _PROBE), Message("user", _PROBE)], generate=False).split(_PROBE)
    except EngineError:
        pieces = [""]
    between = text.encode(pieces[1], markers=False) if len(pieces) == 3 else np.empty(0, "<i4")
    return (openings[0], openings[1]), between
