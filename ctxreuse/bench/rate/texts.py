"""Texts to measure on, from files that any Python has: prose of licences, source code, reference and web pages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path

import numpy as np

from ctxreuse.engines.text import TextModel
from ctxreuse.errors import ConfigError
from ctxreuse.keys import Tokens

__all__ = ["held_out", "read_texts", "tokens_of"]

#: Files of the standard library, and how many characters of each are passed over: heads say little.
_FILES = (("asyncio/base_events.py", 5_000), ("idlelib/NEWS.txt", 2_000), ("idlelib/help.html", 12_000))
_BEGIN = "<bos>"
#: Enough characters for a thousand tokens of any tokenizer at hand.
_CHARACTERS = 16_000


def held_out() -> dict[str, str]:
    """Name to text of everything found here; calibration reads other files (see `ctxreuse.calibrate`)."""
    library = Path(os.__file__).parent
    found = {}
    for name, skipped in _FILES:
        if (library / name).is_file():
            found[name] = (library / name).read_text("utf-8", "replace")[skipped:]
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    found["pydoc topics"] = "\n\n".join(topics[name] for name in sorted(topics)[-len(topics) // 5 :])
    licence = _licence()
    if licence:
        found["numpy's licences"] = licence
    return {name: text[:_CHARACTERS] for name, text in found.items()}


def _licence() -> str:
    for file in metadata.files("numpy") or ():
        if file.name.startswith("LICENSE") and "numpy/" not in str(file):
            text = file.read_text()
            # The GPL, which the list of bundled libraries quotes in full.
            at = text.find("GNU GENERAL PUBLIC LICENSE")
            return text[at + 3_000 :] if at >= 0 else text
    return ""


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
