"""The level "exact+rans": any type and shape comes back from its stream alone, and damage is an error."""

from __future__ import annotations

import struct
from math import prod
from typing import Any

import numpy as np
import pytest
import xxhash

from ctxreuse.codec import lossless
from ctxreuse.dtypes import ITEM_BYTES
from ctxreuse.errors import FormatError


def plane(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Bytes of a plane whose channels have scales of their own, as far as its type allows."""
    random = np.random.default_rng(seed)
    scales = np.exp2(random.normal(0, 2, shape[-1:]))
    values = np.asarray(random.standard_normal(shape) * scales, np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("shape", [(3, 64, 64), (1, 2, 70, 16), (4, 128), (300,), (), (2, 0, 5), (1, 1, 1, 1, 9)])
def test_planes_and_states_of_all_kinds_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    data = plane(dtype, shape)
    stream = lossless.encode_plane(data.tobytes(), dtype, shape)
    array, kind = lossless.unpack_plane(stream)
    assert (kind, array.shape, array.tobytes()) == (dtype, shape, data.tobytes())
    assert lossless.plane_of(stream) == (dtype, shape)
    assert np.array_equal(lossless.encode_plane(data, dtype, shape), np.frombuffer(stream, np.uint8))
    into = np.empty_like(data)
    lossless.decode_plane(stream, into)
    assert into.tobytes() == data.tobytes()


def test_caches_shrink_and_noise_does_not_grow() -> None:
    data = plane("bfloat16", (3, 64, 64))
    assert len(lossless.encode_plane(data.tobytes(), "bfloat16", data.shape)) < data.nbytes / 1.4
    noise = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8)
    for dtype in ("bfloat16", "float16", "float32", "uint8"):
        shape = (4, 64, noise.size // 256 // ITEM_BYTES[dtype])
        assert len(lossless.encode_plane(noise, dtype, shape)) <= noise.size + 40


def test_shape_and_bytes_must_agree() -> None:
    for shape, dtype in (((2, 3), "float32"), ((1,) * 9, "float32"), ((4,), "float8"), ((-1, -4), "float32")):
        with pytest.raises(ValueError, match="shape"):
            lossless.encode_plane(np.zeros(16, np.uint8), dtype, shape)


def test_what_is_no_stream_is_refused() -> None:
    stream = bytes(lossless.encode_plane(plane("float32", (2, 64, 8)).tobytes(), "float32", (2, 64, 8)))
    for bad in (b"", b"\2", b"\1" + stream[1:], stream[:1] + b"\7" + stream[2:], stream[:2] + b"\11" + stream[3:],
                stream[:3] + b"\1" + stream[4:], stream[:12], stream[:-1], stream + b"\0"):  # fmt: skip
        with pytest.raises(FormatError):
            lossless.unpack_plane(memoryview(bad))
    with pytest.raises(FormatError, match="wanted"):
        lossless.decode_plane(stream, np.empty((2, 64, 8), np.uint16))
    with pytest.raises(FormatError, match="wanted"):
        lossless.decode_plane(stream, np.empty((64, 2, 8), np.uint32))


def test_a_shape_without_bytes_gets_no_memory() -> None:
    stream = bytearray(lossless.encode_plane(plane("float32", (2, 64, 8)).tobytes(), "float32", (2, 64, 8)))
    stream[4:8] = (1 << 24).to_bytes(4, "little")
    with pytest.raises(FormatError, match="in 3"):
        lossless.unpack_plane(memoryview(stream))
    with pytest.raises(FormatError, match="in 4"):
        lossless.unpack_plane(memoryview(lossless.encode_plane(bytes(4096), "int8", (4096,))), limit=4095)


@pytest.mark.parametrize("shape", [(2, 0xFF000010, 0), (0, 1 << 31, 4), (1 << 31, 1 << 31, 1 << 31, 0)])
def test_an_empty_plane_with_axes_too_long_is_refused(shape: tuple[int, ...]) -> None:
    for dtype in (0, 5):
        stream = struct.pack(f"<BBBB{len(shape)}I", 2, dtype, len(shape), 0, *shape) + bytes(12)
        with pytest.raises(FormatError):
            lossless.unpack_plane(memoryview(stream))


def test_streams_of_equal_channels_are_no_smaller_than_what_is_believed() -> None:
    for value in (0, 0x3F80, 0xFFFF):
        data = np.full((2, 128, 64), value, np.uint16)
        array, _ = lossless.unpack_plane(lossless.encode_plane(data.tobytes(), "bfloat16", data.shape))
        assert np.array_equal(array, data)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_run_of_blocks_goes_into_strided_memory(dtype: str) -> None:
    counts, item = [64, 64, 20], ITEM_BYTES[dtype]
    planes = [plane(dtype, (2, n, 32), i) for i, n in enumerate(counts)]
    streams = [lossless.encode_plane(p, dtype, p.shape) for p in planes]
    sums = [xxhash.xxh3_64_intdigest(s.data) for s in streams]
    for axes in ((0, 1, 2), (1, 0, 2), (0, 2, 1)):
        lengths = tuple((2, 160, 32)[axis] for axis in axes)
        target = np.zeros(prod(lengths), f"u{item}").reshape(lengths).transpose(np.argsort(axes))
        run = (streams, [0] * 3, [s.size for s in streams], counts, dtype)
        lossless.unpack_run(*run, target, 7, sums)
        assert target[:, 7:155].tobytes() == np.concatenate(planes, axis=1).tobytes()
        assert not target[:, :7].any()
        assert not target[:, 155:].any()
        with pytest.raises(FormatError, match="block 1"):
            lossless.unpack_run(*run, target, 7, [sums[0], sums[0], sums[2]])
        with pytest.raises(ValueError, match="rows"):
            lossless.unpack_run(*run, target, 13, sums)
