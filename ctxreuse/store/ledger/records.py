"""Turns, sessions and search hits as values, and their bytes on disk."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from ctxreuse.block.levels import limit_of
from ctxreuse.errors import SessionError, StoreDamagedError

__all__ = [
    "FIX",
    "FORMAT",
    "READABLE",
    "DamagedTurnError",
    "Hit",
    "LedgerStats",
    "LedgerVerdict",
    "Links",
    "NewTurn",
    "Session",
    "Turn",
    "check_namespace",
    "decode_id",
    "decode_session",
    "decode_tokens",
    "decode_turn",
    "encode_id",
    "encode_session",
    "encode_tokens",
    "encode_turn",
    "is_checked",
    "is_sealed_tokens",
    "require_text",
    "role_of",
    "seal",
    "unseal",
]


# Characters of a turn's text in its repr.
_SHOWN = 60
# Characters of a namespace.
_NAMESPACE = 400


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

    def __repr__(self) -> str:
        text = self.content if len(self.content) <= _SHOWN else f"{self.content[:_SHOWN]}…"
        return f"Turn({self.id}, {self.role!r}, {text!r})"


class Session(msgspec.Struct, frozen=True):
    """A named line of turns: ``head`` is its last turn (0: empty).

    ``id``: 32 hex digits. ``origin``: id of the session that it was forked from at turn ``forked_at``. ``lossy``: the
    stored form of ``max_kl``: a level's name, or ``exact``. ``namespace``: whose it is; its forks have the same.
    ``expires``: when it is deleted, in seconds since 1970 (None: never); its forks with it. ``pinned``: it stays
    whatever its age.
    """

    id: str
    name: str
    head: int
    origin: str | None
    forked_at: int
    created: float
    updated: float
    lossy: str | None = None
    namespace: str = ""
    expires: float | None = None
    pinned: bool = False

    @property
    def max_kl(self) -> float | None:
        """The largest KL that it allows, 0 for exact KV only; None where that was not said."""
        return None if self.lossy is None else limit_of(self.lossy) or 0.0


class NewTurn(msgspec.Struct, frozen=True):
    """A turn to append.

    ``meta``: MessagePack values. ``tokens``: int32 little-endian ids of its text in the model space with digest
    ``space``. ``created``: seconds since 1970; default: now.
    """

    role: str
    content: str
    meta: Mapping[str, Any] = {}
    tokens: bytes | None = None
    space: bytes | None = None
    created: float | None = None


class Hit(msgspec.Struct, frozen=True):
    """A turn that a search found, a session that it is in, and the text around a word that was found.

    ``score``: more is better; only comparable within one search. ``explain``: why it was found, where that was
    requested.
    """

    session: Session
    turn: Turn
    snippet: str
    score: float = 0.0
    explain: dict[str, Any] = {}


class LedgerStats(msgspec.Struct, frozen=True):
    """Counts of entries, and the size of the file in bytes."""

    sessions: int
    turns: int
    tokens: int
    file_bytes: int


class LedgerVerdict(msgspec.Struct, frozen=True):
    """The result of reading all of a ledger: counts, what is wrong, and the turns without a checksum (version 1)."""

    stats: LedgerStats
    problems: tuple[str, ...] = ()
    unchecked: int = 0


#: Version of the records, kept in table ``info``, and those that can be read: 1 has no checksums.
FORMAT, READABLE = 2, (1, 2)

# No MessagePack value begins with the first byte, so no record of version 1 does.
_MARK = bytes((0xC1, FORMAT))
_SUM = struct.Struct("<Q")
_LINKS = struct.Struct("<QQQ")
#: A turn's links, mark and checksum of its text, which the checksum after them covers together.
_HEAD = struct.Struct("<QQQ2sQ")
_TEXT_AT = _HEAD.size + _SUM.size
#: What to do about damage.
FIX = "Other turns stay readable; `ctxreuse store restore` brings back a backup, `ctxreuse store rescue` saves the rest"
# msgspec lets the UnicodeDecodeError of a damaged text through as it is.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_body = msgspec.msgpack.Decoder(tuple[str, str, float, dict[str, Any]])
_encode = msgspec.msgpack.encode


class DamagedTurnError(Exception):
    """A turn's bytes are not what was written; the ledger adds which sessions have it. ``what``: which part of it."""

    def __init__(self, id: int, what: str, why: str) -> None:
        super().__init__(f"{what} of turn {id} is damaged: {why}" if what else f"turn {id} is damaged: {why}")
        self.id = id


