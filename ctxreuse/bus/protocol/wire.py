"""The bus protocol: messages between two nodes as bytes and back, without input or output.

An **edge** connects to a **cloud**. The transport (ZeroMQ DEALER and ROUTER in `ctxreuse.bus.transport`) keeps the
frames of a message together and the messages of one connection in order; it may lose the connection at any moment, and
with it what was on its way. Nothing else is assumed.

Frames
======
A message is one or two frames. The first holds prelude and body, the second, of `payload` messages only, bare bytes of
blocks. Integers of the prelude are little-endian::

    offset  size  field
    0       4     magic "ctxb"
    4       2     version of the protocol (1)
    6       1     type, see below
    7       1     flags: bit 0 = a payload frame follows, all others 0
    8       …     body: MessagePack array of the message's fields in the order given below; at most MAX_HEADER bytes

Messages
========
``E`` is sent by the edge, ``C`` by the cloud. ``id`` is chosen by the edge, from 1, never used twice in the life of its
session; everything about one request bears its id. ``round`` counts how often the edge has opened this request (once
for every connection that it lived on); whatever bears an older round is ignored, so nothing of a lost connection
counts. *keys* are block keys of 32 bytes each, in a row, of consecutive blocks::

    type  name      by  fields
    1     hello     E   oldest, newest (versions spoken), node[16], program, spaces[32 each], max_payload,
                        epoch and version (of the announcements that it still knows; 0, 0: none), models
                        (descriptions of spaces, MessagePack, whose digests are among spaces), forgets (it would
                        send *forget*; left out if not)
    2     welcome   C   version (spoken from now on), node[16], epoch (of this life of the cloud), salt[16] (for keys on
                        this link), spaces[32 each] (in which it prefills), terms: max_payload, transfers, puts,
                        max_block, window, heartbeat_ms, silence_ms; packs (levels without a card that it can
                        send), cards [(space[32], card[32])] (that it can encode with, and has to give), forgets
                        (it takes *forget*, and the edge would send it; left out if not), verifies (descriptions of
                        the spaces in which it takes *verify*; left out if there are none)
    3     refused   EC  id (0: the whole link), code, text, round
    4     announce  C   seq, base, version, part, parts, added and removed (first 8 bytes of each key, in a row),
                        withdrawn (likewise; left out if there are none)
    5     resync    E   (none)
    6     match     E   id, space[32], keys
    7     matched   C   id, blocks, state_blocks, nbytes
    8     fetch     E   id, round, space[32], keys, state, order, payload (bytes wanted a payload; 0: max_payload),
                        have [(item, bytes, check)], credit, level request: levels, bandwidth, deadline_ms,
                        expect, refine, spared
    9     payload   EC  id, round, pieces [(item, start, bytes)], pace (of what is encoded: microseconds in which
                        nothing was ready, and a MiB takes packed and lossy); the second frame has these bytes in a row
    10    credit    EC  id, round, upto (payloads that may have been sent in this round, in all), bandwidth (that the
                        receiver sees now, bytes/s; 0: not known)
    11    done      C   id, round, payloads: all was sent, in so many payloads (fetch, prefill), or all was taken or
                        refused (put)
    12    cancel    E   id
    13    put       E   id, round, space[32], parent[32], keys, sizes (bytes of each block), state (not blocks, but
                        the state at the end of the one that keys names; parent is that block's)
    14    want      C   id, round, items (indices of keys; what is not named is there already), credit
    15    stored    C   id, round, item, reason ("" = taken)
    16    skip      E   id, round, item: the edge has this block no more
    17    prefill   E   id, round, space[32], tokens (int32 little-endian, from the start), first, state, payload,
                        have, credit, level
                        request
    18    ping      E   number
    19    pong      C   number
    20    bye       EC  text: no new requests; what is on its way is finished
    21    fetchcard E   id, round, space[32], digest[32], payload, have, credit
    22    forget    E   id, keys (not consecutive): delete these blocks and all below them, if they are this tenant's;
                        answered by *matched* (blocks: how many were stored); only if welcome says ``forgets``
    23    verify    E   id, space[32], tokens (int32 little-endian, the prompt from its start), count (tokens of the
                        answer at most), width (of a draft that are checked at once), stops (token ids), rule
                        (temperature, top_p, top_k, min_p, repetition, presence and frequency penalty, seed), draft
                        (int32, as in *draft* from 0 on), judge (nil, or kind and threshold: then the draft is
                        a step, and is taken or rewritten as a whole); only in a space that welcome ``verifies``
    24    draft     E   id, start, tokens (int32: what may follow the first ``start`` tokens of the answer)
    25    verdict   C   id, start, tokens (int32: the answer from there on), drafted, accepted, rows, contexts, micros,
                        cached, score (of a step; nil: none was judged)

**Items** of a fetch are the blocks in the order of ``keys`` (of a prefill: the blocks of ``tokens`` from block
``first`` on); with ``state`` there is one more, the state at the end of the last block. Each item is a sealed block
(`ctxreuse.block.format`) and its bytes are sent from first to last, so what has arrived of it is one number, and a gap
means that a message was lost. Between items the sender follows ``order``: ``layers`` (all heads, the state, then layer
0 of all blocks, layer 1, …), ``tail`` (whole items, last first) or ``front`` (whole items, first first; put and prefill
always, a put one block after another in the order of ``want``). A payload carries whole *parts* (head, or planes of one
layer), only a part that is larger than a payload is split.

**Levels.** Without a level request blocks come as ``exact``. A request names what else may come (`block.levels`:
``exact+rans``, lossy levels with the card that they need), so no peer ever sends more damage than was allowed; what it
sends is in each block's head, and a level that was not named ends the fetch. *Who picks:* the receiver allows and tells
what only it knows, the link as it arrives and the time by which blocks are worth more than computing them; the sender
picks, as only it knows what is packed already and how large it became. It picks again for every few blocks: the least
damage of which all that is left would still be there in time, and where nothing would, what is there first. Of exact
ones, ``exact+rans`` wherever the link is slower than the coder. In ``layers``, where all heads go first, it packs the
whole context before layer 0 goes out; in ``tail`` each block may have its own level::

    receiver  --- request: levels, 2.5 MB/s, 900 ms, expect 20 --->  sender: 20 blocks of 90 kB fit: kl-0.05
    receiver  <-- block 31 kl-0.05, block 30 kl-0.05 ----------
    receiver  --- credit upto=12, 12 MB/s --------------------->  sender: now 18 of 250 kB fit: kl-0.01
    receiver  <-- block 29 kl-0.01, ... -----------------------
    receiver  <-- refinement of block 31, of block 30 ... -----   with ``refine``, when nothing else is left to send

What comes slowly may be made slowly or sent slowly: ``pace`` tells the receiver which, so that it neither takes the
link for slower than it is nor gives up a fetch that is being encoded, and knows what encoding costs at that peer.

**Refinements.** With ``refine`` one more item for each block follows the last (state or block): its refinement, sent in
the same order after all of those. A block that was sent at a level that nothing refines has none; ``done`` says when
all that there are were sent.

**Cards** (calibration profiles) are content: named by SHA-256 in welcome, sent as item 0 of a *fetchcard* (unsealed;
``check`` is bytes 24 to 32 of it), compared with the requested digest before anything of it is read. A cloud names
only cards of models that this edge described in hello; an edge asks only for those.

**Answers.** A *verify* asks for an answer of the cloud's model, token by token, while the edge drafts it. The cloud
decodes as if there were no drafts, and sends a *verdict* for each pass. The edge says ahead of the verdicts how the
answer may go on; a pass then checks as many of these tokens as ``width`` allows, and where one is wrong, what was
drafted beyond is dropped. A draft for a place that the cloud has passed counts from its first new token on, if it was
right until there; one that begins behind a gap counts for nothing. So a draft that comes late, or is wrong, delays no
token by more than its rows, and the answer is the one that the cloud gives without drafts. A *verdict* without tokens
says that the prompt is being computed. ``done`` ends the answer (round 1), ``cancel`` and a cut give it up: the edge
goes on by itself, and a *verify* is never opened again on another connection::

    E                                   C
    |-- verify 5 (prompt, draft 0..3) ->|   the context is found here, or computed
    |<-- verdict 5 start=0 2 of 4 right |   3 tokens: two of the draft, and what follows instead of the third
    |-- draft 5 start=3, 8 tokens ----->|
    |-- draft 5 start=11, 8 tokens ---->|   as if all 8 were right
    |<-- verdict 5 start=3 1 token -----|   the first draft was still on its way
    |<-- verdict 5 start=4 8 tokens ----|

**Credit** counts payload messages. The receiver says up to how many may have been sent in this round; the sender never
sends more. Saying it twice, or an old number, does nothing.

**Resume.** After a cut the edge connects, says hello and opens each of its live requests again, with the next round.
``have`` names how many bytes of which items it has; ``check`` is the header checksum (8 bytes at offset 24 of the
block) so that bytes of two encodings are never mixed: if it differs, the cloud refuses with ``changed``. A put
is offered again and ``want`` says what is still missing. Matches are sent again. All requests are idempotent.

**Announcements** let the edge know without a round trip what the cloud stores for its tenant. ``base`` 0 is nothing,
else the message changes version ``base`` into ``version``, which holds when ``parts`` messages (``part`` 0, 1, …) have
come. ``seq`` rises by one a message of a connection, from 1. After a gap the edge knows nothing, sends resync, and gets
a snapshot. An edge that comes back names in hello the version that it knows, and gets only the changes since. A new
``epoch`` (the cloud was restarted) makes everything that was announced void. ``withdrawn`` names keys that the cloud
dropped because it trusts their giver no more (a liar, a revoked key), all that it remembers on each connection and
again when there are more: an edge drops the copies that this cloud sent it.

**Silence.** The edge pings every ``heartbeat_ms`` and so measures the round trip; a side that received nothing for
``silence_ms`` gives the connection up. Both then do as after a cut.

Sequence
========
::

    E                                   C
    |-- hello ------------------------->|   admitted by its key, not by what it says
    |<------------------------ welcome -|
    |<-- announce 1 base=0 part 0/9 ----|   snapshot, between payloads
    |-- match 1 ----------------------->|
    |<----------------------- matched 1 |
    |-- fetch 2 round 1 credit=8 ------>|
    |<--- payload 2.1 (heads of all) ---|
    |<--- payload 2.1 (layer 0 ...) ----|
    |-- credit 2.1 upto=12 ------------>|   sent at half the window: the sender never has to stop
    |<--- payload ... --- X             |   the connection is cut
    |-- hello ------------------------->|
    |<------------------------ welcome -|
    |-- fetch 2 round 2 have=[...] ---->|   nothing that is here is sent again
    |<--- payload 2.2 ... --------------|
    |<------------------------ done 2.2 |
    |                                   |
    |-- put 3 round 1 sizes ----------->|
    |<------------- want 3.1 credit=4 --|   only what is missing
    |-- payload 3.1 (block 0 ...) ----->|
    |<------------ stored 3.1 item 0 "" |   or why it was not taken
    |<------------- credit 3.1 upto=6 --|
    |<------------------------ done 3.1 |
    |                                   |
    |-- prefill 4 round 1 tokens ------>|
    |<--- payload 4.1 (block 0) --------|   as soon as it is made
    |<--- payload 4.1 (block 1) ... ----|
    |<------------------------ done 4.1 |
    |                                   |
    |<----------------------------- bye |   drain: running requests end, new ones are refused
    |                                   X

Limits
======
A header is at most 2 MiB, a payload 16 MiB and never more than the receiver's ``max_payload``; at most 8,192 keys and
262,144 tokens a message, 65,536 prefixes an announcement, 4,096 pieces a payload, 512 spaces a hello, 512 characters a
text, 32 levels a request, 16 models (256 KiB each) a hello or welcome, 256 MiB a card, 1,024 tokens a draft, 256 stops
an answer; a pass checks 64 tokens of a draft, and of more than 64 drafts between two verdicts the last count for
nothing. Open fetches and prefills of an edge are of 8,192 blocks together, its open answers 16 (else ``busy``). All
numbers are below 2^62. Memory follows from bytes that are there, never
from a number in them. What breaks a rule is a ProtocolError; the side that sees it closes the connection.

Codes of refused: ``version``, ``unknown`` (this key is not admitted), ``busy`` (too many open), ``drain``, ``gone``
(no longer stored), ``changed``, ``stalled`` (the peer made no progress for too long), ``space``, ``tokens``,
``judge`` (this model is not trusted to judge a step so), ``failed``.

Versions
========
Fields may be appended to a message within a version; a receiver ignores those that it does not know. A message may be
added if it is only sent to a peer that has shown, by such a field, that it knows it: no fetchcard goes to a cloud that
named no card, no verify to one that named no space for it, and an unknown level request is answered with exact blocks.
All else is a new version. In every
version prelude, ``hello`` and ``refused`` begin as they do here. Hello names the oldest and newest version that the
edge speaks; the cloud answers with the highest that both speak, or refuses with ``version`` naming both.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import isfinite
from typing import Any, TypeAlias, cast

import msgspec

from ctxreuse.bus.protocol.messages import (
    MAX_KEYS,
    MAX_PAYLOAD,
    PREFIX_BYTES,
    Announce,
    Body,
    Draft,
    Fetch,
    Forget,
    Hello,
    Match,
    Message,
    Payload,
    Prefill,
    Put,
    Refused,
    Verdict,
    Verify,
    Want,
    Welcome,
)
from ctxreuse.errors import ProtocolError
from ctxreuse.identity.keys import KEY_BYTES

__all__ = ["CODES", "MAX_HEADER", "VERSION", "Frame", "decode", "encode", "join_keys", "split_keys"]

VERSION = 1
#: Why a request or a link is refused.
CODES = ("version", "unknown", "busy", "drain", "gone", "changed", "stalled", "space", "tokens", "judge", "failed")
MAGIC = b"ctxb"
MAX_HEADER = 2 << 20
_HAS_PAYLOAD = 1
_PRELUDE = struct.Struct("<4sHBB")

#: One frame of a message, as it goes to or comes from the transport.
Frame: TypeAlias = bytes | bytearray | memoryview

_TYPES = cast("tuple[type[Body], ...]", Message.__args__)
_DECODERS = {kind.TYPE: (kind.__name__.lower(), msgspec.msgpack.Decoder(kind)) for kind in _TYPES}
_PRELUDES = {kind: _PRELUDE.pack(MAGIC, VERSION, kind.TYPE, _HAS_PAYLOAD * (kind is Payload)) for kind in _TYPES}
_FOR_ALL_VERSIONS = (Hello.TYPE, Refused.TYPE)
_encoder = msgspec.msgpack.Encoder()
# msgspec lets the UnicodeDecodeError of a malformed string through as it is.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def join_keys(keys: Sequence[bytes]) -> bytes:
    """Concatenate keys as messages carry them. Raises ValueError for none, too many, or a key that has not 32 bytes."""
    row = b"".join(keys)
    if len(row) != KEY_BYTES * len(keys) or not 0 < len(keys) <= MAX_KEYS:
        raise ValueError(f"{len(keys)} keys of {len(row)} bytes together in one message")
    return row


def split_keys(row: bytes, width: int = KEY_BYTES) -> list[bytes]:
    """Cut concatenated keys (or with ``width`` their prefixes) apart."""
    return [row[i : i + width] for i in range(0, len(row), width)]


def encode(message: Message, payload: Frame | None = None) -> list[Frame]:
    """Return the frames of a message; ``payload`` is not copied.

    Raises ValueError if a `Payload` comes without its bytes, another message with some, or the header is too long.
    """
    kind = type(message)
    if (payload is not None) is not (kind is Payload):
        raise ValueError(f"{kind.__name__.lower()} {'with' if payload is not None else 'without'} a payload frame")
    body: object = message
    if isinstance(message, Announce) and not message.withdrawn:
        body = msgspec.structs.astuple(message)[:-1]  # as before there were withdrawals
    if isinstance(message, Hello | Welcome):
        body = _without_later(message)
    header = _PRELUDES[kind] + _encoder.encode(body)
    if len(header) > MAX_HEADER:
        raise ValueError(f"header of {len(header)} bytes")
    return [header] if payload is None else [header, payload]


def _without_later(message: Hello | Welcome) -> tuple[Any, ...]:
    """The fields of a message as before those that it does not use."""
    fields = msgspec.structs.astuple(message)
    if isinstance(message, Welcome):
        if message.verifies != []:
            return fields
        fields = fields[:-1]
    return fields if message.forgets is True else fields[:-1]


def _bad(what: str, where: str) -> ProtocolError:
    return ProtocolError(what, where=f"message {where}", fix="The link is closed and opened again")


def decode(frames: Sequence[Frame]) -> tuple[Message, memoryview | None]:
    """Return one message and its payload frame (a view, not a copy), checked as the module's docstring says.

    Raises ProtocolError for any other bytes, and nothing else. The known fields of `Hello` and `Refused` are read in
    every version.
    """
    if not 1 <= len(frames) <= 2:
        raise _bad(f"a message of {len(frames)} frames", "of unknown type")
    head = memoryview(frames[0]).cast("B")
    if not _PRELUDE.size < len(head) <= MAX_HEADER:
        raise _bad(f"a header of {len(head)} bytes", "of unknown type")
    magic, version, number, flags = _PRELUDE.unpack_from(head)
    if magic != MAGIC:
        raise _bad("a frame that is not of this protocol", f"magic {bytes(magic)!r}")
    if version != VERSION and number not in _FOR_ALL_VERSIONS:
        raise _bad(f"version {version} of the protocol, this is version {VERSION}", f"type {number}")
    if number not in _DECODERS:
        raise _bad("a message of unknown type", f"type {number}")
    name, decoder = _DECODERS[number]
    try:
        message = decoder.decode(head[_PRELUDE.size :])
    except _UNREADABLE as error:
        raise _bad(f"malformed: {str(error)[:200]}", name) from None
    payload = memoryview(frames[1]).cast("B") if len(frames) == 2 else None
    if flags != _HAS_PAYLOAD * (payload is not None) or (payload is not None) is not isinstance(message, Payload):
        raise _bad(f"{len(frames)} frames with flags {flags:#x}", name)
    _check(cast(Message, message), payload, name)
    return cast(Message, message), payload


def _check(message: Message, payload: memoryview | None, name: str) -> None:
    """Check what field types cannot express."""
    match message:
        case Payload() if payload is not None:
            if sum(piece[2] for piece in message.pieces) != len(payload) or len(payload) > MAX_PAYLOAD:
                raise _bad(f"pieces do not add up to the payload's {len(payload)} bytes", name)
        case Match() | Fetch() | Put() | Forget():
            if len(message.keys) % KEY_BYTES:
                raise _bad(f"keys of {len(message.keys)} bytes", name)
            if isinstance(message, Put) and len(message.sizes) * KEY_BYTES != len(message.keys):
                raise _bad(f"{len(message.sizes)} sizes for keys of {len(message.keys)} bytes", name)
            if isinstance(message, Put) and message.state and len(message.sizes) != 1:
                raise _bad(f"a state at the end of {len(message.sizes)} blocks", name)
        case Prefill():
            if len(message.tokens) % 4:
                raise _bad(f"tokens of {len(message.tokens)} bytes", name)
        case Verify() | Draft() | Verdict():
            if len(message.tokens) % 4 or (isinstance(message, Verify) and len(message.draft) % 4):
                raise _bad(f"tokens of {len(message.tokens)} bytes", name)
            if isinstance(message, Verify):
                threshold = message.judge.threshold if message.judge is not None else None
                if not all(map(isfinite, (*msgspec.structs.astuple(message.rule), threshold or 0.0))):
                    raise _bad("a rule with a number that is not finite", name)
            if isinstance(message, Verdict) and not isfinite(message.score or 0.0):
                raise _bad(f"a score of {message.score}", name)
            if isinstance(message, Verdict) and not (
                message.accepted <= message.drafted and message.accepted <= len(message.tokens) // 4
            ):
                raise _bad(f"{message.accepted} right tokens of {message.drafted}", name)
        case Announce():
            if not message.part < message.parts:
                raise _bad(f"part {message.part} of {message.parts}", name)
            if any(len(row) % PREFIX_BYTES for row in (message.added, message.removed, message.withdrawn)):
                raise _bad(f"prefixes of {len(message.added)} and {len(message.removed)} bytes", name)
        case Welcome():
            if message.terms.heartbeat_ms >= message.terms.silence_ms:
                raise _bad(f"a heartbeat of {message.terms.heartbeat_ms} ms, longer than silence may last", name)
        case Hello():
            if message.oldest > message.newest:
                raise _bad(f"versions {message.oldest} to {message.newest}", name)
        case Want():
            if any(b <= a for a, b in zip(message.items, message.items[1:])):
                raise _bad("items that do not ascend", name)
