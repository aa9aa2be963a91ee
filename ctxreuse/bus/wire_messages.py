"""The messages of the bus as values; `ctxreuse.bus.wire` says what they mean and how they become bytes.

Types carry the limits of each field, so that decoding checks them before anything else sees a message.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from ctxreuse.keys import KEY_BYTES

__all__ = [
    "MAX_CARD",
    "MAX_KEYS",
    "MAX_LEVELS",
    "MAX_PAYLOAD",
    "MAX_PIECES",
    "MAX_PREFIXES",
    "MAX_SPACES",
    "MAX_TEXT",
    "MAX_TOKENS",
    "PREFIX_BYTES",
    "Announce",
    "Body",
    "Bye",
    "Cancel",
    "CardName",
    "Credit",
    "Done",
    "Fetch",
    "FetchCard",
    "Have",
    "Hello",
    "Match",
    "Matched",
    "Message",
    "Pace",
    "Payload",
    "Piece",
    "Ping",
    "Pong",
    "Prefill",
    "Put",
    "Refused",
    "Resync",
    "Skip",
    "Stored",
    "Terms",
    "Want",
    "Welcome",
    "Wish",
]

MAX_PAYLOAD = 16 << 20
MAX_KEYS = 8192
MAX_TOKENS = 1 << 18
MAX_PREFIXES = 1 << 16
MAX_PIECES = 4096
PREFIX_BYTES = 8
MAX_SPACES, MAX_TEXT = 512, 512
MAX_LEVELS, MAX_MODELS, MAX_MODEL = 32, 16, 1 << 18
#: Bytes of a card; one of SmolLM2 has 13 MB.
MAX_CARD = 256 << 20

_Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Id = Annotated[int, Meta(ge=1, lt=1 << 62)]
_Item = Annotated[int, Meta(ge=0, le=MAX_KEYS)]
# Blocks, a state, and a refinement of each block.
_Sent = Annotated[int, Meta(ge=0, le=2 * MAX_KEYS)]
_Text = Annotated[str, Meta(max_length=MAX_TEXT)]
_Level = Annotated[str, Meta(max_length=64)]
_Levels = Annotated[tuple[_Level, ...], Meta(max_length=MAX_LEVELS)]
_Code = Annotated[str, Meta(max_length=32)]
_Digest = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Node = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Keys = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES * MAX_KEYS)]
_Spaces = Annotated[tuple[_Digest, ...], Meta(max_length=MAX_SPACES)]
_Prefixes = Annotated[bytes, Meta(max_length=PREFIX_BYTES * MAX_PREFIXES)]
_Credit = Annotated[int, Meta(ge=0, lt=1 << 40)]
_Size = Annotated[int, Meta(ge=1, lt=1 << 34)]
_PayloadSize = Annotated[int, Meta(ge=0, le=MAX_PAYLOAD)]
_LinkPayload = Annotated[int, Meta(ge=4096, le=MAX_PAYLOAD)]
_Millis = Annotated[int, Meta(ge=1, le=3_600_000)]

#: Item, first byte in it, and number of bytes.
Piece: TypeAlias = tuple[_Sent, _Number, Annotated[int, Meta(ge=1, le=MAX_PAYLOAD)]]
#: Item, how many of its bytes are here already, and the checksum of its header.
Have: TypeAlias = tuple[_Sent, _Size, Annotated[bytes, Meta(min_length=8, max_length=8)]]
_Haves = Annotated[tuple[Have, ...], Meta(max_length=2 * MAX_KEYS + 1)]
#: See `Payload`.
Pace: TypeAlias = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 40)], ...], Meta(max_length=3)]
_Window = Annotated[int, Meta(ge=1, le=1 << 16)]
#: Digests of a model space and of a card for its model.
CardName: TypeAlias = tuple[_Digest, _Digest]
_Cards = Annotated[tuple[CardName, ...], Meta(max_length=MAX_LEVELS)]
_Models = Annotated[tuple[Annotated[bytes, Meta(max_length=MAX_MODEL)], ...], Meta(max_length=MAX_MODELS)]


class Body(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages; ``TYPE`` is the number in the prelude."""

    TYPE: ClassVar[int]


