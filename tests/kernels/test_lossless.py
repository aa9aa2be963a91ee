"""Lossless packing: every table and numpy give the same bytes, every bit comes back, and no bytes do harm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import _native, kernels
from oracle.kernels import lossless as reference
from support.examples import examples

TABLES = pytest.mark.parametrize("table", _native.kernels())
ITEMS = (4, 2, 2)


def cache_like(seed: int, code: int, shape: tuple[int, ...], noise: float) -> Any:
    """Bits of channels with scales and means of their own; a share ``noise`` of the elements is any bits at all."""
    random = np.random.default_rng(seed)
    scale = np.exp2(random.normal(0, 1.5, (*shape[:-2], 1, shape[-1])))
    values = (scale * (random.normal(0, 2, scale.shape) + random.standard_normal(shape))).astype(np.float32)
    halves = values.astype(np.float16).view(np.uint16)
    bits = (values.view(np.uint32), halves, (values.view(np.uint32) >> 16).astype(np.uint16))[code]
    anything = random.integers(0, 256, bits.nbytes, np.uint8).view(bits.dtype).reshape(shape)
    return np.where(random.random(shape) < noise, anything, bits)


def encode(backend: Any, bits: Any, code: int) -> bytes:
    shape = bits.shape
    out = np.full(kernels.lossless_bound(bits.nbytes), 0xA5, np.uint8)
    flat = np.ascontiguousarray(bits).reshape(-1)
    size = backend.lossless_encode(flat, code, 0, (shape[1] * shape[2], shape[2]), shape, out)
    return bytes(out[:size])


def decode(backend: Any, stream: bytes, code: int, shape: tuple[int, ...]) -> Any:
    out = np.full(shape[0] * shape[1] * shape[2] * ITEMS[code], 0x5A, np.uint8)
    run = ([stream], [0], [len(stream)], [shape[1]], None)
    bad = backend.lossless_decode(out, code, 0, (shape[1] * shape[2], shape[2]), shape[0], shape[2], *run)
    return None if bad == 0 else out.view(f"<u{ITEMS[code]}").reshape(shape)


SHAPES = st.tuples(st.integers(0, 3), st.one_of(st.integers(0, 200), st.just(64)), st.integers(0, 70))


@examples("normal")
@given(shape=SHAPES, code=st.integers(0, 2), seed=st.integers(0, 999), noise=st.sampled_from([0, 0, 0.01, 0.3, 1]))
def test_all_tables_give_the_bytes_of_numpy_and_the_bits_back(
    shape: tuple[int, int, int], code: int, seed: int, noise: float
) -> None:
    bits = cache_like(seed, code, shape, noise)
    stream = encode(reference, bits, code)
    assert len(stream) <= kernels.lossless_bound(bits.nbytes)
    assert np.array_equal(decode(reference, stream, code, shape), bits)
    for table in _native.kernels():
        kernels.use(table)
        assert encode(_native, bits, code) == stream
        assert np.array_equal(decode(_native, stream, code, shape), bits)


@TABLES
@pytest.mark.parametrize("code", [0, 1, 2])
def test_every_pattern_of_a_half_comes_back(table: str, code: int) -> None:
    kernels.use(table)
    every = np.arange(1 << 16, dtype=np.uint32)
    bits = (every << 16 | every) if code == 0 else every.astype(np.uint16)
    # Sorted, shuffled and by columns: whole channels of NaN, of zeros, of one sign.
    for order in (every, np.random.default_rng(0).permutation(every), every.reshape(64, -1).T.reshape(-1)):
        plane = bits[order].reshape(4, 256, 64)
        assert np.array_equal(decode(_native, encode(_native, plane, code), code, plane.shape), plane)


@pytest.mark.parametrize("code", [0, 2])
@pytest.mark.parametrize("shape", [(2, 64, 24), (1, 4096 + 192, 5), (3, 16, 24)])
def test_channels_far_apart_and_long_ones_are_the_same_everywhere(code: int, shape: tuple[int, int, int]) -> None:
    # More than 15 exponents between channels, which no shift can say; and more steps than a class is chosen by.
    scale = np.exp2(np.linspace(-100, 20, shape[2])).astype(np.float32)
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32) * scale
    values[:, 4096:] *= 64
    bits = values.view(np.uint32) if code == 0 else (values.view(np.uint32) >> 16).astype(np.uint16)
    stream = encode(reference, bits, code)
    for table in _native.kernels():
        kernels.use(table)
        assert encode(_native, bits, code) == stream
        assert np.array_equal(decode(_native, stream, code, shape), bits)
    assert np.array_equal(decode(reference, stream, code, shape), bits)


@TABLES
def test_caches_become_shorter(table: str) -> None:
    kernels.use(table)
    for code, wanted in ((0, 1.2), (1, 1.2), (2, 1.5)):
        bits = cache_like(3, code, (3, 64, 64), 0)
        assert bits.nbytes / len(encode(_native, bits, code)) > wanted


@TABLES
@examples("normal")
@given(data=st.data())
def test_what_is_no_stream_is_told_or_decodes_to_something(table: str, data: st.DataObject) -> None:
    kernels.use(table)
    code, tokens = data.draw(st.integers(0, 2)), data.draw(st.sampled_from([16, 64, 80, 128]))
    shape = (2, tokens, 24)
    stream = bytearray(encode(_native, cache_like(data.draw(st.integers(0, 9)), code, shape, 0.01), code))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 60) | st.integers(0, len(stream) - 1))
        stream[at] = data.draw(st.integers(0, 255))
    del stream[data.draw(st.integers(len(stream) // 2, len(stream)) | st.just(len(stream))) :]
    got, want = decode(_native, bytes(stream), code, shape), decode(reference, bytes(stream), code, shape)
    assert (got is None) == (want is None)
    if want is not None:
        assert np.array_equal(got, want)


class Run:
    """Streams of consecutive blocks at odd places of their buffers, and an engine's tensor with room around them."""

    def __init__(self, code: int, counts: list[int], heads: int, dim: int) -> None:
        self.code, self.counts, self.heads, self.dim = code, counts, heads, dim
        self.planes = [cache_like(i, code, (heads, n, dim), 0) for i, n in enumerate(counts)]
        streams = [encode(_native, plane, code) for plane in self.planes]
        self.buffers = [np.frombuffer(b"x" * (7 + i) + s + b"y" * 3, np.uint8).copy() for i, s in enumerate(streams)]
        self.offsets, self.sizes = [7 + i for i in range(len(counts))], [len(s) for s in streams]
        self.sums = [xxhash.xxh3_64_intdigest(s) for s in streams]
        self.tensor = np.full((heads, 5 + sum(counts) + 9, dim), 77, f"u{ITEMS[code]}")

    def decode(self, sums: list[int] | None) -> int:
        capacity, item = self.tensor.shape[1], ITEMS[self.code]
        streams = (self.buffers, self.offsets, self.sizes, self.counts, sums)
        names = ("float32", "float16", "bfloat16")
        return kernels.lossless_decode(
            self.tensor, names[self.code], 5 * self.dim * item, (capacity * self.dim, self.dim), self.heads, self.dim,
            *streams,
        )  # fmt: skip


