"""Strided copies, block runs, rotation, entropy coding and page population: the native core, or numpy without it.

Buffers. Every `dst`/`src` is anything with the buffer protocol and non-negative strides (numpy array, bytes,
memoryview, mmap, torch tensor through `.numpy()`); a strided array counts as the bytes from its first to its last
element. It is held only until the call returns: nothing keeps a pointer. Element types are named, because numpy has no
bfloat16: an integer or byte buffer is taken as raw storage, a floating array must be of the named type.

Boxes. A box has the shape (heads, tokens, dim); `offset` is the byte at which its first element lies, `strides` are in
elements, (heads, tokens) or (heads, tokens, dim), the last being 1 when left out. No strides: C order. Destination
strides that would give two elements one address are refused. Source and destination that overlap without being the
same view give unspecified values.

Numbers. Conversion rounds to nearest even, keeps NaN, infinities and subnormals; equal types are copied as bytes. Every
table gives the same bits, and so does `ctxreuse.kernels.reference`.

Threads. Any thread may call anything; the interpreter lock is released while more than 16 KiB are moved, so
the caller must keep other threads from writing the same destination.

Errors. ValueError: sizes, offsets, strides, names; TypeError: not a buffer, wrong floating type; OSError: `populate`
met a map longer than its file; ImportError: CTXREUSE_KERNELS names a table that this machine cannot run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import ArrayLike

from ctxreuse.kernels.backend import backend as _backend
from ctxreuse.kernels.klt import KltGroup, KltPlane, RopeAngles, StreamError, klt_name, klt_ready
from ctxreuse.kernels.lossless import lossless_bound, lossless_decode, lossless_encode
from ctxreuse.kernels.rans import (
    LANES,
    PARALLEL_SYMBOLS,
    SYMBOLS,
    RansTables,
    rans_bound,
    rans_count,
    rans_decode,
    rans_decode_many,
    rans_encode,
    rans_encode_many,
    rans_name,
)
from ctxreuse.kernels.rope import inverse_frequencies, shift_tables

if TYPE_CHECKING:
    from ctxreuse._native import Memory

__all__ = [
    "ITEM_BYTES",
    "LANES",
    "PARALLEL_SYMBOLS",
    "SYMBOLS",
    "KltGroup",
    "KltPlane",
    "RansTables",
    "RopeAngles",
    "StreamError",
    "active",
    "advise_hugepages",
    "available",
    "copy3",
    "gather_run",
    "inverse_frequencies",
    "klt_name",
    "klt_ready",
    "lossless_bound",
    "lossless_decode",
    "lossless_encode",
    "populate",
    "rans_bound",
    "rans_count",
    "rans_decode",
    "rans_decode_many",
    "rans_encode",
    "rans_encode_many",
    "rans_name",
    "rope_shift",
    "scatter_checked",
    "scatter_run",
    "shift_tables",
    "use",
]

ITEM_BYTES: Final = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of an element, by the short name of its type."""

_SIZES: Final = tuple(ITEM_BYTES.values())
# XXH3 has forms of its own for inputs up to this many bytes; the native kernel has the long one only.
_SHORT: Final = 240
_CODES: Final = {"fp32": 0, "fp16": 1, "bf16": 2, "float32": 0, "float16": 1, "bfloat16": 2}
_FLOATS: Final = (np.dtype(np.float32), np.dtype(np.float16), None)


def active() -> str:
    """Name of the table in use: `avx512`, `avx2`, `neon`, `generic`, or `numpy` when the extension is not built."""
    return _backend.active()


def available() -> tuple[str, ...]:
    """Names of the tables that run here, best first; the last is `generic`, or the only one is `numpy`."""
    return _backend.kernels()


def use(name: str) -> None:
    """Switch the whole process to a table, for tests and benches. ValueError if it is not in `available()`."""
    _backend.use(name)


def copy3(
    dst: Memory,
    src: Memory,
    shape: Sequence[int],
    *,
    dst_dtype: str,
    src_dtype: str | None = None,
    dst_strides: Sequence[int] | None = None,
    src_strides: Sequence[int] | None = None,
    dst_offset: int = 0,
    src_offset: int = 0,
) -> None:
    """Copy a (heads, tokens, dim) box between two layouts, converting its element type (`src_dtype`: as `dst_dtype`).

    Runs at memory-copy speed when dim is contiguous on both sides, and by register transposes when the source is
    contiguous along another axis (vLLM's CPU cache keeps K as [heads, dim, tokens] inside a page).
    """
    to, of = _code(dst_dtype, dst), _code(src_dtype or dst_dtype, src)
    dst_strides = _dense(shape) if dst_strides is None else dst_strides
    src_strides = _dense(shape) if src_strides is None else src_strides
    _backend.copy3(dst, to, dst_offset, dst_strides, src, of, src_offset, src_strides, shape)


def scatter_run(
    dst: Memory,
    dst_dtype: str,
    dst_offset: int,
    dst_strides: Sequence[int],
    srcs: Sequence[Memory],
    src_offsets: Sequence[int],
    src_dtype: str,
    heads: int,
    dim: int,
    token_counts: Sequence[int],
) -> None:
    """Write the planes of consecutive blocks into an engine's tensor [heads, tokens, dim], in one call.

    Plane i is contiguous [heads, token_counts[i], dim] at byte `src_offsets[i]` of `srcs[i]`; its tokens follow
    those of plane i-1, the first at `dst_offset`. Nothing is written if any argument is refused.
    """
    to, of = _code(dst_dtype, dst), _code(src_dtype)
    _backend.scatter_run(dst, to, dst_offset, dst_strides, srcs, src_offsets, of, heads, dim, token_counts)


