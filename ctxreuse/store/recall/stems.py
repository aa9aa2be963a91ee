"""Stems of words by language, so that a word is found in its other forms: English by the index, others by Snowball."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable

from ctxreuse.errors import ConfigError

__all__ = ["ENGLISH", "check_language", "stems", "tokenize"]

ENGLISH = "en"
#: Snowball's name of each language's algorithm, by the code of ISO 639-1.
_NAMES = {
    "ar": "arabic", "ca": "catalan", "cs": "czech", "da": "danish", "de": "german", "el": "greek", "eo": "esperanto",
    "es": "spanish", "et": "estonian", "eu": "basque", "fa": "persian", "fi": "finnish", "fr": "french", "ga": "irish",
    "hi": "hindi", "hu": "hungarian", "hy": "armenian", "id": "indonesian", "it": "italian", "lt": "lithuanian",
    "ne": "nepali", "nl": "dutch", "no": "norwegian", "pl": "polish", "pt": "portuguese", "ro": "romanian",
    "ru": "russian", "sr": "serbian", "sv": "swedish", "ta": "tamil", "tr": "turkish", "yi": "yiddish",
}  # fmt: skip
#: Words whose stems are remembered.
_KNOWN = 65_536
_WORD = re.compile(r"\w+")


def check_language(language: str) -> str:
    """Return the language. Raises ConfigError for one whose stems are not known, or not without an extra."""
    stems(language)
    return language


def stems(language: str) -> Callable[[str], str]:
    """Return what puts the stem of each word in its place, before the index sees a text. For one thread at a time.

    Of English texts nothing: the index itself finds their stems. Raises ConfigError, see `check_language`.
    """
    if language == ENGLISH:
        return lambda text: text
    name = _NAMES.get(language)
    if name is None:
        known = ", ".join([ENGLISH, *_NAMES])
        raise ConfigError(f"there is no language {language!r}", fix=f"Use the code of one of these: {known}")
    try:
        stemmer = importlib.import_module("snowballstemmer").stemmer(name)
    except (ImportError, KeyError) as error:
        fix = "Run: pip install 'ctxreuse[languages]'"
        raise ConfigError(f"stems of {name} words need the package snowballstemmer: {error}", fix=fix) from None
    stem = functools.lru_cache(_KNOWN)(lambda word: str(stemmer.stemWord(word)))
    return lambda text: _WORD.sub(lambda found: stem(found[0].casefold()), text)


def tokenize(language: str) -> str:
    """Return how the index divides a text of that language into words."""
    return f"{'porter ' if language == ENGLISH else ''}unicode61 remove_diacritics 2"
