"""What the ledger keeps: turns, sessions and search hits as values, and their bytes on disk."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from ctxreuse.errors import SessionError, StoreError

__all__ = [
    "Hit",
    "LedgerStats",
    "Links",
    "NewTurn",
    "Session",
    "Turn",
    "decode_id",
    "decode_session",
    "decode_turn",
    "encode_id",
    "encode_session",
    "encode_turn",
    "require_text",
]


class Turn(msgspec.Struct, frozen=True):
    """One durable turn of a conversation; it never changes.

    ``parent``: the turn before (0: none). ``created``: seconds since 1970. ``depth``: turns up to and including this.
    """

    id: int
    parent: int
    role: str
    content: str
    created: float
    depth: int
    meta: dict[str, Any] = {}


class Session(msgspec.Struct, frozen=True):
    """A named line of turns: ``head`` is its last turn (0: empty).

    ``id``: 32 hex digits. ``origin``: id of the session that it was forked from at turn ``forked_at``. ``lossy``: the
    worst level of KV that it allows, ``exact`` for none but exact ones; None where that was not said.
    """

    id: str
    name: str
    head: int
    origin: str | None
    forked_at: int
    created: float
    updated: float
    lossy: str | None = None


class NewTurn(msgspec.Struct, frozen=True):
    """A turn to append. ``meta``: what MessagePack can hold. ``tokens``: int32 little-endian ids of the turn's text in
    the model space with digest ``space``. ``created``: when it was, if not now (seconds since 1970)."""

    role: str
    content: str
    meta: Mapping[str, Any] = {}
    tokens: bytes | None = None
    space: bytes | None = None
    created: float | None = None


class Hit(msgspec.Struct, frozen=True):
    """A turn that holds all words of a search, the newest session it belongs to, and the text around the first word."""

    session: Session
    turn: Turn
    snippet: str


class LedgerStats(msgspec.Struct, frozen=True):
    """Counts of entries, and the size of the file in bytes."""

    sessions: int
    turns: int
    tokens: int
    file_bytes: int


_LINKS = struct.Struct("<QQQ")
_RESTORE = "Restore the ledger from a backup"
# msgspec lets the UnicodeDecodeError of a damaged text through as it is.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_body = msgspec.msgpack.Decoder(tuple[str, str, float, dict[str, Any]])
_encode = msgspec.msgpack.encode


class Links(NamedTuple):
    """The fixed head of a turn on disk, enough to walk history without reading texts.

    ``jump`` is an ancestor far above, chosen so that any ancestor is reached in O(log depth) steps: the "skew-binary
    jump pointers" of E. W. Myers, "An applicative random-access stack", Information Processing Letters 17 (1983).
    """

    parent: int
    jump: int
    depth: int

    @classmethod
    def unpack(cls, raw: bytes | memoryview) -> Links:
        """The links at the head of a turn's bytes. Raises StoreError if there are too few."""
        if len(raw) < _LINKS.size:
            raise StoreError(f"a turn of {len(raw)} bytes in the ledger", fix=_RESTORE)
        return cls(*_LINKS.unpack_from(raw))


def require_text(text: object, what: str) -> bytes:
    """UTF-8 of a text. Raises SessionError for what is no str or could not be written back exactly."""
    if not isinstance(text, str):
        raise SessionError(f"{what} is {type(text).__name__}", fix="Give a str")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        fix = "Replace lone surrogates, for example with text.encode('utf-8', 'replace').decode()"
        raise SessionError(f"{what} is not valid Unicode at position {error.start}", fix=fix) from None


def encode_turn(links: Links, new: NewTurn, created: float) -> bytes:
    """A turn's bytes. Raises SessionError if its texts or ``meta`` cannot be stored exactly."""
    require_text(new.role, "the role of a turn")
    require_text(new.content, "the content of a turn")
    try:
        body = _encode((new.role, new.content, created, dict(new.meta)))
        _body.decode(body)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        fix = "Use str keys and None, bool, int of 64 bits, float, str, bytes, list or dict as values"
        raise SessionError(f"meta of a turn cannot be stored: {error}", fix=fix) from None
    return _LINKS.pack(*links) + body


def decode_turn(id: int, raw: bytes | memoryview) -> Turn:
    """The turn of these bytes. Raises StoreError if they are damaged."""
    links = Links.unpack(raw)
    try:
        role, content, created, meta = _body.decode(memoryview(raw)[_LINKS.size :])
    except _UNREADABLE as error:
        raise StoreError(f"turn {id} is damaged: {error}", fix=_RESTORE) from None
    return Turn(id, links.parent, role, content, created, links.depth, meta)


_id = msgspec.msgpack.Decoder(int)


def encode_id(id: int) -> bytes:
    """The bytes of the id that the next turn gets."""
    return _encode(id)


def decode_id(raw: bytes | memoryview) -> int:
    """The id of these bytes. Raises StoreError if they are damaged."""
    try:
        return _id.decode(raw)
    except _UNREADABLE as error:
        raise StoreError(f"the id of the next turn is damaged: {error}", fix=_RESTORE) from None


class _Listed(Session, frozen=True, array_like=True):
    """A session as a list of its fields, of which later programs may have more."""

    def session(self) -> Session:
        return Session(*msgspec.structs.astuple(self))


_session = msgspec.msgpack.Decoder(list[Any])


def encode_session(session: Session) -> bytes:
    """A session's bytes; its id is the key that they are kept under."""
    fields = msgspec.structs.astuple(session)[1:]
    # As programs that knew no levels wrote it, so that they can read it, unless there is something to say.
    return _encode(fields if session.lossy is not None else fields[:-1])


def decode_session(id: bytes, raw: bytes | memoryview) -> Session:
    """The session of these bytes. Raises StoreError if they are damaged."""
    try:
        return msgspec.convert([id.hex(), *_session.decode(raw)], _Listed).session()
    except _UNREADABLE as error:
        raise StoreError(f"session {id.hex()} is damaged: {error}", fix=_RESTORE) from None