def seal(key: bytes, body: bytes) -> bytes:
    """Return a record with its checksum, which covers the key too."""
    return _MARK + _SUM.pack(xxh3_64_intdigest(body, xxh3_64_intdigest(key))) + body


def unseal(key: bytes, raw: bytes | memoryview) -> bytes | memoryview:
    """Return the body of a sealed record. Raises ValueError if it is not what was written under that key."""
    body = memoryview(raw)[_SEAL:]
    if len(raw) < _SEAL or raw[:2] != _MARK:
        raise ValueError("its head is not what was written")
    if _SUM.unpack_from(raw, 2)[0] != xxh3_64_intdigest(body, xxh3_64_intdigest(key)):
        raise ValueError("it differs from its checksum")
    return body


_SEAL = len(_MARK) + _SUM.size


class Links(NamedTuple):
    """The fixed head of a turn on disk, enough to walk history without reading texts.

    ``jump`` is an ancestor far above, chosen so that any ancestor is reached in O(log depth) steps: the "skew-binary
    jump pointers" of E. W. Myers, "An applicative random-access stack", Information Processing Letters 17 (1983).
    """

    parent: int
    jump: int
    depth: int

    @classmethod
    def unpack(cls, id: int, raw: bytes | memoryview) -> Links:
        """Decode the links at the head of a turn. Raises DamagedTurnError."""
        if len(raw) < _LINKS.size:
            raise DamagedTurnError(id, "", f"{len(raw)} bytes")
        if raw[_LINKS.size : _LINKS.size + 1] == _MARK[:1] and (
            len(raw) < _TEXT_AT or _SUM.unpack_from(raw, _HEAD.size)[0] != xxh3_64_intdigest(raw[: _HEAD.size], id)
        ):
            raise DamagedTurnError(id, "the head", "it differs from its checksum")
        return cls(*_LINKS.unpack_from(raw))


def require_text(text: object, what: str) -> bytes:
    """Return a text as UTF-8. Raises SessionError for another type, or lone surrogates."""
    if not isinstance(text, str):
        raise SessionError(f"{what} is {type(text).__name__}", fix="Give a str")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        fix = "Replace lone surrogates, for example with text.encode('utf-8', 'replace').decode()"
        raise SessionError(f"{what} is not valid Unicode at position {error.start}", fix=fix) from None


def check_namespace(namespace: object) -> str:
    """Return a namespace: parts with a ``/`` between, such as ``user/agent/run``; ``""``: none. Raises SessionError."""
    text = require_text(namespace, "a namespace").decode()
    parts = text.split("/") if text else []
    if len(text) > _NAMESPACE or any(not part.isprintable() or part != part.strip() or not part for part in parts):
        fix = f"Use parts of printable text with / between, such as user/agent/run, {_NAMESPACE} characters at most"
        raise SessionError(f"{text[:60]!r} cannot be a namespace", fix=fix)
    return text


def encode_turn(id: int, links: Links, new: NewTurn, created: float) -> bytes:
    """Encode a turn: links, checksums of its text and of what stands before, text.

    Raises SessionError if its texts or ``meta`` cannot be stored exactly.
    """
    require_text(new.role, "the role of a turn")
    require_text(new.content, "the content of a turn")
    try:
        body = _encode((new.role, new.content, created, dict(new.meta)))
        _body.decode(body)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        fix = "Use str keys and None, bool, int of 64 bits, float, str, bytes, list or dict as values"
        raise SessionError(f"meta of a turn cannot be stored: {error}", fix=fix) from None
    head = _HEAD.pack(*links, _MARK, xxh3_64_intdigest(body, id))
    return head + _SUM.pack(xxh3_64_intdigest(head, id)) + body


