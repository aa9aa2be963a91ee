"""Block runs, rotation, entropy coding and huge pages, by the native extension.

Buffers. Every `dst`/`src` is anything with the buffer protocol and non-negative strides (numpy array, bytes,
memoryview, mmap, torch tensor through `.numpy()`); a strided array counts as the bytes from its first to its last
element. It is used only until the call returns: nothing keeps a pointer. Element types are named, because numpy has no
bfloat16: an integer or byte buffer is taken as raw storage, a floating array must be of the named type.

Boxes. A box has the shape (heads, tokens, dim); `offset` is the byte at which its first element lies, `strides` are in
elements, (heads, tokens) or (heads, tokens, dim), the last being 1 when left out. No strides: C order. Destination
strides that would give two elements one address are refused. Source and destination that overlap without being the
same view give unspecified values.

Numbers. Conversion rounds to nearest even, keeps NaN, infinities and subnormals; equal types are copied as bytes. Every
table (avx512, avx2, neon, generic) gives the same bits.

Threads. Any thread may call anything; the interpreter lock is released while more than 16 KiB are copied, so
the caller must keep other threads from writing the same destination.

Errors. ValueError: sizes, offsets, strides, names; TypeError: not a buffer, wrong floating type; ImportError: the
extension is not built, or CTXREUSE_KERNELS names a table that this machine cannot run.
"""

from __future__ import annotations

from ctxreuse.kernels.copy import advise_hugepages, copy_box, gather_checked, scatter_checked
from ctxreuse.kernels.dispatch import active, available, use
from ctxreuse.kernels.klt import KltGroup, KltPlane, KltPlanes, Source, StreamError, WholeNumbers, klt_name
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
from ctxreuse.kernels.rope import rope_shift

__all__ = [
    "LANES",
    "PARALLEL_SYMBOLS",
    "SYMBOLS",
    "KltGroup",
    "KltPlane",
    "KltPlanes",
    "RansTables",
    "Source",
    "StreamError",
    "WholeNumbers",
    "active",
    "advise_hugepages",
    "available",
    "copy_box",
    "gather_checked",
    "klt_name",
    "lossless_bound",
    "lossless_decode",
    "lossless_encode",
    "rans_bound",
    "rans_count",
    "rans_decode",
    "rans_decode_many",
    "rans_encode",
    "rans_encode_many",
    "rans_name",
    "rope_shift",
    "scatter_checked",
    "use",
]
