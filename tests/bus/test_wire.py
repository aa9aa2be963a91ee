"""The bus format: every message there and back, read by an independent decoder, and fuzzed."""

from __future__ import annotations

import random
import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.bus.protocol import messages, wire
from ctxreuse.errors import ProtocolError
from support.examples import examples

SPACE, NODE, KEYS = b"s" * 32, b"n" * 16, b"k" * 96
DATA = bytes(range(256)) * 32
LEVELS = messages.LevelRequest(("exact+rans", "kl-0.01@0123456789abcdef"), 2_500_000, 900, 20, True)
RULE = messages.DrawRule(0.5, 0.9, 40, 0.1, 1.1, 0.25, 0.5, 7)
MESSAGES: list[messages.Message] = [
    messages.Hello(1, 1, NODE, "ctxreuse 1", (SPACE, b"t" * 32), 1 << 20, 7, 99, (b"a description",)),
    messages.Welcome(
        1,
        NODE,
        7,
        b"salt" * 4,
        (SPACE,),
        messages.Terms(max_payload=65536, heartbeat_ms=1500),
        ("exact+rans",),
        ((SPACE, b"c" * 32),),
    ),
    messages.Refused(0, "version", "this node speaks version 1 of the protocol, the peer versions 2 to 3"),
    messages.Refused(4, "gone", round=3),
    messages.Announce(1, 0, 12, 0, 2, b"prefix 1prefix 2", b""),
    messages.Announce(2, 12, 13, 0, 1, b"", b"prefix 1"),
    messages.Resync(),
    messages.Match(1, SPACE, KEYS),
    messages.Matched(1, 3, 2, 12345),
    messages.Fetch(2, 1, SPACE, KEYS, True, "tail", 65536, ((0, 5000, b"checksum"), (2, 80, b"CHECKSUM")), 8, LEVELS),
    messages.Payload(2, 1, ((0, 0, 4096), (1, 64, 4096))),
    messages.Credit(2, 1, 12, 2_500_000),
    messages.Done(2, 1, 3),
    messages.Cancel(2),
    messages.Put(3, 1, SPACE, b"p" * 32, KEYS, (65520, 65520, 4080)),
    messages.Put(3, 1, SPACE, b"p" * 32, b"k" * 32, (65520,), True),
    messages.Want(3, 1, (0, 2), 4),
    messages.Stored(3, 1, 0, ""),
    messages.Stored(3, 1, 2, "corrupt"),
    messages.Skip(3, 1, 1),
    messages.Prefill(4, 1, SPACE, b"\1\0\0\0\2\0\0\0", 0, False, 0, (), 8, LEVELS),
    messages.Ping(17),
    messages.Pong(17),
    messages.Bye("maintenance"),
    messages.Hello(1, 1, NODE, "ctxreuse 1", forgets=True),
    messages.Welcome(1, NODE, 7, b"salt" * 4, forgets=True),
    messages.Forget(6, KEYS),
    messages.Welcome(1, NODE, 7, b"salt" * 4, verifies=[b"a description"]),
    messages.Verify(7, SPACE, b"\1\0\0\0\2\0\0\0", 64, 32, (2, 3), RULE, b"\5\0\0\0"),
    messages.Verify(8, SPACE, b"\1\0\0\0", 64, 0, (2,), RULE, b"\5\0\0\0", messages.JudgeRule("digit", 7.0)),
    messages.Draft(7, 3, b"\5\0\0\0\6\0\0\0"),
    messages.Verdict(7, 3, b"\5\0\0\0\7\0\0\0", 2, 1, 3, 1, 42_000, 128),
    messages.Verdict(8, 0, b"\5\0\0\0", 1, 1, 0, 1, 42_000, 128, 7.5),
    messages.FetchCard(5, 1, SPACE, b"c" * 32, 65536, ((0, 4096, b"checksum"),), 8),
]


INNER = (messages.Terms, messages.LevelRequest, messages.DrawRule, messages.JudgeRule)


def frames_of(message: messages.Message) -> list[wire.Frame]:
    return wire.encode(message, DATA if isinstance(message, messages.Payload) else None)


