"""Planes of K and V to coded streams and back, natively: transform, integers, rANS, rotation and types in one call.

`native/klt/klt.h` defines the stream and the arithmetic; every instruction set gives the same bytes.

A plane is [heads, tokens, dim] of one layer at one level of a profile. `KltPlane` holds a profile's numbers for it in
the form that the kernels read: it is made once, is immutable, and may be used by any number of threads. Buffers are as
in `ctxreuse.kernels`: used only until the call returns, strides in elements, offsets in bytes.

Threads. The interpreter lock is released. Runs of streams with more than `PARALLEL_VALUES` values are spread over the
kernels' threads.

Errors. ValueError: arguments; StreamError (a FormatError): corrupt streams. Any bytes may be given: nothing outside of
the streams is read and nothing outside of the destination's box is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ctxreuse.errors import FormatError
from ctxreuse.kernels.base import LONG_HASH, dtype_code, hash_matches, item_bytes
from ctxreuse.kernels.dispatch import native
from ctxreuse.kernels.rans import RansTables
from ctxreuse.kernels.threads import cores, spread

if TYPE_CHECKING:
    from ctxreuse._native import Memory

__all__ = [
    "DECODE_PARTS",
    "ENCODE_PARTS",
    "PARALLEL_VALUES",
    "KltGroup",
    "KltPlane",
    "StreamError",
    "WholeNumbers",
    "klt_name",
]

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Angles = tuple[Floats, Floats]

PARALLEL_VALUES: Final = 1 << 19
"""Values from which one call uses several threads: about a quarter of a millisecond of decoding."""
DECODE_PARTS: Final = ("checks", "rans", "integers", "values and rows")
"""Parts that decoding time is reported in: checksums and entries; symbols; q; the transform up to the written rows."""
ENCODE_PARTS: Final = ("rows", "scales", "transform", "symbols", "rans", "bytes")
"""Parts that encoding time is reported in."""
_ROPES: Final = {"none": 0, "half": 1, "pairs": 2}
_EMPTY: Final = np.empty(0, np.float32)
_REASONS: Final = {
    "checksum": "the checksum differs",
    "head": "scheme, level or part is not the expected one",
    "count": "the number of tokens or cells is not the expected one",
    "length": "lengths exceed the stream",
    "rans": "the rANS stream is corrupt",
    "escapes": "the number of escapes differs from that in the symbols",
    "scale": "a scale is out of range",
    "low": "low-order bits are set beyond the last token",
    "merge": "the refinement does not fit its base",
    "table": "a value has no code in the tables",
}


class StreamError(FormatError):
    """Bytes are no stream of this plane and level; ``stream`` is its index in the run."""

    stream = -1


class WholeNumbers(NamedTuple):
    """A forward map in whole numbers: ``rows`` int16 [n, C], ``quantum`` float32 [n] and ``unit``, see `klt.h`."""

    rows: ArrayLike
    quantum: ArrayLike
    unit: float


class KltGroup(NamedTuple):
    """A profile's numbers for one group at one level. Components with a ``table`` are coded; rows beyond are ignored.

    ``first`` head and ``heads``; ``mean`` and ``gain`` float32 [C], C = heads * dim; ``forward`` float32 and ``basis``
    int16 (within ±8191) [n, C], n >= components; ``table`` and ``shift`` (<= 10) uint8 [components]; ``refine`` uint8
    [components of the base], for a level with a base. Trailing components whose basis is a multiple of 64 throughout
    and whose shift is 0 decode up to twice as fast (bytes instead of words). ``whole``: encode by it,
    not by ``forward``.
    """

    first: int
    heads: int
    log_rms: float
    mean: ArrayLike
    gain: ArrayLike
    forward: ArrayLike
    basis: ArrayLike
    table: ArrayLike
    shift: ArrayLike
    refine: ArrayLike | None = None
    whole: WholeNumbers | None = None


def klt_name() -> str:
    """The implementation in use: that of `kernels.active()`, but `avx2` for AVX-512 without VNNI."""
    return native.klt_name()


class KltPlane:
    """One plane of a layer at one level, prepared.

    ``tables``: the profile's. ``groups`` cover the heads in order. ``level``: its index in the profile, as in streams.
    ``base``: the plane at the level that this one refines; ``nested``: another level, of a third of this step, refines
    this one. ``rope``: how K is rotated ("half": pairs (i, i + r/2); "pairs": (2i, 2i + 1)); "none" for V. ValueError
    for arrays that do not fit, tables without a frequency for the escape 31, and numbers out of range.
    """

    __slots__ = ("base", "dim", "groups", "heads", "prepared", "rope")

    def __init__(
        self,
        tables: RansTables,
        dim: int,
        groups: Sequence[KltGroup],
        level: int,
        step: float,
        *,
        base: KltPlane | None = None,
        nested: bool = False,
        rope: str = "none",
    ) -> None:
        if rope not in _ROPES:
            raise ValueError(f"rotation {rope!r} is unknown; use one of {', '.join(_ROPES)}")
        self.heads, self.dim, self.groups, self.base, self.rope = (
            sum(g.heads for g in groups),
            dim,
            len(groups),
            base,
            rope,
        )
        self.prepared: object = native.klt_plane(
            tables.prepared, self.heads, dim, level, step, nested, _ROPES[rope],
            None if base is None else base.prepared, [_fields(group, dim) for group in groups],
        )  # fmt: skip
        """The form that the extension reads."""

    def encode(
        self,
        src: Memory,
        dtype: str,
        offset: int,
        strides: Sequence[int],
        token_counts: Sequence[int],
        *,
        raw_first: int = 0,
        raw_dtype: str | None = None,
        angles: Angles | None = None,
        refinement: bool = False,
        times: NDArray[np.int64] | None = None,
    ) -> tuple[Bytes, NDArray[np.int64]]:
        """Encode consecutive blocks' rows of a tensor [heads, sum(token_counts), dim]: bytes and offsets [blocks + 1].

        The first ``raw_first`` rows stay raw, in ``raw_dtype`` (default ``dtype``). ``angles``: for a rotated plane,
        `Rotary.span_tables` of all rows that undo the rotation. ``refinement``: encode what leads from the base level
        to this one instead.
        ``times``: nanoseconds of each of ENCODE_PARTS are added to it, and one thread works.
        """
        counts = np.ascontiguousarray(token_counts, np.int64)
        type_, raw = dtype_code(dtype), dtype_code(raw_dtype or dtype)
        cos, sin = angles or (_EMPTY, _EMPTY)
        parts = self._parts([int(n) for n in counts], whole=times is not None)

        def encode(i: int) -> tuple[Bytes, NDArray[np.int64]]:
            lo, hi, row, end = parts[i]
            out = np.empty(sum(native.klt_bound(self.prepared, int(n), raw) for n in counts[lo:hi]), np.uint8)
            offsets = np.zeros(hi - lo + 1, np.int64)
            wrong = native.klt_encode(
                self.prepared, src, type_, offset + row * strides[1] * item_bytes(type_), strides, counts[lo:hi],
                max(raw_first - row, 0), raw, cos[row:end], sin[row:end], refinement, out, offsets,
                times,
            )  # fmt: skip
            if wrong is not None:
                raise _error(wrong, lo)
            return out[: int(offsets[-1])], offsets

        made = spread(encode, len(parts))
        if len(made) == 1:
            return made[0][0].copy(), made[0][1]
        starts = np.cumsum([0, *(len(data) for data, _ in made)])
        ends = [offsets[1:] + start for (_, offsets), start in zip(made, starts, strict=False)]
        return np.concatenate([data for data, _ in made]), np.concatenate([np.zeros(1, np.int64), *ends])

    def decode(
        self,
        dst: Memory,
        dst_dtype: str,
        dst_offset: int,
        dst_strides: Sequence[int],
        streams: Sequence[Memory],
        token_counts: Sequence[int],
        raw_dtype: str,
        *,
        angles: Angles | None = None,
        checksums: Sequence[int | None] | None = None,
        refinements: Sequence[Memory | None] | None = None,
        refinement_checksums: Sequence[int | None] | None = None,
        times: NDArray[np.int64] | None = None,
    ) -> None:
        """Decode consecutive blocks' streams into a tensor [heads, sum(token_counts), dim].

        Stream i must hold token_counts[i] tokens (at least 1); raw ones are of ``raw_dtype``. ``angles``:
        `Rotary.span_tables` of all rows, for a rotated plane. ``checksums``: XXH3-64 of the streams, compared where
        given. With ``refinements[i]``, ``streams[i]`` is of the base level. StreamError: rows have been written then.
        ``times``: nanoseconds of each of DECODE_PARTS are added to it, and one thread works.
        """
        count = len(streams)
        more: Sequence[Memory | None] = refinements if refinements is not None else [None] * count
        sums = checksums if checksums is not None else [None] * count
        more_sums = refinement_checksums if refinement_checksums is not None else [None] * count
        if not count == len(token_counts) == len(more) == len(sums) == len(more_sums):
            raise ValueError(f"{count} streams, {len(token_counts)} token counts, {len(more)} refinements")
        run = []
        for i in range(count):
            own = _checked(streams[i], sums[i], i)
            also = None if more[i] is None else _checked(more[i], more_sums[i], i)
            run.append((streams[i], own, more[i], also, token_counts[i]))
        type_, raw = dtype_code(dst_dtype), dtype_code(raw_dtype)
        cos, sin = angles or (_EMPTY, _EMPTY)
        parts = self._parts(token_counts, whole=times is not None)

        def decode(i: int) -> None:
            lo, hi, row, end = parts[i]
            wrong = native.klt_decode(
                self.prepared, dst, type_, dst_offset + row * dst_strides[1] * item_bytes(type_), dst_strides,
                run[lo:hi], raw, cos[row:end], sin[row:end], times,
            )  # fmt: skip
            if wrong is not None:
                raise _error(wrong, lo)

        spread(decode, len(parts))

    def _parts(self, counts: Sequence[int], *, whole: bool) -> list[tuple[int, int, int, int]]:
        """Runs of streams, one a thread: first and behind last stream, then row."""
        rows = [0]
        for n in counts:
            rows.append(rows[-1] + n)
        values = rows[-1] * self.heads * self.dim
        threads = min(cores(), len(counts), values // (PARALLEL_VALUES // 2)) if values > PARALLEL_VALUES else 1
        if whole or threads <= 1:
            return [(0, len(counts), 0, rows[-1])]
        cuts = np.searchsorted(rows, [rows[-1] * i // threads for i in range(1, threads)]).tolist()
        edges = sorted({0, *cuts, len(counts)})
        return [(lo, hi, rows[lo], rows[hi]) for lo, hi in itertools.pairwise(edges)]


def _fields(group: KltGroup, dim: int) -> tuple[Any, ...]:
    table, channels = np.ascontiguousarray(group.table, np.uint8), group.heads * dim
    n = len(table)
    whole = group.whole or WholeNumbers(np.empty((0, channels), np.int16), np.empty(0, np.float32), 0.0)
    arrays = (
        np.ascontiguousarray(group.mean, np.float32), np.ascontiguousarray(group.gain, np.float32),
        np.ascontiguousarray(np.asarray(group.forward, np.float32)[: 0 if group.whole else n]),
        np.ascontiguousarray(np.asarray(whole.rows, np.int16)[:n]), np.ascontiguousarray(whole.quantum, np.float32),
        np.ascontiguousarray(np.asarray(group.basis)[:n]),
        table, np.ascontiguousarray(group.shift, np.uint8),
        np.ascontiguousarray(() if group.refine is None else group.refine, np.uint8),
    )  # fmt: skip
    if arrays[5].dtype != np.int16:
        raise ValueError(f"basis: needs int16, got {arrays[5].dtype}")
    energy = 2.0 ** (-2 * group.log_rms) / channels if channels else 0.0
    return (group.first, group.heads, energy, float(whole.unit), *arrays)


def _checked(data: Memory | None, checksum: int | None, stream: int) -> int | None:
    """The checksum that is left to the native call: short streams are compared here."""
    if checksum is None or data is None:
        return None
    size = memoryview(data).nbytes  # type: ignore[arg-type]
    if size >= LONG_HASH:
        return checksum
    if not hash_matches(data, 0, size, checksum):
        raise _error(("checksum", stream, 0, False), 0)
    return None


def _error(wrong: tuple[str, int, int, bool], first: int) -> StreamError:
    reason, stream, cell, refinement = wrong
    what = "refinement" if refinement else "stream"
    error = StreamError(f"coded plane: {_REASONS[reason]}", where=f"{what} {first + stream}, cell {cell}")
    error.stream = first + stream
    return error
