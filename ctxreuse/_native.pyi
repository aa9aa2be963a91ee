"""Signatures of the C extension; ctxreuse.kernels documents them.

Element types: 0 fp32, 1 fp16, 2 bf16. Offsets are bytes, strides elements. All arguments are positional.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray
from typing_extensions import Buffer

# numpy's stubs declare the buffer protocol only from Python 3.12 on.
Memory: TypeAlias = Buffer | NDArray[Any]

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
def gather_checked(to: Memory, buffers: Sequence[Memory], spans: Memory, checksums: Memory, /) -> int: ...
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
    parts: int,
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
    planes: tuple[object, ...],
    tensor: Memory,
    dtype: int,
    layout: Memory,
    sources: Sequence[tuple[int, Memory, Memory, Memory | None, Memory | None, Memory | None, Memory | None]],
    raw_dtype: int,
    angles: Sequence[Memory],
    times: Memory | None,
    /,
) -> tuple[str, int, int, int, bool] | None: ...
def klt_encode(
    planes: tuple[object, ...],
    tensor: Memory,
    dtype: int,
    layout: Memory,
    checksums: Memory | None,
    token_counts: Memory,
    raw_first: int,
    raw_dtype: int,
    angles: Sequence[Memory],
    refinement: bool,
    times: Memory | None,
    /,
) -> tuple[bytes, bytes] | tuple[str, int, int, int, bool]: ...
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
    rounded: bool,
    parts: Sequence[tuple[Any, ...]],
    first_head: int,
    last_head: int,
    first_row: int,
    last_row: int,
    threads: int,
    /,
) -> None: ...
def attend_each(
    q: Memory,
    o: Memory,
    dtype: int,
    keys: Sequence[Memory],
    values: Sequence[Memory],
    stored: int,
    query_heads: int,
    heads: int,
    dim: int,
    scale: float,
    softcap: float,
    threads: int,
    /,
) -> None: ...
def attend_merge(o: Memory, lse: Memory, count: int, rows: int, dim: int, /) -> None: ...
def attend_quantise(x: Memory, dtype: int, format: int, codes: Memory, scales: Memory, /) -> None: ...
def attend_name(dim: int, /) -> str: ...
def linear(
    x: Memory,
    dtype: int,
    w: Memory,
    format: int,
    scales: Memory | None,
    bias: Memory | None,
    y: Memory,
    rows: int,
    outputs: int,
    inputs: int,
    threads: int,
    /,
) -> None: ...
def linear_top(
    x: Memory,
    dtype: int,
    w: Memory,
    format: int,
    scales: Memory | None,
    bias: Memory | None,
    tops: Memory,
    rows: int,
    outputs: int,
    inputs: int,
    threads: int,
    /,
) -> None: ...
def drift_correct(
    keys: Memory,
    keys_dtype: int,
    keys_offset: int,
    keys_strides: Sequence[int],
    values: Memory,
    values_dtype: int,
    values_offset: int,
    values_strides: Sequence[int],
    shape: Sequence[int],
    spans: Memory,
    cos: Memory,
    sin: Memory,
    interleaved: bool,
    x: Memory,
    mean: Memory,
    reach: Memory,
    prior: Memory,
    dk: Memory,
    dv: Memory,
    threads: int,
    /,
) -> None: ...
def decoder_layer(
    parts: Sequence[tuple[Memory, int, Memory | None, Memory | None, int, int]],
    norms: Sequence[Memory | None],
    eps: float,
    heads: int,
    kv_heads: int,
    dim: int,
    gate: int,
    /,
) -> object: ...
def layer_enter(
    layer: object, x: Memory, cos: Memory, sin: Memory, qkv: Memory, dtype: int, rows: int, threads: int, /
) -> None: ...
def layer_leave(
    layer: object, attended: Memory, x: Memory, y: Memory, dtype: int, rows: int, threads: int, /
) -> None: ...
def shadow_new(
    kind: int, capacity: int, per_token: float, per_pair: float, alpha: float, beside: object | None, /
) -> object: ...
def shadow_tune(shadow: object, per_token: float, per_pair: float, alpha: float, /) -> None: ...
def shadow_request(
    shadow: object, keys: Memory, stride: int, sizes: Memory, tokens: Memory, now: float, /
) -> tuple[int, bytes]: ...
def shadow_hold(
    shadow: object, key: Memory, stride: int, parent: Memory | None, nbytes: int, start: int, tokens: int, /
) -> None: ...
def shadow_use(shadow: object, keys: Memory, stride: int, now: float, /) -> None: ...
def shadow_lookup(shadow: object, keys: Memory, stride: int, now: float, /) -> None: ...
def shadow_mark(shadow: object, key: Memory, stride: int, label: int, now: float, /) -> None: ...
def shadow_remember(shadow: object, least: int, ratio: float, /) -> None: ...
def shadow_learnt(shadow: object, /) -> bytes: ...
def shadow_teach(shadow: object, rows: Memory, /) -> None: ...
def ids_sampled(keys: Memory, stride: int, bits: int, /) -> list[int]: ...
def shadow_match(shadow: object, keys: Memory, stride: int, /) -> int: ...
def shadow_drop(shadow: object, key: Memory, stride: int, /) -> bool: ...
def shadow_order(shadow: object, limit: int, /) -> bytes: ...
def shadow_beyond(shadow: object, other: object, /) -> int: ...
def shadow_fit(shadow: object, /) -> bytes: ...
def shadow_figures(shadow: object, /) -> tuple[int, int, int]: ...
def shadow_check(shadow: object, /) -> str | None: ...
def cache_places_callback() -> int: ...
def heap_bytes() -> tuple[int, int]: ...
def keep_freed(nbytes: int, /) -> None: ...
def limit_arenas(count: int, /) -> None: ...
def map_from(nbytes: int, /) -> None: ...
def trim_memory() -> None: ...
def tree_new() -> object: ...
def tree_figures(tree: object, /) -> tuple[int, int, int, int, int]: ...
def tree_find(tree: object, key: bytes, /) -> int: ...
def tree_has(tree: object, place: int, /) -> bool: ...
def tree_add(tree: object, key: bytes, parent: int, tokens: int, nbytes: int, kind: int, /) -> int: ...
def tree_remove(tree: object, place: int, /) -> None: ...
def tree_field(tree: object, place: int, field: int, /) -> int: ...
def tree_set(tree: object, place: int, field: int, value: int, /) -> None: ...
def tree_row_of(tree: object, place: int, /) -> tuple[bytes, bytes, int, int, int, int, int, int]: ...
def tree_stated(tree: object, /) -> bytes: ...
def tree_line(tree: object, place: int, /) -> list[bytes]: ...
def tree_match(tree: object, keys: Sequence[bytes], allowed: bytes, /) -> tuple[int, int, int, int]: ...
def tree_runs(tree: object, places: Iterable[int], /) -> tuple[bytes, bytes]: ...
def tree_load(tree: object, rows: Memory, order: Memory, used: Memory, lost: Memory, uses: Memory, /) -> int: ...
def suffix_open(most: int, salt: int, /) -> object: ...
def suffix_figures(index: object, /) -> tuple[int, int, int]: ...
def suffix_append(index: object, ids: Memory, begins: bool, /) -> None: ...
def suffix_continue(index: object, tail: Memory, ids: Memory, shares: Memory, /) -> tuple[int, int]: ...
def suffix_newest(index: object, ids: Memory, /) -> int: ...
def shadow_fill(shadow: object, tree: object, order: Memory, now: float, /) -> None: ...
def residents_fill(residents: object, tree: object, /) -> None: ...
def lmdb_scan(path: str, heads: bool, table: str | None, /) -> tuple[str, bytearray, list[bytes]]: ...
def residents_new() -> object: ...
def residents_hold(
    residents: object, key: Memory, stride: int, nbytes: int, tokens: int, followed: bool, /
) -> None: ...
def residents_drop(residents: object, key: Memory, stride: int, /) -> bool: ...
def residents_match(residents: object, keys: Memory, stride: int, /) -> tuple[int, bytes, bytes]: ...
def residents_moved(residents: object, keys: Memory, stride: int, left: bool, /) -> None: ...
def residents_follow(residents: object, before: object, after: object, /) -> None: ...
def residents_orphans(residents: object, limit: int, /) -> list[bytes]: ...
def residents_keys(residents: object, ids: Memory, stride: int, /) -> list[bytes]: ...
def residents_figures(residents: object, /) -> tuple[int, int, int, int]: ...