def test_every_type_is_here() -> None:
    types = {type(message).TYPE: type(message) for message in MESSAGES}
    assert sorted(types) == list(range(1, 26))
    for number, kind in types.items():
        row = f"\n    {number:<5} {kind.__name__.lower():<10}"
        assert row in (wire.__doc__ or ""), f"the docstring has no row for {kind.__name__}"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_there_and_back(message: messages.Message) -> None:
    frames = frames_of(message)
    assert all(type(frame) is bytes for frame in frames)
    back, payload = wire.decode([memoryview(frame) for frame in frames])
    assert back == message
    assert (payload is not None) == isinstance(message, messages.Payload)
    assert payload is None or payload == DATA


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_the_docstring_says_what_an_independent_decoder_reads(message: messages.Message) -> None:
    head = bytes(frames_of(message)[0])
    magic, version, number, flags = struct.unpack_from("<4sHBB", head)
    assert (magic, version, number) == (b"ctxb", 1, type(message).TYPE)
    assert flags == isinstance(message, messages.Payload)
    body = msgpack.unpackb(head[8:], use_list=False, strict_map_key=True)
    fields = [getattr(message, name) for name in message.__struct_fields__]
    # Structs inside of a message are arrays, too.
    fields = [tuple(getattr(f, n) for n in f.__struct_fields__) if isinstance(f, INNER) else f for f in fields]
    fields = [tuple(field) if isinstance(field, list) else field for field in fields]
    # A field that came later is left out while it is empty: a peer of the version before does not know it.
    assert body == tuple(fields[: len(body)])
    assert not any(fields[len(body) :])
    # What another program packs is read as well.
    packed = head[:8] + msgpack.packb(body, use_bin_type=True)
    assert wire.decode([packed, DATA] if flags else [packed])[0] == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_fields_of_later_releases_are_ignored(message: messages.Message) -> None:
    frames = frames_of(message)
    head = bytes(frames[0])
    body = msgpack.unpackb(head[8:])
    body += [getattr(message, name) for name in message.__struct_fields__[len(body) :]]
    frames[0] = head[:8] + msgpack.packb([*body, {"new": [1, 2]}, "field"], use_bin_type=True)
    assert wire.decode(frames)[0] == message


def test_other_versions_are_named() -> None:
    ping = bytes(wire.encode(messages.Ping(1))[0])
    newer = ping[:4] + (9).to_bytes(2, "little") + ping[6:]
    with pytest.raises(ProtocolError, match=r"version 9 of the protocol, this is version 1"):
        wire.decode([newer])
    # These two are read whatever the version, or nobody could say what is wrong.
    for message in (MESSAGES[0], MESSAGES[2]):
        head = bytes(frames_of(message)[0])
        assert wire.decode([head[:4] + (9).to_bytes(2, "little") + head[6:]])[0] == message


def bad(message: messages.Message, payload: bytes | None = None) -> None:
    """Encoding does not check; decoding must."""
    with pytest.raises(ProtocolError, match="message"):
        wire.decode(wire.encode(message, payload))


def test_limits_of_single_messages() -> None:
    bad(messages.Hello(2, 1, NODE))
    bad(messages.Hello(1, 1, b"short"))
    bad(messages.Hello(1, 1, NODE, "x" * 513))
    bad(messages.Hello(1, 1, NODE, "", (SPACE,) * 513))
    bad(messages.Hello(1, 1, NODE, "", (), 100))
    bad(messages.Welcome(1, NODE, 0, b"salt" * 4))
    bad(messages.Welcome(1, NODE, 1, b"salt" * 4, (), messages.Terms(heartbeat_ms=500, silence_ms=500)))
    bad(messages.Match(1, SPACE, b""))
    bad(messages.Match(1, SPACE, bytes(33)))
    bad(messages.Match(1, SPACE, bytes(32 * (messages.MAX_KEYS + 1))))
    bad(messages.Match(0, SPACE, KEYS))
    bad(messages.Match(1 << 62, SPACE, KEYS))
    bad(messages.Match(1, b"short", KEYS))
    bad(messages.Fetch(1, 1, SPACE, KEYS, order="sideways"))  # type: ignore[arg-type]
    bad(messages.Fetch(1, 1, SPACE, KEYS, payload=messages.MAX_PAYLOAD + 1))
    bad(messages.Fetch(1, 1, SPACE, KEYS, have=((0, 100, b"short"),)))
    bad(messages.Put(1, 1, SPACE, SPACE, KEYS, (1, 2)))
    bad(messages.Put(1, 1, SPACE, SPACE, KEYS, (1, 2, 0)))
    bad(messages.Put(1, 1, SPACE, SPACE, KEYS, (1, 2, 3), True))
    bad(messages.Want(1, 1, (2, 2)))
    bad(messages.Want(1, 1, (3, 1)))
    bad(messages.Prefill(1, 1, SPACE, b"123"))
    bad(messages.Prefill(1, 1, SPACE, bytes(4 * messages.MAX_TOKENS + 4)))
    bad(messages.Announce(1, 0, 1, 0, 1, b"1234567"))
    bad(messages.Announce(1, 0, 1, 2, 2, b""))
    bad(messages.Payload(1, 1, ()), b"")
    bad(messages.Payload(1, 1, ((0, 0, 5),)), b"four")
    bad(messages.Payload(1, 1, ((0, 0, 1),) * (messages.MAX_PIECES + 1)), bytes(messages.MAX_PIECES + 1))
    bad(
        messages.Payload(1, 1, ((0, 0, messages.MAX_PAYLOAD), (0, messages.MAX_PAYLOAD, 1))),
        bytes(messages.MAX_PAYLOAD + 1),
    )


