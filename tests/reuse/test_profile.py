"""Chunk cards: what is written is read back, and no other bytes are; kept one a model."""

from __future__ import annotations

import logging
import math
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.codec import model_digest
from ctxreuse.errors import FormatError
from ctxreuse.reuse import ChunkProfile, ChunkProfileStore, PolicyMeasurement, read_chunk_profile, write_chunk_profile
from ctxreuse.reuse.inplace import Selection
from ctxreuse.reuse.profile import MAX_PROFILE, InPlaceMeasurement
from support.examples import examples
from support.made_up import SPACE


def measured(repair: str = "rotate", kind: str = "behind", kl: float = 0.02, **changes: Any) -> PolicyMeasurement:
    usual = {
        "chunks": 4,
        "tokens": 192,
        "kl_high": kl * 1.2,
        "top1": 0.92,
        "dnll": 0.03,
        "recomputed": 0.0,
        "windows": 20,
    }
    return PolicyMeasurement(policy=repair, kind=kind, kl=kl, **{**usual, **changes})  # type: ignore[arg-type]


def card(*rows: PolicyMeasurement, **changes: Any) -> ChunkProfile:
    usual = {
        "model": model_digest(SPACE),
        "probe_layer": 1,
        "limits": {"behind": 0.3, "head": 0.5},
        "notes": {"by": "me"},
    }
    return ChunkProfile(measured=rows or (measured(), measured("first-8", "head")), **{**usual, **changes})


def read(**changes: Any) -> InPlaceMeasurement:
    usual = {"format": "int8", "selection": Selection(0.5), "tokens": 896, "kl": 0.01, "kl_high": 0.02}
    return InPlaceMeasurement(**{**usual, "top1": 0.95, "dnll": 0.01, "windows": 6, **changes})  # type: ignore[arg-type]


def sealed(body: bytes, version: int = 1) -> bytes:
    return struct.pack("<8sIIQ", b"CTXRCHNK", version, len(body), xxhash.xxh3_64_intdigest(body)) + body


def test_it_reads_back() -> None:
    assert read_chunk_profile(write_chunk_profile(card())) == card()
    assert write_chunk_profile(card()) == write_chunk_profile(card())


def test_readings_read_back_and_older_cards_have_none() -> None:
    whole = card(in_place=(read(), read(selection=None), read(format="int4", selection=None)))
    assert read_chunk_profile(write_chunk_profile(whole)) == whole
    before = {name: value for name, value in msgspec.to_builtins(card()).items() if name != "reads"}
    body = msgspec.msgpack.encode({**before, "model": card().model}, order="deterministic")
    assert read_chunk_profile(sealed(body)) == card()


@pytest.mark.parametrize(
    "retired",
    ["random-15%", "last-5%", "v-15%>8%", "v-15%>8%@2>6", "v-20%/192", "ask*v-10%@3", "first-4+last-5%+drift"],
)
def test_measurements_of_retired_policies_are_read_over(retired: str) -> None:
    old = card(measured(), measured(retired))
    body = msgspec.msgpack.encode(old, order="deterministic")
    assert read_chunk_profile(sealed(body)) == card(measured())


@pytest.mark.parametrize("name", ["", "first", "v-8%>5%@3", "ask*-5%", "last-5%+bogus", "rotate+drift"])
def test_measurements_of_unknown_policies_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match="no such recompute policy"):
        write_chunk_profile(card(measured(name)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"kl": 0.03},
        {"kl": math.nan},
        {"tokens": 0},
        {"top1": 1.1},
        {"selection": Selection(0.0)},
        {"selection": Selection(1.5)},
        {"selection": Selection(0.5, page=0)},
    ],
)
def test_readings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="out of range"):
        write_chunk_profile(card(in_place=(read(**wrong),)))
    with pytest.raises(FormatError, match="an in-place measurement twice"):
        write_chunk_profile(card(in_place=(read(), read(kl=0.0))))


def test_a_card_is_of_a_model_not_of_a_numeric_type() -> None:
    other = msgspec.structs.replace(SPACE, dtype="bfloat16", block_tokens=16)
    assert model_digest(other) == model_digest(SPACE) != model_digest(msgspec.structs.replace(SPACE, weights="2" * 64))


