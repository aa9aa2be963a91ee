"""Chunks of LMCache are coded by a profile wherever they stood and however they lie; what comes back is checked."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from ctxreuse_cloud.connectors.chunks.codec import ChunkCodec, ChunkShape, chunk_key
from ctxreuse_cloud.connectors.chunks.place import ChunkPlace, PlaceFinder, join_planes, split_planes
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxreuse.block.format import parse
from ctxreuse.block.levels import LevelName
from ctxreuse.codec import ProfileStore
from ctxreuse.errors import ConfigError, FormatError
from ctxreuse.kernels.convert import to_float32
from ctxreuse.rope import Rotary
from support.chunks_of_kv import DIM, HEADS, LAYERS, MODEL, chunk_of, keep_profile, key_of, kv, shape_of

KEY = key_of("a")


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> ProfileStore:
    folder = tmp_path_factory.mktemp("profiles")
    keep_profile(folder, joint=True)
    return ProfileStore(folder)


def encoded(
    codec: ChunkCodec, data: npt.NDArray[np.uint8], shape: ChunkShape, key: bytes = KEY
) -> npt.NDArray[np.uint8]:
    """The bytes of a chunk, in memory that is as large as LMCache would give."""
    into = np.full(codec.most_bytes(shape), 0xAA, np.uint8)
    return into[: codec.encode(data, shape, key, into)]


def decoded(
    codec: ChunkCodec, data: npt.NDArray[np.uint8], shape: ChunkShape, key: bytes = KEY
) -> npt.NDArray[np.uint8]:
    into = np.full(shape.nbytes, 0x55, np.uint8)
    try:
        codec.decode(data, shape, key, into)
    except FormatError:
        assert (into == 0x55).all()  # a failed load writes nothing
        raise
    return into


def error_of(data: npt.NDArray[np.uint8], back: npt.NDArray[np.uint8], dtype: str) -> float:
    """Square of the error, as a share of the numbers' own."""
    bits = np.uint32 if dtype == "float32" else np.uint16
    one, other = (to_float32(each.view(bits), dtype).astype(np.float64) for each in (data, back))
    return float(((one - other) ** 2).sum() / (one**2).sum())


@given(
    layers=st.integers(1, 3), heads=st.integers(1, 4), dim=st.integers(1, 8), pages=st.integers(1, 3),
    page=st.integers(1, 6), halves=st.sampled_from([1, 2]),
)  # fmt: skip
def test_planes_are_split_and_joined_in_each_order(
    layers: int, heads: int, dim: int, pages: int, page: int, halves: int
) -> None:
    tokens, page = pages * page, page if halves == 1 else 0
    width = (3 - halves) * heads * dim
    chunk = np.arange(halves * layers * tokens * width, dtype=np.uint32).reshape(halves, layers, tokens, width)
    k, v = split_planes(chunk, heads, dim, page)
    assert k.shape == v.shape == (layers, heads, tokens, dim)
    again = np.zeros_like(chunk)
    join_planes(k, v, again, page)
    np.testing.assert_array_equal(again, chunk)


def test_the_orders_are_those_of_engines() -> None:
    """By each number's own index: of split halves, of K and V behind each other, and of pages with K transposed."""
    chunk = np.arange(2 * 4 * 12).reshape(2, 1, 4, 12)
    k, v = split_planes(chunk, 3, 4, 0)
    assert k[0, 2, 3, 1] == chunk[0, 0, 3, 2 * 4 + 1]
    assert v[0, 2, 3, 1] == chunk[1, 0, 3, 2 * 4 + 1]
    fused = chunk.reshape(1, 1, 4, 24)
    k, v = split_planes(fused, 3, 4, 0)
    assert k[0, 2, 3, 1] == fused[0, 0, 3, 2 * 8 + 1]
    assert v[0, 2, 3, 1] == fused[0, 0, 3, 2 * 8 + 4 + 1]
    k, v = split_planes(fused, 3, 4, 2)
    page = fused[0, 0, 2:, 2 * 8 : 3 * 8].reshape(-1)  # of the third head, tokens 2 and 3: K [4, 2], then V [2, 4]
    assert k[0, 2, 3, 1] == page[1 * 2 + 1]
    assert v[0, 2, 3, 1] == page[8 + 1 * 4 + 1]