def test_frames_that_do_not_belong() -> None:
    ping, payload = bytes(wire.encode(messages.Ping(1))[0]), wire.encode(MESSAGES[10], DATA)
    for frames in ([], [b""], [ping[:8]], [ping, b"x"], [payload[0]], [*payload, b""], [ping[:7] + b"\2" + ping[8:]]):
        with pytest.raises(ProtocolError):
            wire.decode(frames)
    with pytest.raises(ProtocolError, match="unknown type"):
        wire.decode([ping[:6] + b"\xee" + ping[7:]])
    with pytest.raises(ProtocolError, match="not of this protocol"):
        wire.decode([b"GET / HTTP/1.1\r\n"])
    with pytest.raises(ProtocolError, match="header of"):
        wire.decode([ping + bytes(wire.MAX_HEADER)])


def test_an_encoder_that_breaks_the_rules_is_told() -> None:
    with pytest.raises(ValueError, match="without a payload"):
        wire.encode(MESSAGES[10])
    with pytest.raises(ValueError, match="with a payload"):
        wire.encode(messages.Ping(1), b"x")
    with pytest.raises(ValueError, match="header of"):
        wire.encode(messages.Prefill(1, 1, SPACE, bytes(3 << 20)))
    for keys in ([], [b"short"], [bytes(32)] * (messages.MAX_KEYS + 1)):
        with pytest.raises(ValueError, match="keys"):
            wire.join_keys(keys)
    assert wire.split_keys(wire.join_keys([b"a" * 32, b"b" * 32])) == [b"a" * 32, b"b" * 32]


def decoded_or_refused(frames: list[bytes]) -> None:
    try:
        message, payload = wire.decode(frames)
    except ProtocolError:
        return
    assert wire.decode(wire.encode(message, payload))[0] == message


@examples("light")
@given(st.lists(st.binary(max_size=200), max_size=3), st.booleans(), st.integers(0, 21), st.integers(0, 1))
def test_random_bytes(frames: list[bytes], dressed: bool, number: int, flags: int) -> None:
    if dressed and frames:
        frames[0] = struct.pack("<4sHBB", b"ctxb", 1, number, flags) + frames[0]
    decoded_or_refused(frames)


def test_mutated_messages() -> None:
    rng = random.Random(5)
    for _ in range(4000):
        frames = [bytearray(frame) for frame in frames_of(rng.choice(MESSAGES))]
        frame = frames[rng.randrange(len(frames))]
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(frame)) if frame else 0
            match rng.randrange(5):
                case 0 if frame:
                    frame[at] = rng.randrange(256)
                case 1:
                    del frame[at:]
                case 2:
                    frame[at:at] = rng.randbytes(rng.randint(1, 8))
                case 3 if frame:
                    frame[at] ^= 1 << rng.randrange(8)
                case _:
                    # The largest lengths that MessagePack can claim.
                    frame[at : at + 5] = rng.choice([b"\xc6", b"\xdd", b"\xdb", b"\xdf"]) + b"\xff\xff\xff\xff"
        decoded_or_refused([bytes(frame) for frame in frames])
