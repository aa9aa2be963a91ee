"""Exit profiles: bytes that come back as they were, and hostile ones that do not come in."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from ctxreuse.errors import FormatError
from ctxreuse.exits.profile import ExitProfile, ExitProfileStore, read_exit_profile, write_exit_profile
from support.early import early_model, ramps_of
from support.tiny_text import tiny_engine


@pytest.fixture(scope="module")
def space() -> Any:
    from ctxreuse.engines.torch_hf import TorchEngine

    return TorchEngine(early_model(), None, block_tokens=16).space


@pytest.fixture(scope="module")
def profile(space: Any) -> ExitProfile:
    return ramps_of(early_model(), space)


def test_a_profile_comes_back_as_it_was(profile: ExitProfile) -> None:
    data = write_exit_profile(profile)
    found = read_exit_profile(data)
    assert write_exit_profile(found) == data
    for one, other in zip(profile.ramps, found.ramps):
        assert one.depth == other.depth
        assert np.array_equal(one.head.data, other.head.data)
        assert np.array_equal(one.candidates, other.candidates)


def test_bytes_that_are_damaged_or_cut_off_are_refused(profile: ExitProfile) -> None:
    data, rng = write_exit_profile(profile), Random(1)
    for _ in range(60):
        bad = bytearray(data)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        with pytest.raises(FormatError, match="exit profile"):
            read_exit_profile(bad)
    for size in (0, 10, 24, 100, len(data) - 1):
        with pytest.raises(FormatError, match="exit profile"):
            read_exit_profile(data[:size])


def with_header(data: bytes, change: Any) -> bytes:
    """The bytes with another header and a right checksum."""
    magic, version, length, _ = struct.unpack_from("<8sIIQ", data)
    header = msgspec.msgpack.decode(data[24 : 24 + length])
    change(header)
    raw = msgspec.msgpack.encode(header)
    body = raw + data[24 + length :]
    return struct.pack("<8sIIQ", magic, version, len(raw), xxhash.xxh3_64_intdigest(body)) + body


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.__setitem__(0, b"short"),
        lambda h: h.__setitem__(1, 0),
        lambda h: h.__setitem__(1, 1 << 20),
        lambda h: h.__setitem__(1, h[1] + 1),
        lambda h: h.__setitem__(2, 2),
        lambda h: h.__setitem__(3, 10),
        lambda h: h.__setitem__(4, []),
        lambda h: h.__setitem__(4, h[4] * 9),
        lambda h: h[4].reverse(),
        lambda h: h[4][0].__setitem__(0, 0),
        lambda h: h[4][0].__setitem__(1, 1 << 40),
        lambda h: h[4][0].__setitem__(2, 2.0),
        lambda h: h.__setitem__(5, {"x": "y" * 5000}),
    ],
)
def test_headers_that_cannot_be_are_refused(profile: ExitProfile, change: Any) -> None:
    with pytest.raises(FormatError, match="exit profile"):
        read_exit_profile(with_header(write_exit_profile(profile), change))


def test_a_store_finds_the_profile_of_its_model_only(
    profile: ExitProfile, space: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiles = ExitProfileStore(tmp_path)
    assert profiles.find(space) is None
    path = profiles.add(profile)
    assert profiles.find(space) is not None
    assert profiles.find(tiny_engine().space) is None
    path.write_bytes(path.read_bytes()[:-1])
    assert profiles.find(space) is None
    assert "cannot be used" in caplog.text