@examples("light")
@given(data=st.data())
def test_damaged_bytes_are_refused(data: st.DataObject) -> None:
    good = write_chunk_profile(card())
    raw = bytearray(good)
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=3)):
        raw[at] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    if cut != good:
        with pytest.raises(FormatError, match="chunk profile"):
            read_chunk_profile(cut)


@examples("light")
@given(data=st.data())
def test_hostile_bodies_are_refused_or_sound(data: st.DataObject) -> None:
    """With a checksum that fits: whatever gets through can be worked with."""
    body = bytearray(msgspec.msgpack.encode(card()))
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), max_size=4)):
        body[at] = data.draw(st.integers(0, 255))
    body += data.draw(st.binary(max_size=3))
    try:
        found = read_chunk_profile(sealed(bytes(body)))
    except FormatError:
        return
    assert write_chunk_profile(found)
    assert all(math.isfinite(x) for one in found.measured for x in (one.kl, one.kl_high, one.top1, one.dnll))


@pytest.mark.parametrize(
    "changed",
    [
        {"model": b"short"},
        {"probe_layer": -1},
        {"probe_layer": 1 << 20},
        {"limits": {"behind": math.nan}},
        {"limits": {"behind": -0.1}},
        {"limits": {"behind": math.inf}},
        {"notes": {str(i): "" for i in range(99)}},
        {"notes": {"by": "x" * 5000}},
        {"measured": (measured("first-x"),)},
        {"measured": (measured(kl=math.nan),)},
        {"measured": (measured(kl_high=0.001),)},
        {"measured": (measured(kl=-0.1, kl_high=0.1),)},
        {"measured": (measured(top1=1.1),)},
        {"measured": (measured(recomputed=math.inf),)},
        {"measured": (measured(windows=0),)},
        {"measured": (measured(tokens=1 << 30),)},
        {"measured": (measured(), measured())},
        {"measured": tuple(measured(tokens=i + 1) for i in range(2000))},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_card_that_cannot_be_is_refused(changed: dict[str, Any]) -> None:
    wrong = msgspec.structs.replace(card(), **changed)
    with pytest.raises(FormatError, match="chunk profile"):
        write_chunk_profile(wrong)
    with pytest.raises(FormatError, match="chunk profile"):
        read_chunk_profile(sealed(msgspec.msgpack.encode(wrong)))


def test_other_kinds_versions_and_sizes_are_refused() -> None:
    body = msgspec.msgpack.encode(card())
    for raw in (
        b"",
        sealed(body, version=2),
        sealed(body).replace(b"CTXRCHNK", b"CTXRCARD"),
        sealed(body) + b"\0",
        sealed(msgspec.msgpack.encode({"model": b"x"})),
        sealed(msgspec.msgpack.encode({**msgspec.to_builtins(card()), "limits": {"sideways": 1.0}})),
        sealed(b"\x91" * 100_000),
        bytes(MAX_PROFILE + 1),
    ):
        with pytest.raises(FormatError, match="chunk profile"):
            read_chunk_profile(raw)


def test_the_shelf_keeps_the_newest_of_each_model(tmp_path: Path) -> None:
    shelf = ChunkProfileStore(tmp_path / "cards")
    assert shelf.find(SPACE) is None
    shelf.add(card())
    newest = card(measured(kl=0.01))
    path = shelf.add(newest)
    assert path == shelf.path(SPACE)
    assert ChunkProfileStore(tmp_path / "cards").find(SPACE) == newest
    assert shelf.find(msgspec.structs.replace(SPACE, weights="2" * 64)) is None
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_file_that_is_no_card_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shelf = ChunkProfileStore(tmp_path)
    path = shelf.add(card())
    other = write_chunk_profile(card(model=bytes(32)))
    for content in (b"", path.read_bytes()[:-1], bytes(MAX_PROFILE + 1), other):
        path.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            assert shelf.find(SPACE) is None
        assert str(path) in caplog.text
        caplog.clear()


def test_a_card_that_cannot_be_read_back_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        ChunkProfileStore(tmp_path).add(card(measured(kl=math.nan)))
    assert list(tmp_path.rglob("*")) == []