@TABLES
@pytest.mark.parametrize("code", [0, 1, 2])
@pytest.mark.parametrize("counts", [[64], [64, 64, 64], [64, 0, 30, 200, 1, 64, 64], []])
def test_a_run_of_blocks_lands_where_the_engine_keeps_it(table: str, code: int, counts: list[int]) -> None:
    kernels.use(table)
    run = Run(code, counts, 2, 48)
    assert run.decode(run.sums) == -1
    end = 5 + sum(counts)
    for head in range(2):
        want = np.concatenate([np.zeros((0, 48), run.tensor.dtype), *(plane[head] for plane in run.planes)])
        assert np.array_equal(run.tensor[head, 5:end], want)
    assert (run.tensor[:, :5] == 77).all()
    assert (run.tensor[:, end:] == 77).all()


@TABLES
@pytest.mark.parametrize("sums", [True, False])
def test_the_first_damaged_stream_of_a_run_is_named(table: str, sums: bool) -> None:
    kernels.use(table)
    for damaged in range(5):
        run = Run(2, [64, 64, 70, 64, 64], 2, 48)
        run.buffers[damaged][run.offsets[damaged] + (900 if sums else 2)] ^= 4
        assert run.decode(run.sums if sums else None) == damaged


def test_short_streams_are_checked_as_well() -> None:
    run = Run(2, [1, 64], 1, 8)
    assert run.decode(run.sums) == -1
    run.sums[0] ^= 1
    assert run.decode(run.sums) == 0


def test_large_runs_are_spread_over_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(2, [64] * 7, 2, 48)
    monkeypatch.setattr("ctxreuse.kernels.lossless.PARALLEL_BYTES", 1000)
    monkeypatch.setattr("ctxreuse.kernels.lossless.cores", lambda: 3)
    assert run.decode(run.sums) == -1
    assert np.array_equal(run.tensor[:, 5:-9], np.concatenate(run.planes, axis=1))
    run.buffers[5][run.offsets[5] + 700] ^= 1
    run.buffers[3][run.offsets[3] + 700] ^= 1
    assert run.decode(run.sums) == 3


BACKENDS = pytest.mark.parametrize("backend", [_native, reference], ids=["native", "reference"])


@BACKENDS
def test_arguments_that_do_not_fit_are_refused(backend: Any) -> None:
    plane = np.zeros((1, 64, 4), np.uint16)
    out = np.zeros(kernels.lossless_bound(plane.nbytes), np.uint8)
    with pytest.raises(ValueError, match="out"):
        backend.lossless_encode(plane, 2, 0, (256, 4), (1, 64, 4), out[:-1])
    with pytest.raises(ValueError, match="leaves the buffer"):
        backend.lossless_encode(plane, 2, 2, (256, 4), (1, 64, 4), out)
    with pytest.raises(ValueError, match="too large"):
        backend.lossless_encode(plane, 2, 0, (0, 0, 0), (1 << 20, 1 << 20, 1), out)
    with pytest.raises(ValueError, match="type"):
        backend.lossless_encode(plane, 3, 0, (256, 4), (1, 64, 4), out)
    size = backend.lossless_encode(plane, 2, 0, (256, 4), (1, 64, 4), out)
    stream, target = out[:size], np.zeros((1, 64, 4), np.uint16)
    with pytest.raises(ValueError, match="leave"):
        backend.lossless_decode(target, 2, 0, (256, 4), 1, 4, [stream], [1], [size], [64], None)
    with pytest.raises(ValueError, match="dst"):
        backend.lossless_decode(target, 2, 0, (256, 4), 1, 4, [stream] * 2, [0] * 2, [size] * 2, [64] * 2, None)
    with pytest.raises(ValueError, match="share an address"):
        backend.lossless_decode(target, 2, 0, (256, 0), 1, 4, [stream], [0], [size], [64], None)
    with pytest.raises(ValueError):
        backend.lossless_decode(target, 2, 0, (256, 4), 1, 4, [stream], [0], [size], [64, 64], None)