def scatter_checked(
    dst: Memory,
    dst_dtype: str,
    dst_offset: int,
    dst_strides: Sequence[int],
    srcs: Sequence[Memory],
    src_offsets: Sequence[int],
    src_dtype: str,
    heads: int,
    dim: int,
    token_counts: Sequence[int],
    checksums: Sequence[int],
) -> int:
    """`scatter_run` that compares each plane's XXH3-64 with `checksums[i]` while it copies.

    Returns the index of the first plane that differs, or -1. What was written of that plane and of those before it
    stays written: the destination is not to be used then. Memory is read once and, where the tensor is aligned to 64
    bytes, written past the caches (94 MB of 48 KiB planes on one core: 12.2 GB/s with AVX-512, 10.4 with AVX2; memcpy
    14.9; see ``ctxreuse bench kernels``. Checking first and copying then: 5.8).
    """
    to, of = _code(dst_dtype, dst), _code(src_dtype)
    call = _backend.scatter_checked
    if any(0 < heads * count * dim * _SIZES[of] <= _SHORT for count in token_counts):
        call = _reference_checked()
    return call(dst, to, dst_offset, dst_strides, srcs, src_offsets, of, heads, dim, token_counts, checksums)


def _reference_checked() -> Any:
    from ctxreuse.kernels import reference

    return reference.scatter_checked


def gather_run(
    src: Memory,
    src_dtype: str,
    src_offset: int,
    src_strides: Sequence[int],
    dsts: Sequence[Memory],
    dst_offsets: Sequence[int],
    dst_dtype: str,
    heads: int,
    dim: int,
    token_counts: Sequence[int],
) -> None:
    """Cut consecutive tokens of an engine's tensor into planes of blocks: the inverse of `scatter_run`."""
    of, to = _code(src_dtype, src), _code(dst_dtype)
    _backend.gather_run(src, of, src_offset, src_strides, dsts, dst_offsets, to, heads, dim, token_counts)


def rope_shift(
    dst: Memory,
    src: Memory,
    shape: Sequence[int],
    cos: ArrayLike,
    sin: ArrayLike,
    *,
    dst_dtype: str,
    src_dtype: str | None = None,
    dst_strides: Sequence[int] | None = None,
    src_strides: Sequence[int] | None = None,
    dst_offset: int = 0,
    src_offset: int = 0,
    interleaved: bool = False,
) -> None:
    """Rotate every K vector of a box by one position offset; `dst` may be `src` (in place, same strides and type).

    `cos`, `sin`: r/2 angles from `shift_tables`, r <= dim; elements from r on are copied. Pairs are (i, i + r/2)
    (GPT-NeoX, Hugging Face), or (2i, 2i + 1) with `interleaved` (GPT-J; llama in GGUF). out1 = x1*cos - x2*sin,
    out2 = x2*cos + x1*sin, in fp32 without fused multiply-add (RoFormer, arXiv 2104.09864, eq. 34). A NaN result is the
    positive quiet NaN. Strided dim is right but passes through a scratch tile: MemoryError if that cannot be had.
    """
    to, of = _code(dst_dtype, dst), _code(src_dtype or dst_dtype, src)
    dst_strides = _dense(shape) if dst_strides is None else dst_strides
    src_strides = _dense(shape) if src_strides is None else src_strides
    c, s = np.ascontiguousarray(cos, dtype=np.float32), np.ascontiguousarray(sin, dtype=np.float32)
    _backend.rope_shift(dst, to, dst_offset, dst_strides, src, of, src_offset, src_strides, shape, c, s, interleaved)


def populate(buffer: Memory) -> int:
    """Make every page of a buffer (a memory map) present, so that reading it is copying and not page faults.

    Returns the bytes made present. Blocks until they are read from disk, without the interpreter lock: call it from
    a thread of your own. OSError if the file behind a map was cut short.
    """
    return _backend.populate(buffer)


def advise_hugepages(buffer: Memory, *, populate: bool = False) -> int:
    """Ask for huge pages on the whole 2 MiB pages inside a buffer; with `populate`, fault them in writable.

    Returns the bytes advised: 0 where the buffer holds no whole page or the kernel has no transparent huge pages.
    """
    return _backend.advise_hugepages(buffer, populate)


def _code(dtype: str, buffer: Any = None) -> int:
    code = _CODES.get(dtype)
    if code is None:
        raise ValueError(f"element type {dtype!r} is unknown; use one of {', '.join(ITEM_BYTES)}")
    if isinstance(buffer, np.ndarray) and buffer.dtype.kind == "f" and buffer.dtype != _FLOATS[code]:
        raise TypeError(
            f"array of {buffer.dtype} given as {dtype}; view it as unsigned integers if its bytes are meant"
        )
    return code


def _dense(shape: Sequence[int]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise ValueError(f"shape needs (heads, tokens, dim), got {len(shape)} sizes")
    return max(shape[1] * shape[2], 0), max(shape[2], 0), 1
