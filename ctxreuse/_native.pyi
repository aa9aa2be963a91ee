"""Signatures of the C extension; its documented, typed door is ctxreuse.kernels.

Element types: 0 fp32, 1 fp16, 2 bf16. Offsets are bytes, strides elements. All arguments are positional.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray
from typing_extensions import Buffer

# numpy's stubs declare the buffer protocol only from Python 3.12 on.
Memory: TypeAlias = Buffer | NDArray[Any]

def copy3(
    dst: Memory,
    dst_dtype: int,
    dst_offset: int,
    dst_strides: Sequence[int],
    src: Memory,
    src_dtype: int,
    src_offset: int,
    src_strides: Sequence[int],
    shape: Sequence[int],
    /,
) -> None: ...
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
    /,
) -> None: ...
def scatter_run(
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
    /,
) -> None: ...
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
    /,
) -> int: ...
def gather_run(
    src: Memory,
    src_dtype: int,
    src_offset: int,
    src_strides: Sequence[int],
    dsts: Sequence[Memory],
    dst_offsets: Sequence[int],
    dst_dtype: int,
    heads: int,
    dim: int,
    token_counts: Sequence[int],
    /,
) -> None: ...
def populate(buffer: Memory, /) -> int: ...
def advise_hugepages(buffer: Memory, populate: bool, /) -> int: ...
def kernels() -> tuple[str, ...]: ...
def active() -> str: ...
def use(name: str, /) -> None: ...
def lossless_encode(
    src: Memory, dtype: int, offset: int, strides: Sequence[int], shape: Sequence[int], out: Memory, /
) -> int: ...
def lossless_decode(
    dst: Memory,
    dtype: int,
    offset: int,
    strides: Sequence[int],
    heads: int,
    dim: int,
    srcs: Sequence[Memory],
    offsets: Sequence[int],
    sizes: Sequence[int],
    token_counts: Sequence[int],
    checksums: Sequence[int] | None,
    /,
) -> int: ...
def rans_tables(freqs: Memory, /) -> object: ...
def rans_encode(
    tables: object,
    data: Memory,
    offsets: Memory,
    symbols: Memory,
    counts: Memory,
    table_of_step: Memory,
    seeds: Memory,
    /,
) -> int: ...
def rans_decode(
    tables: object,
    data: Memory,
    offsets: Memory,
    symbols: Memory,
    counts: Memory,
    table_of_step: Memory,
    seeds: Memory,
    /,
) -> int: ...
def rans_count(symbols: Memory, table_of_step: Memory, counts: Memory, /) -> None: ...
def rans_name() -> str: ...
def klt_plane(
    tables: object,
    heads: int,
    dim: int,
    level: int,
    step: float,
    nested: bool,
    rope: int,
    base: object | None,
    groups: Sequence[tuple[Any, ...]],
    /,
) -> object: ...
def klt_decode(
    plane: object,
    tensor: Memory,
    dtype: int,
    offset: int,
    strides: Sequence[int],
    streams: Sequence[tuple[Memory, int | None, Memory | None, int | None, int]],
    raw_dtype: int,
    cos: Memory,
    sin: Memory,
    times: Memory | None,
    /,
) -> tuple[str, int, int, bool] | None: ...
def klt_encode(
    plane: object,
    tensor: Memory,
    dtype: int,
    offset: int,
    strides: Sequence[int],
    token_counts: Memory,
    raw_first: int,
    raw_dtype: int,
    cos: Memory,
    sin: Memory,
    refinement: bool,
    out: Memory,
    offsets: Memory,
    times: Memory | None,
    /,
) -> tuple[str, int, int, bool] | None: ...
def klt_bound(plane: object, tokens: int, raw_dtype: int, /) -> int: ...
def klt_name() -> str: ...