@settings(max_examples=40)
@given(
    start=st.integers(0, 500), tokens=st.sampled_from([16, 64, 256]), order=st.sampled_from([(2, 0), (1, 0), (1, 16)]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_position_and_order_of_a_chunk_are_found(
    profiles: ProfileStore, start: int, tokens: int, order: tuple[int, int], dtype: str, seed: int
) -> None:
    ((_, profile, _),) = profiles.everything()
    halves, page = order
    data = chunk_of(kv(start * tokens, tokens, seed), dtype, halves=halves, page=page)
    bits: Any = data.view(np.uint32 if dtype == "float32" else np.uint16).reshape(shape_of(halves, tokens))
    assert PlaceFinder(profile).find(bits, dtype) == ChunkPlace(start * tokens, page)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("halves", "page"), [(2, 0), (1, 0), (1, 32), (1, 128)])
def test_a_chunk_comes_back_as_its_level_allows(profiles: ProfileStore, dtype: str, halves: int, page: int) -> None:
    shape = ChunkShape(dtype, shape_of(halves, 128))
    sizes = {}
    for level, most in (("kl-0.05", 0.02), ("kl-0.01-joint", 0.006), ("kl-0.01", 0.006), ("kl-0.008", 0.003)):
        codec = ChunkCodec(level, MODEL, profiles)
        for start in (0, 128 * 77):
            data = chunk_of(kv(start, 128, 3), dtype, halves=halves, page=page)
            stored = encoded(codec, data, shape)
            assert 0 < error_of(data, decoded(codec, stored, shape), dtype) < most
            assert parse(stored).header.rope_at == start
            sizes[level] = stored.nbytes
    assert sizes["kl-0.05"] < sizes["kl-0.01"] < sizes["kl-0.008"] < shape.nbytes


def test_the_first_tokens_of_a_context_stay_as_they_are(profiles: ProfileStore) -> None:
    codec, shape = ChunkCodec("kl-0.05", MODEL, profiles), ChunkShape("float32", shape_of(2, 64))
    data = chunk_of(kv(0, 64), halves=2)
    back = decoded(codec, encoded(codec, data, shape), shape).view(np.float32).reshape(shape.shape)
    rows = data.view(np.float32).reshape(shape.shape)
    np.testing.assert_allclose(back[:, :, :4], rows[:, :, :4], rtol=0, atol=0.02)
    assert abs(back[:, :, 4:] - rows[:, :, 4:]).max() > 0.02


@pytest.mark.parametrize("shape", [
    ChunkShape("bfloat16", shape_of(2, 64)), ChunkShape("float32", (1, 7, 33)), ChunkShape("uint8", (4001,)),
])  # fmt: skip
def test_without_loss_all_bits_come_back(shape: ChunkShape) -> None:
    codec = ChunkCodec("exact+rans")
    data = np.random.default_rng(1).integers(0, 256, shape.nbytes, np.uint8)
    np.testing.assert_array_equal(decoded(codec, encoded(codec, data, shape), shape), data)


def test_chunks_that_are_not_the_models_are_kept_without_loss_and_one_warning_says_so(
    profiles: ProfileStore, caplog: pytest.LogCaptureFixture
) -> None:
    codec = ChunkCodec("kl-0.01", MODEL, profiles)
    noise = np.random.default_rng(2).normal(size=(2, LAYERS, HEADS, 64, DIM)).astype(np.float32)
    empty = np.full_like(noise, np.nan)
    cases = [
        (chunk_of(tuple(noise), halves=2), ChunkShape("float32", shape_of(2, 64))),
        (chunk_of(tuple(empty), halves=2), ChunkShape("float32", shape_of(2, 64))),
        (chunk_of(kv(3 * 64 + 7, 64), halves=2), ChunkShape("float32", shape_of(2, 64))),  # not at a multiple of 64
        (np.arange(4096, dtype=np.uint8), ChunkShape("uint8", (4096,))),
        (chunk_of(kv(0, 64), halves=2), ChunkShape("float32", (2, LAYERS, 64 * HEADS, DIM))),
        (chunk_of(kv(0, 64), halves=2), ChunkShape("float32", (2, 1, 64 * LAYERS, HEADS * DIM))),
    ]
    with caplog.at_level(logging.WARNING):
        for data, shape in cases * 2:
            stored = encoded(codec, data, shape)
            assert parse(stored).header.level == "exact+rans"
            np.testing.assert_array_equal(decoded(codec, stored, shape), data)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(set(said)) == 4
    assert all("without loss" in one for one in said)


@pytest.mark.parametrize("level", ["kl-0.01", "kl-0.01-joint", "exact+rans"])
def test_no_changed_byte_gives_other_kv(profiles: ProfileStore, level: str) -> None:
    codec, shape = ChunkCodec(level, MODEL, profiles), ChunkShape("bfloat16", shape_of(1, 32))
    stored = encoded(codec, chunk_of(kv(64, 32), "bfloat16"), shape)
    right = decoded(codec, stored, shape)
    random = np.random.default_rng(4)
    refused = 0
    for at in (*range(64), *random.integers(0, stored.nbytes, 300).tolist()):
        changed = stored.copy()
        changed[at] ^= 1 << int(random.integers(8))
        try:
            np.testing.assert_array_equal(decoded(codec, changed, shape), right)  # padding says nothing
        except FormatError:
            refused += 1
    assert refused > 64
    for length in (0, 1, 23, 24, 32, 100, stored.nbytes // 2, stored.nbytes - 1):
        with pytest.raises(FormatError):
            decoded(codec, stored[:length], shape)
    behind = np.concatenate([stored, np.full(1000, 0xFF, np.uint8)])  # LMCache's memory is larger than what was stored
    np.testing.assert_array_equal(decoded(codec, behind, shape), right)


@pytest.mark.parametrize("level", ["kl-0.01", "exact+rans"])
def test_a_chunk_decodes_for_its_own_key_shape_and_type_only(profiles: ProfileStore, level: str) -> None:
    codec, shape = ChunkCodec(level, MODEL, profiles), ChunkShape("bfloat16", shape_of(1, 64))
    stored = encoded(codec, chunk_of(kv(64, 64), "bfloat16"), shape)
    with pytest.raises(FormatError, match="another chunk"):
        decoded(codec, stored, shape, key_of("b"))
    for other in (
        ChunkShape("float16", shape_of(1, 64)), ChunkShape("float32", shape_of(1, 64)),
        ChunkShape("bfloat16", shape_of(2, 64)), ChunkShape("bfloat16", shape_of(1, 128)),
        ChunkShape("bfloat16", shape_of(1, 32)), ChunkShape("uint8", (shape.nbytes,)),
    ):  # fmt: skip
        with pytest.raises(FormatError):
            decoded(codec, stored, other)


@pytest.mark.parametrize(("field", "value"), [
    ("extra", {}), ("extra", {"halves": 1, "page": 48}), ("extra", {"halves": 1, "page": -1}),
    ("extra", {"halves": 2, "page": 0}), ("extra", {"halves": 1, "page": 1 << 40}), ("end", 3), ("space", bytes(32)),
    ("level", "exact"), ("level", "exact+rans"), ("level", "approx~kl-0.01"), ("level", "kl-0.01"),
    ("level", "kl-0.01@0123456789abcdef"), ("level", "?"), ("tokens", bytes(4 * 65)), ("tokens", bytes(4 * 4096)),
])  # fmt: skip
def test_a_head_that_was_made_up_is_refused(profiles: ProfileStore, field: str, value: Any) -> None:
    """With right checksums: who writes to the store of an adapter may compute them."""
    from ctxreuse.block import format as block

    codec, shape = ChunkCodec("kl-0.01", MODEL, profiles), ChunkShape("bfloat16", shape_of(1, 64))
    view = parse(encoded(codec, chunk_of(kv(64, 64), "bfloat16"), shape))
    given: dict[str, Any] = {
        "space": view.header.space, "end": view.header.end, "tokens": view.header.tokens, "level": view.header.level,
        "extra": view.header.extra, field: value,
    }  # fmt: skip
    writer = block.BlockWriter(
        view.layout, kind="block", key=KEY, parent=bytes(32), rope_at=64,
        **{**given, "tokens": np.frombuffer(given["tokens"], np.int32)},
    )  # fmt: skip
    for plane in view.layout.planes:
        writer.plane(plane.layer, plane.role)[:] = np.frombuffer(view.plane(plane.layer, plane.role), np.uint8)
    with pytest.raises(FormatError):
        decoded(codec, writer.seal(), shape)


def test_chunks_of_an_older_profile_are_decoded_and_of_an_unknown_one_refused(tmp_path: Path) -> None:
    keep_profile(tmp_path, seed=1)
    shape, data = ChunkShape("float32", shape_of(2, 64)), chunk_of(kv(64, 64), halves=2)
    before = ChunkCodec("kl-0.01", MODEL, ProfileStore(tmp_path))
    stored = encoded(before, data, shape)
    (first,) = tmp_path.glob("*/*.card")
    os.utime(first, (1, 1))
    keep_profile(tmp_path, seed=2)
    keep_profile(tmp_path, seed=3, name="another")
    after = ChunkCodec("kl-0.01", MODEL, ProfileStore(tmp_path))
    np.testing.assert_array_equal(decoded(after, stored, shape), decoded(before, stored, shape))
    digests = [
        LevelName(*parse(each).header.level.split("@")).profile for each in (stored, encoded(after, data, shape))
    ]
    assert digests[0] == first.stem != digests[1]
    first.unlink()
    with pytest.raises(FormatError, match="no such profile"):
        decoded(ChunkCodec("kl-0.01", MODEL, ProfileStore(tmp_path)), stored, shape)


def test_a_profile_is_found_by_name_folder_and_digest(profiles: ProfileStore) -> None:
    ((digest, _, _),) = profiles.everything()
    shape, data = ChunkShape("float32", shape_of(2, 64)), chunk_of(kv(64, 64), halves=2)
    stored = {
        encoded(ChunkCodec("kl-0.01", name, profiles), data, shape).tobytes()
        for name in (MODEL, f"/x/{MODEL}", digest[:8])
    }
    assert len(stored) == 1


@pytest.mark.parametrize(("level", "model", "message"), [
    ("kl-0.01", "", "needs the profile"), ("kl-0.3", MODEL, "no such level"), ("exact", MODEL, "codes nothing"),
    ("exact", "", "needs the profile"), ("kl-0.01", "other", "no calibration profile of 'other'"),
    ("kl-0.01", "0123456", "no calibration profile"),
])  # fmt: skip
def test_settings_that_cannot_be_met_are_refused(profiles: ProfileStore, level: str, model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChunkCodec(level, model, profiles)


def test_models_whose_chunks_cannot_be_coded_are_refused(tmp_path: Path) -> None:
    profile = keep_profile(tmp_path)
    plain = msgspec.structs.replace(profile, ropes=(Rotary("none"),) * LAYERS)
    with pytest.raises(ConfigError, match="does not rotate K"):
        PlaceFinder(plain)
    wide = msgspec.structs.replace(profile.planes[0], dim=2 * DIM)
    with pytest.raises(ConfigError, match="layers differ"):
        PlaceFinder(msgspec.structs.replace(profile, planes=(wide, *profile.planes[1:])))
    with pytest.raises(ConfigError, match="layers differ"):
        PlaceFinder(msgspec.structs.replace(profile, planes=profile.planes[:-1]))


def test_keys_differ_by_each_fact() -> None:
    facts = [b"hash", "model", 1, 0, "salt"]
    others = [b"hasi", "mode", 2, 1, ""]
    keys = {chunk_key([facts[i] if i != at else others[i] for i in range(5)]) for at in range(-1, 5)}
    assert len(keys) == 6
    assert {len(key) for key in keys} == {32}
