"""The block format: what is written is read back, and no bytes whatsoever do more than raise FormatError."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ctxreuse.block.format import BlockView, BlockWriter, Plane, layout_of, parse, rekey
from ctxreuse.dtypes import ITEM_BYTES
from ctxreuse.errors import FormatError
from ctxreuse.identity.keys import Tokens, as_tokens
from support.examples import examples

PRELUDE = struct.Struct("<8sHHIQQ")
SPACE, KEY, PARENT = b"S" * 32, b"K" * 32, b"P" * 32


def write(planes: tuple[Plane, ...], tokens: Tokens, seed: int = 0, **fields: Any) -> tuple[bytes, list[bytes]]:
    fields = {"kind": "block", "space": SPACE, "key": KEY, "parent": PARENT, "end": len(tokens)} | fields
    writer = BlockWriter(layout_of(planes), tokens=tokens, **fields)
    random = np.random.default_rng(seed)
    contents = []
    for plane in planes:
        data = random.integers(0, 256, plane.nbytes, np.uint8)
        writer.plane(plane.layer, plane.role)[:] = data
        contents.append(data.tobytes())
    return writer.seal().tobytes(), contents


def reseal(data: bytes, header: Any, *, planes: bytes | None = None) -> bytes:
    """The block with another header and a right checksum: what an attacker would send."""
    raw = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    body = data[-(-(32 + PRELUDE.unpack_from(data)[3]) // 64) * 64 :] if planes is None else planes
    start = -(-(32 + len(raw)) // 64) * 64
    total = start + len(body)
    check = xxhash.xxh3_64_intdigest(raw, total & 0xFFFFFFFF)
    prelude = PRELUDE.pack(b"CTXRBLK\0", 1, 0, len(raw), total, check)
    return (prelude + raw).ljust(start, b"\0") + body


def fields_of(data: bytes) -> list[Any]:
    return list(msgspec.msgpack.decode(data[32 : 32 + PRELUDE.unpack_from(data)[3]]))


def read_all(data: bytes) -> BlockView:
    """Everything a reader may do with bytes that parse."""
    view = parse(data)
    view.verify()
    for plane in view.layout.planes:
        assert view.array(plane.layer, plane.role).shape == plane.shape
    assert len(view.tokens) > 0
    return view


shapes = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)
planes_of = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from(["k", "v", "conv0"]), st.sampled_from(sorted(ITEM_BYTES)), shapes),
    min_size=1,
    max_size=8,
    unique_by=lambda row: row[:2],
).map(lambda rows: tuple(Plane(*row) for row in rows))
token_lists = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=70).map(as_tokens)

LAYERS = tuple(Plane(i, role, "float32", (2, 4, 3)) for i in range(3) for role in ("k", "v"))
GOOD, _ = write(LAYERS, as_tokens([5, 6, 7, 8]))


@given(planes_of, token_lists, st.integers(0, 2**32), st.integers(-1, 1 << 30), st.integers(0, 1 << 30))
def test_round_trip(planes: tuple[Plane, ...], tokens: Tokens, seed: int, rope_at: int, before: int) -> None:
    end = before + len(tokens)
    data, contents = write(
        planes, tokens, seed, end=end, rope_at=rope_at, kind="state", extra={"window": 7}, level="q8"
    )
    view = parse(data, space=SPACE)
    assert len(data) % 4096 == 4096 - 16
    assert view.covers(KEY, tokens)
    assert not view.covers(PARENT, tokens)
    assert not view.covers(KEY, as_tokens([*tokens.tolist(), 1]))
    assert view.tokens.tolist() == tokens.tolist()
    header = view.header
    assert (header.kind, header.space, header.key, header.parent) == ("state", SPACE, KEY, PARENT)
    assert (header.end, header.rope_at, header.level, header.extra) == (end, rope_at, "q8", {"window": 7})
    for plane, expected in zip(planes, contents, strict=True):
        assert view.plane(plane.layer, plane.role) == expected
        assert view.offset(plane.layer, plane.role) % (8 if plane.dtype == "uint8" else 64) == 0
        assert view.array(plane.layer, plane.role).shape == plane.shape


def test_a_reused_buffer_gives_the_same_bytes() -> None:
    tokens = as_tokens([5, 6, 7, 8])
    dirty = np.full(3 * 4096, 0xAB, np.uint8)
    data, _ = write(LAYERS, tokens, into=dirty)
    assert data == GOOD
    small, _ = write(LAYERS, tokens, into=np.zeros(10, np.uint8))
    assert small == GOOD


def test_every_single_damaged_byte_is_noticed_or_harmless() -> None:
    view = parse(GOOD)
    meant = [bytes(view.plane(p.layer, p.role)) for p in LAYERS]
    for at in range(len(GOOD)):
        bad = bytearray(GOOD)
        bad[at] ^= 0x41
        try:
            found = parse(bytes(bad))
            contents = [bytes(found.plane(p.layer, p.role)) for p in LAYERS]
        except FormatError:
            continue
        assert contents == meant
        assert found.header == view.header


@given(st.binary(max_size=300))
def test_random_bytes(data: bytes) -> None:
    with pytest.raises(FormatError):
        read_all(data)


@given(st.binary(max_size=300))
def test_random_bytes_after_a_right_magic(data: bytes) -> None:
    with pytest.raises(FormatError):
        read_all(b"CTXRBLK\0\1\0\0\0" + data)


@given(st.integers(0, len(GOOD) - 1), st.booleans())
def test_truncated(length: int, zeros: bool) -> None:
    with pytest.raises(FormatError):
        read_all(GOOD[:length])
    patched = bytearray(GOOD[:length])
    if len(patched) >= 32:
        struct.pack_into("<Q", patched, 16, length)
        with pytest.raises(FormatError):
            read_all(bytes(patched))


@given(st.binary(min_size=1, max_size=100))
def test_extended(tail: bytes) -> None:
    with pytest.raises(FormatError):
        read_all(GOOD + tail)


@examples("light", suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_header_bytes_mutated_under_a_right_checksum(data: st.DataObject) -> None:
    raw = bytearray(GOOD[32 : 32 + PRELUDE.unpack_from(GOOD)[3]])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        action = data.draw(st.sampled_from(["set", "insert", "delete", "cut"]))
        if action == "set":
            raw[at] = data.draw(st.integers(0, 255))
        elif action == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        elif action == "delete":
            del raw[at : at + data.draw(st.integers(1, 8))]
        else:
            del raw[at:]
        raw = raw or bytearray(b"\x90")
    try:
        read_all(reseal(GOOD, bytes(raw)))
    except FormatError:
        pass


hostile = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=80),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@examples("light")
@given(st.integers(0, 10), hostile)
def test_each_header_field_replaced_under_a_right_checksum(field: int, value: Any) -> None:
    header = fields_of(GOOD)
    header[field] = value
    try:
        read_all(reseal(GOOD, header))
    except FormatError:
        pass


numbers = st.sampled_from([-1, 0, 1, 2, 3, 4, 2**16, 2**31, 2**34, 2**34 + 1, 2**62, 2**63, 2**64 - 1])


@examples("light")
@given(
    st.lists(st.lists(numbers, max_size=9), min_size=1, max_size=3), st.sampled_from(["float32", "int8", "f", "object"])
)
def test_hostile_layouts_under_right_checksums(shapes: list[list[int]], dtype: str) -> None:
    planes = [[i, "k", dtype, shape] for i, shape in enumerate(shapes)]
    header = fields_of(GOOD)
    header[8] = msgspec.msgpack.encode(planes)
    header[9] = bytes(8 * len(planes))
    try:
        parse(reseal(GOOD, header))
    except FormatError:
        return
    total = len(reseal(GOOD, header))
    for shape in shapes:
        count = 1
        for n in shape:
            count *= n
        assert 0 <= count * ITEM_BYTES[dtype] <= total


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        (0, "rumour", "malformed"),
        (1, b"short", "32 bytes"),
        (3, b"long" * 9, "32 bytes"),
        (4, 3, "position"),
        (4, 1 << 41, "position"),
        (5, b"", "token bytes"),
        (5, b"123", "token bytes"),
        (5, b"12345", "token bytes"),
        (5, bytes(4 * 5000), "token bytes"),
        (6, "x" * 65, "level"),
        (6, b"\xff", "malformed"),
        (7, -2, "rotated"),
        (8, b"", "malformed"),
        (8, msgspec.msgpack.encode([]), "0 planes"),
        (8, msgspec.msgpack.encode([[0, "k", "float32", [1]]] * 2), "twice"),
        (8, msgspec.msgpack.encode([[0, "k", "object", [1]]]), "type"),
        (8, b"\x91\x94\x00\xa1\xff\xa7float32\x91\x01", "malformed"),
        (9, b"12345678", "do not fit"),
    ],
)
def test_what_is_wrong_is_said(field: int, value: Any, says: str) -> None:
    header = fields_of(GOOD)
    header[field] = value
    with pytest.raises(FormatError, match=says):
        parse(reseal(GOOD, header))


def test_text_that_is_not_utf8() -> None:
    raw = GOOD[32 : 32 + PRELUDE.unpack_from(GOOD)[3]].replace(b"\xa5exact", b"\xa5\xff\xfe\xfd\xfc\xfb")
    with pytest.raises(FormatError, match="malformed"):
        parse(reseal(GOOD, raw))


def test_planes_past_the_end() -> None:
    header = fields_of(GOOD)
    ends = parse(GOOD).offset(2, "v") - parse(GOOD).offset(0, "k") + LAYERS[-1].nbytes
    for size in (0, 64, ends - 1):
        with pytest.raises(FormatError, match="do not fit"):
            parse(reseal(GOOD, header, planes=bytes(size)))
    assert len(parse(reseal(GOOD, header, planes=bytes(ends))).plane(2, "v", verify=False)) == LAYERS[-1].nbytes


@pytest.mark.parametrize(("at", "patch"), [(8, b"\2"), (10, b"\1"), (0, b"Z")])
def test_other_versions_and_formats(at: int, patch: bytes) -> None:
    with pytest.raises(FormatError):
        parse(GOOD[:at] + patch + GOOD[at + 1 :])


def test_another_space_and_missing_planes() -> None:
    with pytest.raises(FormatError, match="another model space"):
        parse(GOOD, space=b"x" * 32)
    view = parse(GOOD)
    with pytest.raises(FormatError, match="no plane"):
        view.plane(99, "k")
    with pytest.raises(KeyError):
        view.offset(99, "k")


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)])
def test_any_buffer_will_do_and_stays_readonly(kind: Any) -> None:
    view = parse(kind(GOOD))
    assert view.plane(1, "v").readonly
    assert view.array(0, "k").dtype == np.float32


def test_empty_buffers() -> None:
    for data in (b"", np.zeros(0, np.uint8), bytearray()):
        with pytest.raises(FormatError, match="too few"):
            parse(data)


@given(planes_of, token_lists, st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_rekeying_changes_the_two_keys_and_nothing_else(
    planes: tuple[Plane, ...], tokens: Tokens, key: bytes, parent: bytes
) -> None:
    data, _ = write(planes, tokens, extra={"window": 7}, level="q8")
    before = parse(data)
    after = read_all(rekey(data, key, parent).tobytes())
    assert after.header == msgspec.structs.replace(before.header, key=key, parent=parent)
    assert len(after.buffer) == len(before.buffer)
    assert after.buffer[after.start :] == before.buffer[before.start :]
    assert rekey(after.buffer, KEY, PARENT).tobytes() == data


def test_rekeying_writes_into_memory_that_is_given() -> None:
    room = np.full(len(GOOD) + 100, 255, np.uint8)
    copy = rekey(GOOD, b"1" * 32, b"2" * 32, room)
    assert np.shares_memory(copy, room)
    assert parse(copy).header.key == b"1" * 32
    assert set(room[len(GOOD) :]) == {255}
    assert rekey(GOOD, b"1" * 32, b"2" * 32, room[:64]).tobytes() == copy.tobytes()


def test_what_is_no_block_and_what_is_no_key_cannot_be_rekeyed() -> None:
    with pytest.raises(FormatError):
        rekey(GOOD[:-1], KEY, PARENT)
    with pytest.raises(FormatError, match="another key"):
        rekey(GOOD, KEY[:-1], PARENT)


def test_a_head_can_be_parsed_before_the_planes_are_there() -> None:
    whole = parse(GOOD)
    partial = parse(GOOD[: whole.start].ljust(len(GOOD), b"\0"))
    assert partial.header == whole.header
    with pytest.raises(FormatError, match="corrupt"):
        partial.verify()
