"""Messages of the bus as values; `ctxreuse.bus.protocol.wire` has their meaning and encoding.

Field types carry the limits, so that decoding checks them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from ctxreuse.identity.keys import KEY_BYTES

__all__ = [
    "MAX_DRAFT",
    "MAX_KEYS",
    "MAX_LEVELS",
    "MAX_MODELS",
    "MAX_PAYLOAD",
    "MAX_PIECES",
    "MAX_PREFIXES",
    "MAX_PROFILE",
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
    "Draft",
    "DrawRule",
    "Fetch",
    "FetchCard",
    "Forget",
    "Have",
    "Hello",
    "JudgeRule",
    "LevelRequest",
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
    "Verdict",
    "Verify",
    "Want",
    "Welcome",
]

MAX_PAYLOAD = 16 << 20
MAX_KEYS = 8192
MAX_TOKENS = 1 << 18
MAX_PREFIXES = 1 << 16
MAX_PIECES = 4096
PREFIX_BYTES = 8
MAX_SPACES, MAX_TEXT = 512, 512
MAX_LEVELS, MAX_MODELS, MAX_MODEL = 32, 16, 1 << 18
#: Tokens of a draft, and stop tokens of an answer, at most.
MAX_DRAFT, MAX_STOPS = 1024, 256
#: Bytes of a card; one of SmolLM2 has 13 MB.
MAX_PROFILE = 256 << 20

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
    """First message of a connection, from the edge; ``forgets``: it would send `Forget`."""

    TYPE: ClassVar[int] = 1
    oldest: _Number
    newest: _Number
    node: _Node
    program: _Text = ""
    spaces: _Spaces = ()
    max_payload: _LinkPayload = 4 << 20
    epoch: _Number = 0
    version: _Number = 0
    models: _Models = ()
    forgets: Any = False  # only True counts: a recorded other version has something else here


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """A cloud's limits of a link: bytes per payload, open fetches and prefills, open puts, bytes per block, payloads
    that credit may run ahead, milliseconds of heartbeat and silence."""

    max_payload: _LinkPayload = 4 << 20
    transfers: Annotated[int, Meta(ge=1, le=4096)] = 32
    puts: Annotated[int, Meta(ge=1, le=64)] = 2
    max_block: _Size = 64 << 20
    window: _Window = 256
    heartbeat_ms: _Millis = 2_000
    silence_ms: _Millis = 10_000


class Welcome(Body, frozen=True, array_like=True):
    """The cloud's answer to hello: version, node, the link's salt and terms; whether it takes `Forget`; descriptions of
    the spaces in which it takes `Verify`."""

    TYPE: ClassVar[int] = 2
    version: _Number
    node: _Node
    epoch: _Id
    salt: Annotated[bytes, Meta(min_length=16, max_length=16)]
    spaces: _Spaces = ()
    terms: Terms = Terms()
    packs: _Levels = ()
    cards: _Cards = ()
    forgets: Any = False  # only True counts: a recorded other version has something else here
    verifies: Any = []  # only a list of descriptions counts


class LevelRequest(msgspec.Struct, frozen=True, array_like=True):
    """At which levels a receiver accepts blocks, and when it needs them.

    Args:
        levels: Accepted besides ``exact``, least damage first, as block headers spell them.
        bandwidth: What the receiver sees of the link, bytes/s (0: unknown).
        deadline_ms: Time from opening the request until the first ``expect`` items should be there (0: any).
        expect: Number of items, in the order of sending, that the deadline is for (0: all).
        refine: Send refinements of lossy blocks once everything else is sent.
        spared: The first so many ``levels`` are for refinements only, unless one of them is the quickest.
    """

    levels: _Levels = ()
    bandwidth: _Number = 0
    deadline_ms: _Number = 0
    expect: _Number = 0
    refine: bool = False
    spared: Annotated[int, Meta(ge=0, le=MAX_LEVELS)] = 0


class Refused(Body, frozen=True, array_like=True):
    """A request (id 0: the link) is refused or aborted."""

    TYPE: ClassVar[int] = 3
    id: _Number
    code: _Code
    text: _Text = ""
    round: _Number = 0


class Announce(Body, frozen=True, array_like=True):
    """Part ``part`` of ``parts`` of what came and went from version ``base`` (0: from nothing) to ``version``.

    ``withdrawn``: what was dropped because of who gave it, whenever that was; copies are not to be used.
    """

    TYPE: ClassVar[int] = 4
    seq: _Id
    base: _Number
    version: _Number
    part: _Number
    parts: _Number
    added: _Prefixes = b""
    removed: _Prefixes = b""
    withdrawn: _Prefixes = b""


class Resync(Body, frozen=True, array_like=True):
    """Ask for a new snapshot of announcements."""

    TYPE: ClassVar[int] = 5


class Match(Body, frozen=True, array_like=True):
    """Ask how many leading blocks are stored."""

    TYPE: ClassVar[int] = 6
    id: _Id
    space: _Digest
    keys: _Keys


class Matched(Body, frozen=True, array_like=True):
    """Leading blocks stored, blocks up to the last state, their bytes (0: unknown)."""

    TYPE: ClassVar[int] = 7
    id: _Id
    blocks: _Item
    state_blocks: _Item
    nbytes: _Number = 0


class Fetch(Body, frozen=True, array_like=True):
    """Ask for stored blocks, except for what ``have`` names."""

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
    level_request: LevelRequest = LevelRequest()


class Payload(Body, frozen=True, array_like=True):
    """Bytes of one or more items, concatenated in the second frame.

    ``pace`` of encoded blocks (else empty): microseconds since the last payload in which nothing was ready, and those
    that this sender takes to encode a MiB of raw planes, packed and lossy.
    """

    TYPE: ClassVar[int] = 9
    id: _Id
    round: _Id
    pieces: Annotated[tuple[Piece, ...], Meta(min_length=1, max_length=MAX_PIECES)]
    pace: Pace = ()


class Credit(Body, frozen=True, array_like=True):
    """Allow ``upto`` payloads in all in this round."""

    TYPE: ClassVar[int] = 10
    id: _Id
    round: _Id
    upto: _Credit
    bandwidth: _Number = 0


class Done(Body, frozen=True, array_like=True):
    """A request is complete, after so many payloads in this round."""

    TYPE: ClassVar[int] = 11
    id: _Id
    round: _Id
    payloads: _Number = 0


class Cancel(Body, frozen=True, array_like=True):
    """Abort a request."""

    TYPE: ClassVar[int] = 12
    id: _Id


class Put(Body, frozen=True, array_like=True):
    """Offer consecutive blocks after ``parent``; with ``state`` the state at the end of one block."""

    TYPE: ClassVar[int] = 13
    id: _Id
    round: _Id
    space: _Digest
    parent: _Digest
    keys: _Keys
    sizes: Annotated[tuple[_Size, ...], Meta(min_length=1, max_length=MAX_KEYS)]
    state: bool = False


class Want(Body, frozen=True, array_like=True):
    """Which offered blocks to send, ascending, and the first credit."""

    TYPE: ClassVar[int] = 14
    id: _Id
    round: _Id
    items: Annotated[tuple[_Item, ...], Meta(max_length=MAX_KEYS)]
    credit: _Credit = 0


class Stored(Body, frozen=True, array_like=True):
    """One block of a put was accepted (``reason`` empty) or not."""

    TYPE: ClassVar[int] = 15
    id: _Id
    round: _Id
    item: _Item
    reason: _Code = ""


class Skip(Body, frozen=True, array_like=True):
    """The edge no longer has one block of a put."""

    TYPE: ClassVar[int] = 16
    id: _Id
    round: _Id
    item: _Item


class Prefill(Body, frozen=True, array_like=True):
    """Compute and send the whole blocks of these tokens from block ``first`` on."""

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
    level_request: LevelRequest = LevelRequest()


class Ping(Body, frozen=True, array_like=True):
    """Answered by a `Pong` with the same number."""

    TYPE: ClassVar[int] = 18
    number: _Number


class Pong(Body, frozen=True, array_like=True):
    """The answer to a ping."""

    TYPE: ClassVar[int] = 19
    number: _Number


class Bye(Body, frozen=True, array_like=True):
    """This side is closing: no new requests, running ones are finished."""

    TYPE: ClassVar[int] = 20
    text: _Text = ""


class FetchCard(Body, frozen=True, array_like=True):
    """Ask for the card of this digest for the model of ``space``, sent as item 0."""

    TYPE: ClassVar[int] = 21
    id: _Id
    round: _Id
    space: _Digest
    digest: _Digest
    payload: _PayloadSize = 0
    have: _Haves = ()
    credit: _Credit = 0


class Forget(Body, frozen=True, array_like=True):
    """Ask to delete blocks of this tenant, with all that is stored below them; answered by `Matched`."""

    TYPE: ClassVar[int] = 22
    id: _Id
    keys: _Keys


class DrawRule(msgspec.Struct, frozen=True, array_like=True):
    """How the tokens of an answer are drawn, see `ctxreuse.engines.sampling.SamplingParams`; the default is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: _Number = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: _Number = 0


