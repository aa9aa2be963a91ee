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
def attend(
    q: Memory,
    o: Memory,
    lse: Memory,
    query_heads: int,
    heads: int,
    queries: int,
    dim: int,
    positions: Memory | None,
    scale: float,
    window: int,
    softcap: float,
    parts: Sequence[tuple[Any, ...]],
    first_head: int,
    last_head: int,
    first_row: int,
    last_row: int,
    /,
) -> None: ...
def attend_merge(o: Memory, lse: Memory, count: int, rows: int, dim: int, /) -> None: ...
def attend_quantise(x: Memory, dtype: int, format: int, codes: Memory, scales: Memory, /) -> None: ...
def attend_name(dim: int, /) -> str: ...
def shadow_new(kind: int, capacity: int, per_token: float, per_pair: float, alpha: float, /) -> object: ...
def shadow_tune(shadow: object, per_token: float, per_pair: float, alpha: float, /) -> None: ...
def shadow_request(
    shadow: object, keys: Memory, stride: int, sizes: Memory, tokens: Memory, now: float, /
) -> tuple[int, bytes]: ...
def shadow_hold(
    shadow: object, key: Memory, stride: int, parent: Memory | None, nbytes: int, start: int, tokens: int, /
) -> None: ...
def shadow_use(shadow: object, keys: Memory, stride: int, now: float, /) -> None: ...
def shadow_mark(shadow: object, key: Memory, stride: int, label: int, /) -> None: ...
def shadow_remember(shadow: object, least: int, ratio: float, /) -> None: ...
def shadow_learnt(shadow: object, /) -> bytes: ...
def shadow_teach(shadow: object, rows: Memory, /) -> None: ...
def shadow_match(shadow: object, keys: Memory, stride: int, /) -> int: ...
def shadow_drop(shadow: object, key: Memory, stride: int, /) -> bool: ...
def shadow_order(shadow: object, limit: int, /) -> bytes: ...
def shadow_beyond(shadow: object, other: object, /) -> int: ...
def shadow_fit(shadow: object, /) -> bytes: ...
def shadow_figures(shadow: object, /) -> tuple[int, int, int]: ...
def shadow_check(shadow: object, /) -> str | None: ...
def roster_new() -> object: ...
def roster_hold(roster: object, key: Memory, stride: int, nbytes: int, tokens: int, followed: bool, /) -> None: ...
def roster_drop(roster: object, key: Memory, stride: int, /) -> bool: ...
def roster_match(roster: object, keys: Memory, stride: int, /) -> tuple[int, bytes, bytes]: ...
def roster_moved(roster: object, keys: Memory, stride: int, left: bool, /) -> None: ...
def roster_follow(roster: object, before: object, after: object, /) -> None: ...
def roster_strays(roster: object, limit: int, /) -> list[bytes]: ...
def roster_keys(roster: object, ids: Memory, stride: int, /) -> list[bytes]: ...
def roster_figures(roster: object, /) -> tuple[int, int, int, int]: ...
