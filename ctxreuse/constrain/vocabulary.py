"""The tokens of a model as bytes: what a grammar, which speaks of text, is matched against."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

__all__ = ["HasVocabulary", "Vocabulary", "vocabulary_of"]


class Vocabulary(NamedTuple):
    """Bytes of each token, by id (empty: none); ``special``: ids that stand for no text, ascending."""

    tokens: Sequence[bytes]
    special: Sequence[int] = ()


@runtime_checkable
class HasVocabulary(Protocol):
    """A text model whose answers can be constrained. Thread-safe."""

    def vocabulary(self) -> Vocabulary:
        """The model's tokens; takes up to a second, each time."""
        ...


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def vocabulary_of(tokenizer: Mapping[str, Any], pieces: Sequence[str | None]) -> Vocabulary:
    """The vocabulary of a ``tokenizer.json``; ``pieces``: the token of each id as it is written there."""
    added = {token["id"]: token for token in tokenizer.get("added_tokens") or ()}
    table = byte_table() if "ByteLevel" in _types(tokenizer) else {}
    tokens: list[bytes] = []
    for number, piece in enumerate(pieces):
        if piece is None:
            tokens.append(b"")
        elif number in added:
            tokens.append(str(added[number]["content"]).encode())
        elif table:
            tokens.append(b"".join(table.get(char) or char.encode() for char in piece))
        elif found := _BYTE.fullmatch(piece):
            tokens.append(bytes([int(found[1], 16)]))
        else:
            tokens.append(piece.replace("\u2581", " ").encode())
    return Vocabulary(tokens, sorted(number for number, token in added.items() if token.get("special")))


def byte_table() -> dict[str, bytes]:
    """The alphabet of byte-level vocabularies: printable bytes are themselves, the others follow from 256 on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): bytes([byte]) for byte in plain} | {chr(256 + n): bytes([b]) for n, b in enumerate(others)}


def _types(step: Any) -> set[str]:
    """The types of a tokenizer's steps, those within others too."""
    if isinstance(step, list):
        return set().union(*map(_types, step))
    if not isinstance(step, dict):
        return set()
    inner = [step.get(key) for key in ("pre_tokenizer", "decoder", "pretokenizers", "decoders")]
    return _types(inner) | ({str(step["type"])} if "type" in step else set())