def decode_turn(id: int, raw: bytes | memoryview) -> Turn:
    """Decode a turn of any version. Raises DamagedTurnError."""
    links, text = Links.unpack(id, raw), memoryview(raw)[_LINKS.size :]
    if is_checked(raw):
        text = memoryview(raw)[_TEXT_AT:]
        if xxh3_64_intdigest(text, id) != _HEAD.unpack_from(raw)[-1]:
            raise DamagedTurnError(id, "the text", "it differs from its checksum")
    try:
        role, content, created, meta = _body.decode(text)
    except _UNREADABLE as error:
        raise DamagedTurnError(id, "the text", str(error)) from None
    return Turn(id, links.parent, role, content, created, links.depth, meta)


def is_checked(raw: bytes | memoryview) -> bool:
    """Return True if a turn has checksums, as those of version 1 do not."""
    return raw[_LINKS.size : _LINKS.size + 1] == _MARK[:1]


_ROLES = ("system", "user", "assistant", "tool", "text")


def role_of(raw: bytes) -> str:
    """Return the role in a turn whose text may be damaged; ``""`` if it is none that turns usually have."""
    text = raw[_TEXT_AT if is_checked(raw) else _LINKS.size :]
    # A list of four whose first is a short string.
    size = text[1] & 0x1F if len(text) > 1 else 0
    role = text[2 : 2 + size].decode("ascii", "replace")
    return role if role in _ROLES else ""


def encode_tokens(key: bytes, tokens: bytes) -> bytes:
    """Encode token ids under the key of a turn and a space."""
    return seal(key, tokens)


def decode_tokens(key: bytes, raw: bytes | memoryview, *, checked: bool) -> bytes:
    """Decode token ids; ``checked``: their turn was written when all were. Raises DamagedTurnError."""
    if not checked and not is_sealed_tokens(raw):
        return bytes(raw)
    try:
        return bytes(unseal(key, raw))
    except ValueError as error:
        raise DamagedTurnError(int.from_bytes(key[:8], "big"), "the record of token ids", str(error)) from None


def is_sealed_tokens(raw: bytes | memoryview) -> bool:
    """Return True if token ids have a checksum; records of version 1 are whole int32 numbers."""
    return len(raw) % 4 == _SEAL % 4


_id = msgspec.msgpack.Decoder(int)


def encode_id(name: bytes, id: int) -> bytes:
    """Encode a turn's id that stands in table ``info``."""
    return seal(name, _encode(id))


def decode_id(name: bytes, raw: bytes | memoryview) -> int:
    """Decode a turn's id in table ``info``. Raises StoreDamagedError."""
    try:
        return _id.decode(unseal(name, raw) if raw[:1] == _MARK[:1] else raw)
    except (*_UNREADABLE, ValueError) as error:
        raise StoreDamagedError(f"the record {name.decode()!r} is damaged: {error}", fix=FIX) from None


class _Listed(Session, frozen=True, array_like=True):
    """A session as a list of its fields; other versions may have more or fewer."""

    def session(self) -> Session:
        return Session(*msgspec.structs.astuple(self))


_session = msgspec.msgpack.Decoder(list[Any])


def encode_session(session: Session) -> bytes:
    """Encode a session, without its id, which is its key."""
    return seal(bytes.fromhex(session.id), _encode(msgspec.structs.astuple(session)[1:]))


def decode_session(id: bytes, raw: bytes | memoryview) -> Session:
    """Decode a session of any version. Raises StoreDamagedError."""
    try:
        body = unseal(id, raw) if raw[:1] == _MARK[:1] else raw
        return msgspec.convert([id.hex(), *_session.decode(body)], _Listed).session()
    except (*_UNREADABLE, ValueError) as error:
        raise StoreDamagedError(f"session {id.hex()} is damaged: {error}", fix=FIX) from None