class Hello(Body, frozen=True, array_like=True):
    """An edge introduces itself; first message of a connection."""

    TYPE: ClassVar[int] = 1
    oldest: _Number
    newest: _Number
    node: _Node
    program: _Text = ""
    spaces: _Spaces = ()
    max_payload: _LinkPayload = 1 << 20
    epoch: _Number = 0
    version: _Number = 0
    models: _Models = ()


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """What a cloud allows on a link: bytes a payload, open fetches and prefills, open puts, bytes a block, how far
    credit may run ahead, and milliseconds of heartbeat and silence."""

    max_payload: _LinkPayload = 1 << 20
    transfers: Annotated[int, Meta(ge=1, le=4096)] = 32
    puts: Annotated[int, Meta(ge=1, le=64)] = 2
    max_block: _Size = 64 << 20
    window: _Window = 256
    heartbeat_ms: _Millis = 2_000
    silence_ms: _Millis = 10_000


class Welcome(Body, frozen=True, array_like=True):
    """The cloud's answer to hello: version, who it is, the link's salt and terms."""

    TYPE: ClassVar[int] = 2
    version: _Number
    node: _Node
    epoch: _Id
    salt: Annotated[bytes, Meta(min_length=16, max_length=16)]
    spaces: _Spaces = ()
    terms: Terms = Terms()
    packs: _Levels = ()
    cards: _Cards = ()


class Wish(msgspec.Struct, frozen=True, array_like=True):
    """At which levels blocks may come: ``levels`` besides ``exact``, the least damage first; those of a card name it.

    ``bandwidth`` (bytes/s, 0: not known) is what the receiver sees of the link, ``deadline_ms`` the time from opening
    the request on by which the first ``expect`` items sent (0: all) should be there (0: no matter when), ``refine``:
    whether finer numbers are worth sending after everything else. The ``spared`` first of ``levels`` are only for that,
    as the receiver would wait for them, unless one is the quickest.
    """

    levels: _Levels = ()
    bandwidth: _Number = 0
    deadline_ms: _Number = 0
    expect: _Number = 0
    refine: bool = False
    spared: Annotated[int, Meta(ge=0, le=MAX_LEVELS)] = 0


class Refused(Body, frozen=True, array_like=True):
    """A request (or with id 0 the link) is not served, or not to its end."""

    TYPE: ClassVar[int] = 3
    id: _Number
    code: _Code
    text: _Text = ""
    round: _Number = 0


class Announce(Body, frozen=True, array_like=True):
    """Part ``part`` of ``parts`` of what came and went from version ``base`` (0: from nothing) to ``version``."""

    TYPE: ClassVar[int] = 4
    seq: _Id
    base: _Number
    version: _Number
    part: _Number
    parts: _Number
    added: _Prefixes = b""
    removed: _Prefixes = b""


class Resync(Body, frozen=True, array_like=True):
    """Announce anew, from nothing."""

    TYPE: ClassVar[int] = 5


class Match(Body, frozen=True, array_like=True):
    """How many leading blocks of these are held?"""

    TYPE: ClassVar[int] = 6
    id: _Id
    space: _Digest
    keys: _Keys


class Matched(Body, frozen=True, array_like=True):
    """Leading blocks held, blocks up to the last state, bytes of all those (0: not known)."""

    TYPE: ClassVar[int] = 7
    id: _Id
    blocks: _Item
    state_blocks: _Item
    nbytes: _Number = 0


class Fetch(Body, frozen=True, array_like=True):
    """Send these blocks, apart from what is here."""

    TYPE: ClassVar[int] = 8
    id: _Id
    round: _Id
    space: _Digest
    keys: _Keys
    state: bool = False
    order: Literal["layers", "tail", "front"] = "layers"
    payload: _PayloadSize = 0
    have: _Haves = ()
    credit: _Credit = 0
    wish: Wish = Wish()


