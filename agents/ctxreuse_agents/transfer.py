"""Sessions as plain JSON: export from one memory and import into another; imports are validated as untrusted data.

::

    {"format": "ctxreuse.session", "version": 1, "name": "...",
     "turns": [{"role": "user", "content": "...", "created": 1700000000.0,      seconds since 1970
                "meta": {...},                                                  omitted if empty
                "tokens": {"<64 hex digits of a model space>": "<base64 of int32 little-endian ids>"}}, ...]}

Token ids are trusted as far as the text is: an editor of the file can change both. Bytes in ``meta`` have no JSON form
and are refused on export.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ctxreuse.errors import FormatError, SessionError
from ctxreuse.store import Ledger, NewTurn
from ctxreuse.store import Session as Record
from ctxreuse_agents.inputs import check_text
from ctxreuse_agents.segments import unpack

__all__ = ["MAX_TURNS", "export", "load"]

#: Maximum turns of one file.
MAX_TURNS = 1_000_000

_HEX = re.compile(r"[0-9a-f]{64}\Z")
_MAX_SPACES = 64
_MAX_DEPTH = 64


class _Turn(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    role: Annotated[str, Meta(min_length=1)]
    content: str
    created: Annotated[float, Meta(ge=0, le=253402300800)]
    meta: dict[str, Any] = {}
    tokens: Annotated[dict[str, str], Meta(max_length=_MAX_SPACES)] = {}


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal["ctxreuse.session"]
    version: Literal[1]
    name: str
    turns: Annotated[list[_Turn], Meta(max_length=MAX_TURNS)]


def export(ledger: Ledger, session: str) -> dict[str, Any]:
    """Return the session as builtins for ``json.dumps``. Raises SessionError if unknown or if ``meta`` has bytes."""
    record = ledger.session(session)
    turns = []
    for turn in ledger.turns(record.head):
        _check_plain(turn.meta, f"turn {turn.id}")
        ids = {space: ledger.tokens(turn.id, space) or b"" for space in ledger.spaces(turn.id)}
        tokens = {space.hex(): base64.b64encode(raw).decode() for space, raw in ids.items()}
        turns.append(_Turn(turn.role, turn.content, turn.created, turn.meta, tokens))
    built: dict[str, Any] = msgspec.to_builtins(_File("ctxreuse.session", 1, record.name, turns))
    return built


def load(ledger: Ledger, data: Mapping[str, Any], name: str | None = None) -> Record:
    """Create a session with the turns of `export`'s dict, called ``name`` (default: the name in the file).

    Everything is validated first. Raises FormatError for data that is not of this format, SessionError for text
    that cannot be stored and for a name that is taken.
    """
    try:
        file = msgspec.convert(data, _File)
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError) as error:
        raise FormatError(
            f"this is not a session of format ctxreuse.session, version 1: {error}",
            fix="Pass the dict of export_json(), or json.loads() of a file of it",
        ) from None
    more: list[dict[bytes, bytes]] = []
    turns = []
    for n, turn in enumerate(file.turns):
        check_text(turn.role, turn.content)
        _check_plain(turn.meta, f"turn {n}")
        segments = [(_space(key, n), _ids(text, n)) for key, text in turn.tokens.items()]
        first, raw = segments[0] if segments else (None, None)
        turns.append(NewTurn(turn.role, turn.content, turn.meta, raw, first, created=turn.created))
        more.append(dict(segments[1:]))
    return ledger.create(name if name is not None else file.name, turns=turns, tokens=more)


def _space(key: str, turn: int) -> bytes:
    if not _HEX.match(key):
        raise FormatError(f"{key[:80]!r} is not a model space", where=f"turn {turn}", fix="Use 64 hex digits")
    return bytes.fromhex(key)


def _ids(text: str, turn: int) -> bytes:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise FormatError(f"token ids are not base64: {error}", where=f"turn {turn}") from None
    if unpack(raw) is None:
        raise FormatError("token ids are not int32 numbers from 0 up", where=f"turn {turn}")
    return raw


def _check_plain(value: Any, where: str, depth: int = 0) -> None:
    """Raise SessionError unless the value survives a round trip through JSON."""
    if depth > _MAX_DEPTH:
        raise SessionError(f"meta is nested more than {_MAX_DEPTH} deep", where=where)
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_plain(key, where, depth + 1)
            _check_plain(inner, where, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check_plain(inner, where, depth + 1)
    elif isinstance(value, str):
        check_text("meta", value)
    elif not (value is None or isinstance(value, bool | int | float)):
        raise SessionError(
            f"meta contains {type(value).__name__}, which JSON cannot represent",
            where=where,
            fix="Store text or numbers instead",
        )
