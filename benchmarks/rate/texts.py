"""One text of each kind to measure on, none of which calibration learns from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.corpus import article, chats
from ctxreuse.engines.text import TextModel
from ctxreuse.errors import ConfigError
from ctxreuse.identity.keys import Tokens

__all__ = ["held_out", "read_texts", "tokens_of"]

#: A file of the standard library, and the characters of it that are passed over: heads say little.
_CODE, _HEAD = "asyncio/base_events.py", 5_000
_BEGIN = "<bos>"
#: Enough characters for a thousand tokens of any tokenizer at hand.
_CHARACTERS = 16_000


def held_out() -> dict[str, str]:
    """Kind to text: an article and chats where public ones are at hand, else what calibration holds out.

    Code is Python's own; tables and other languages are what calibration holds out.
    """
    from ctxreuse.calibrate import default_texts

    found = {kind: documents[0] for kind, documents in default_texts()["held-out"].items()}
    code = Path(os.__file__).parent / _CODE
    if code.is_file():
        found["code"] = code.read_text("utf-8", "replace")[_HEAD:]
    found |= {kind: text for kind, text in (("prose", article()), ("chat", chats())) if text}
    return {kind: text[:_CHARACTERS] for kind, text in found.items()}


def read_texts(paths: Sequence[Path]) -> dict[str, str]:
    """Name to text of the user's own files. Raises ConfigError for one that cannot be read."""
    texts = {}
    for path in paths:
        try:
            texts[path.name] = path.read_text("utf-8", "replace")[: 4 * _CHARACTERS]
        except OSError as error:
            raise ConfigError(f"the text cannot be read: {error.strerror}", where=str(path)) from error
    return texts


def tokens_of(model: TextModel, text: str, count: int) -> Tokens | None:
    """The first ``count`` ids of a text, int32, after the mark with which the model wants texts to begin.

    None if the text has fewer.
    """
    begin = model.encode(_BEGIN) if _BEGIN in model.markers else np.zeros(0, "<i4")
    ids = np.concatenate([begin, model.encode(text, markers=False)])
    return ids[:count] if len(ids) >= count else None