class JudgeRule(msgspec.Struct, frozen=True, array_like=True):
    """How a step is judged: ``kind``: by its ``likelihood`` (mean log-probability of its tokens, nats) or by the
    ``digit`` that the model gives it; it is accepted from ``threshold`` on (None: that of the cloud's calibration)."""

    kind: Literal["likelihood", "digit"]
    threshold: float | None = None


class Verify(Body, frozen=True, array_like=True):
    """Ask for the answer to ``tokens``, of ``count`` tokens at most, ending with one of ``stops``.

    ``width``: tokens of a draft that a pass may check; ``draft``: how the answer may begin, as in `Draft`. With
    ``judge`` that is a step: one that is accepted is the whole answer, in place of any other the cloud writes its own.
    """

    TYPE: ClassVar[int] = 23
    id: _Id
    space: _Digest
    tokens: Annotated[bytes, Meta(min_length=4, max_length=4 * MAX_TOKENS)]
    count: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    width: Annotated[int, Meta(ge=0, le=MAX_DRAFT)] = 0
    stops: Annotated[tuple[_Number, ...], Meta(max_length=MAX_STOPS)] = ()
    rule: DrawRule = DrawRule()
    draft: Annotated[bytes, Meta(max_length=4 * MAX_DRAFT)] = b""
    judge: JudgeRule | None = None


