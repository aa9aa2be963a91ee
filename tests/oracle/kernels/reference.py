"""Copies of block runs, rotation and conversion in plain numpy. Arguments are those of `ctxreuse/_native.pyi`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ctxreuse._native import Memory

__all__ = ["advise_hugepages", "convert", "rope_shift", "scatter_checked"]

Bits = NDArray[np.unsignedinteger[Any]]

_FP32, _FP16, _BF16 = 0, 1, 2
_ITEM_BYTES = (4, 2, 2)
_SIZE_MAX = 2**63 - 1


def scatter_checked(
    dst: Memory,
    dst_dtype: int,
    dst_offset: int,
    dst_strides: Sequence[int],
    srcs: Sequence[Memory],
    src_offsets: Sequence[int],
    src_dtype: int,
    heads: int,
    dim: int,
    token_counts: Sequence[int],
    checksums: Sequence[int],
) -> int:
    """Compare checksums, then write. See `ctxreuse.kernels.scatter_checked`."""
    if len(checksums) != len(srcs) or not all(0 <= value < 1 << 64 for value in checksums):
        raise ValueError(f"checksums: {len(checksums)} for {len(srcs)} blocks, each of 64 bits")
    planes = _planes(srcs, src_offsets, src_dtype, heads, dim, token_counts)
    shape = (heads, sum(token_counts), dim)
    tensor = _window(dst, dst_dtype, dst_offset, dst_strides, shape, "tensor", writable=True)
    for i, plane in enumerate(planes):
        if plane.size and xxhash.xxh3_64_intdigest(plane.tobytes()) != checksums[i]:
            return i
    token = 0
    for plane in filter(np.size, planes):
        tensor[:, token : token + plane.shape[1]] = convert(plane, src_dtype, dst_dtype)
        token += plane.shape[1]
    return -1


def rope_shift(
    dst: Memory,
    dst_dtype: int,
    dst_offset: int,
    dst_strides: Sequence[int],
    src: Memory,
    src_dtype: int,
    src_offset: int,
    src_strides: Sequence[int],
    shape: Sequence[int],
    cos: Memory,
    sin: Memory,
    interleaved: bool,
) -> None:
    """Rotate the vectors of a box. See `ctxreuse.kernels.rope_shift`."""
    c, s = np.asarray(cos), np.asarray(sin)
    if (
        c.dtype != np.float32
        or s.dtype != np.float32
        or c.ndim != 1
        or c.shape != s.shape
        or not (c.flags.c_contiguous and s.flags.c_contiguous)
    ):
        raise ValueError("cos, sin: need contiguous float32 buffers of the same length")
    half = len(c)
    to = _window(dst, dst_dtype, dst_offset, dst_strides, shape, "dst", writable=True)
    of = _window(src, src_dtype, src_offset, src_strides, shape, "src")
    if 2 * half > shape[2]:
        raise ValueError(f"cos: {half} angles rotate more than dim {shape[2]} elements")
    if to.size == 0:
        return
    out = convert(of, src_dtype, dst_dtype)
    x = convert(of, src_dtype, _FP32).view(np.float32)
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    x1, x2 = x[..., first], x[..., second]
    with np.errstate(all="ignore"):
        turned = x1 * c - x2 * s, x2 * c + x1 * s
    for part, values in zip((first, second), turned, strict=True):
        values[np.isnan(values)] = np.nan
        out[..., part] = convert(values.view(np.uint32), _FP32, dst_dtype)
    to[...] = out


def advise_hugepages(buffer: Memory, populate: bool) -> int:
    """Returns 0: numpy cannot advise the kernel."""
    _span(buffer, "buffer", writable=populate)
    return 0


def convert(bits: Bits, src_dtype: int, dst_dtype: int) -> Bits:
    """A copy of elements given as their bits (uint32 for fp32, else uint16), any shape, as bits of another type."""
    bits = np.array(bits, order="C")
    out: Bits
    if src_dtype == dst_dtype:
        return bits
    wide: Any
    if src_dtype == _FP32:
        wide = bits
    elif src_dtype == _BF16:
        wide = bits.astype(np.uint32) << 16
    else:
        sign, magnitude = (bits & 0x8000).astype(np.uint32) << 16, (bits & 0x7FFF).astype(np.uint32)
        nan = magnitude > 0x7C00
        plain = np.where(nan, 0, bits).astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        wide = np.where(nan, sign | 0x7FC00000 | magnitude << 13, plain)
    if dst_dtype == _FP32:
        return np.asarray(wide, dtype=np.uint32)
    nan = (wide & 0x7FFFFFFF) > 0x7F800000
    if dst_dtype == _BF16:
        # The sum cannot wrap: only NaN patterns lie that high, and those are replaced.
        rounded = (wide + (0x7FFF + (wide >> 16 & 1))) >> 16
        out = np.where(nan, wide >> 16 | 0x40, rounded).astype(np.uint16)
        return out
    with np.errstate(over="ignore", under="ignore"):
        narrow = np.where(nan, 0, wide).astype(np.uint32).view(np.float32).astype(np.float16).view(np.uint16)
    out = np.where(nan, wide >> 16 & 0x8000 | 0x7E00 | wide >> 13 & 0x3FF, narrow).astype(np.uint16)
    return out


class _Memory:
    """Makes numpy see an address range as an array that keeps `owner` alive."""

    def __init__(self, owner: Any, interface: dict[str, Any]) -> None:
        self.owner = owner
        self.__array_interface__ = interface


def _span(buffer: Memory, what: str, *, writable: bool) -> NDArray[np.uint8]:
    try:
        view = memoryview(cast(Any, buffer))
    except TypeError:
        raise TypeError(f"{what}: needs an object with the buffer protocol") from None
    if writable and view.readonly:
        raise ValueError(f"{what}: needs a writable buffer with strides")
    shape, strides = view.shape or (), view.strides or ()
    if any(stride < 0 for stride in strides):
        raise ValueError(f"{what}: negative strides are not supported; pass a copy")
    if view.nbytes == 0:
        return np.zeros(0, np.uint8)
    array = np.asarray(view)
    size = view.itemsize + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    data = (array.__array_interface__["data"][0], not writable)
    return np.asarray(_Memory(array, {"version": 3, "data": data, "shape": (size,), "typestr": "|u1"}))


def _sizes(values: Sequence[SupportsIndex], what: str, counts: tuple[int, ...]) -> tuple[int, ...]:
    sizes = tuple(_size(value, what) for value in values)
    if len(sizes) not in counts:
        raise ValueError(f"{what}: needs {' or '.join(map(str, counts))} sizes, got {len(sizes)}")
    return sizes


def _size(value: SupportsIndex, what: str) -> int:
    size = operator.index(value)
    if not 0 <= size <= _SIZE_MAX:
        raise ValueError(f"{what}: must lie in 0..2**63-1, got {size}")
    return size


def _item_bytes(dtype: int) -> int:
    if _size(dtype, "dtype") >= len(_ITEM_BYTES):
        raise ValueError(f"unknown element type {dtype} (0 fp32, 1 fp16, 2 bf16)")
    return _ITEM_BYTES[dtype]


def _window(
    buffer: Memory,
    dtype: int,
    offset: int,
    strides: Sequence[int],
    shape: Sequence[int],
    what: str,
    *,
    writable: bool = False,
) -> Bits:
    """A box of a buffer as a (heads, tokens, dim) view of its elements' bits; writable ones hold distinct elements."""
    item = _item_bytes(dtype)
    lengths = _sizes(shape, "shape", (3,))
    steps = (*_sizes(strides, f"{what} strides", (2, 3)), 1)[:3]
    start = _size(offset, f"{what} offset")
    flat = _span(buffer, what, writable=writable)
    axes = sorted((step, n) for step, n in zip(steps, lengths, strict=True) if n > 1)
    reach = sum((n - 1) * step for step, n in axes)
    end = start + (reach + 1) * item if all(lengths) else start
    if end > len(flat):
        raise ValueError(f"{what}: box {lengths} at byte {start} leaves the buffer of {len(flat)} bytes")
    if not all(lengths):  # not np.zeros(lengths): the other lengths may be beyond numpy
        return np.zeros((0, 0, 0), np.uint32 if item == 4 else np.uint16)
    reach = 0
    for step, n in axes if writable else ():
        if step <= reach:
            raise ValueError(f"{what}: strides make elements share an address")
        reach += (n - 1) * step
    interface = dict(flat.__array_interface__)
    interface["data"] = (interface["data"][0] + start, not writable)
    interface["shape"] = lengths
    interface["strides"] = tuple(step * item if n > 1 else item for step, n in zip(steps, lengths, strict=True))
    interface["typestr"] = f"<u{item}"
    window: Bits = np.asarray(_Memory(flat, interface))
    return window


def _planes(
    buffers: Sequence[Memory],
    offsets: Sequence[int],
    dtype: int,
    heads: int,
    dim: int,
    counts: Sequence[int],
) -> list[Bits]:
    if not len(buffers) == len(offsets) == len(counts):
        raise ValueError(f"block: {len(buffers)} buffers, {len(offsets)} offsets, {len(counts)} token counts")
    planes = []
    for i, (buffer, offset, count) in enumerate(zip(buffers, offsets, counts, strict=True)):
        strides = (_size(count, "token count") * _size(dim, "dim"), dim, 1)
        planes.append(_window(buffer, dtype, offset, strides, (heads, count, dim), f"block {i}"))
    return planes