class Payload(Body, frozen=True, array_like=True):
    """Bytes of one or more items; they are in the second frame, in a row.

    ``pace`` of what is encoded on the way (else empty): microseconds since the last payload in which nothing was ready
    to be sent, and those that encoding a MiB of raw planes takes this sender, packed and lossy.
    """

    TYPE: ClassVar[int] = 9
    id: _Id
    round: _Id
    pieces: Annotated[tuple[Piece, ...], Meta(min_length=1, max_length=MAX_PIECES)]
    pace: Pace = ()


class Credit(Body, frozen=True, array_like=True):
    """So many payloads may have been sent in this round."""

    TYPE: ClassVar[int] = 10
    id: _Id
    round: _Id
    upto: _Credit
    bandwidth: _Number = 0


class Done(Body, frozen=True, array_like=True):
    """The cloud has done all of a request, and sent so many payloads for it in this round."""

    TYPE: ClassVar[int] = 11
    id: _Id
    round: _Id
    payloads: _Number = 0


class Cancel(Body, frozen=True, array_like=True):
    """The edge wants no more of a request."""

    TYPE: ClassVar[int] = 12
    id: _Id


class Put(Body, frozen=True, array_like=True):
    """Blocks that the edge offers, consecutive, after ``parent``; with ``state`` the state at the end of one block."""

    TYPE: ClassVar[int] = 13
    id: _Id
    round: _Id
    space: _Digest
    parent: _Digest
    keys: _Keys
    sizes: Annotated[tuple[_Size, ...], Meta(min_length=1, max_length=MAX_KEYS)]
    state: bool = False


class Want(Body, frozen=True, array_like=True):
    """Which of the offered blocks to send, ascending, and how many payloads at first."""

    TYPE: ClassVar[int] = 14
    id: _Id
    round: _Id
    items: Annotated[tuple[_Item, ...], Meta(max_length=MAX_KEYS)]
    credit: _Credit = 0


class Stored(Body, frozen=True, array_like=True):
    """One block of a put was taken (``reason`` empty) or not."""

    TYPE: ClassVar[int] = 15
    id: _Id
    round: _Id
    item: _Item
    reason: _Code = ""


class Skip(Body, frozen=True, array_like=True):
    """One block of a put is gone at the edge."""

    TYPE: ClassVar[int] = 16
    id: _Id
    round: _Id
    item: _Item


class Prefill(Body, frozen=True, array_like=True):
    """Make the whole blocks of these tokens from block ``first`` on, and send them."""

    TYPE: ClassVar[int] = 17
    id: _Id
    round: _Id
    space: _Digest
    tokens: Annotated[bytes, Meta(min_length=4, max_length=4 * MAX_TOKENS)]
    first: _Number = 0
    state: bool = False
    payload: _PayloadSize = 0
    have: _Haves = ()
    credit: _Credit = 0
    wish: Wish = Wish()


class Ping(Body, frozen=True, array_like=True):
    """Is anybody there? Answered with the same number."""

    TYPE: ClassVar[int] = 18
    number: _Number


class Pong(Body, frozen=True, array_like=True):
    """The answer to a ping."""

    TYPE: ClassVar[int] = 19
    number: _Number


class Bye(Body, frozen=True, array_like=True):
    """This side goes away: no new requests, what runs is finished."""

    TYPE: ClassVar[int] = 20
    text: _Text = ""


class FetchCard(Body, frozen=True, array_like=True):
    """Send the card of this digest for the model of ``space``, as the one item 0."""

    TYPE: ClassVar[int] = 21
    id: _Id
    round: _Id
    space: _Digest
    digest: _Digest
    payload: _PayloadSize = 0
    have: _Haves = ()
    credit: _Credit = 0


Message: TypeAlias = (
    Hello
    | Welcome
    | Refused
    | Announce
    | Resync
    | Match
    | Matched
    | Fetch
    | Payload
    | Credit
    | Done
    | Cancel
    | Put
    | Want
    | Stored
    | Skip
    | Prefill
    | Ping
    | Pong
    | Bye
    | FetchCard
)