class Draft(Body, frozen=True, array_like=True):
    """Tokens with which the answer may go on at its token ``start``; those that were drafted from there on are void."""

    TYPE: ClassVar[int] = 24
    id: _Id
    start: _Number
    tokens: Annotated[bytes, Meta(min_length=4, max_length=4 * MAX_DRAFT)]


class Verdict(Body, frozen=True, array_like=True):
    """The next tokens of the answer, from its token ``start`` on; none: the prompt is being computed.

    Of ``drafted`` tokens that were checked the first ``accepted`` were right. The pass took ``micros`` for ``rows``
    tokens of ``contexts`` contexts (0 rows: prompts were in it too). ``cached``: tokens of the prompt that were here.
    ``score``: of a step that was judged, all of which is ``accepted``, or nothing.
    """

    TYPE: ClassVar[int] = 25
    id: _Id
    start: _Number
    tokens: Annotated[bytes, Meta(max_length=4 * (MAX_DRAFT + 1))] = b""
    drafted: Annotated[int, Meta(ge=0, le=MAX_DRAFT)] = 0
    accepted: Annotated[int, Meta(ge=0, le=MAX_DRAFT)] = 0
    rows: _Number = 0
    contexts: _Number = 0
    micros: _Number = 0
    cached: _Number = 0
    score: float | None = None


Message: TypeAlias = (
    Hello | Welcome | Refused | Announce | Resync | Match | Matched | Fetch | Payload | Credit | Done | Cancel | Put
    | Want | Stored | Skip | Prefill | Ping | Pong | Bye | FetchCard | Forget
    | Verify | Draft | Verdict
)  # fmt: skip
