"""Planes of K and V to coded streams and back, natively: transform, integers, rANS, rotation and types in one call.

`native/klt/klt.h` defines the stream and the arithmetic; every instruction set gives the same bytes.

A plane is [heads, tokens, dim] of one layer at one level of a profile. `KltPlane` holds a profile's numbers for it in
the form that the kernels read: it is made once, is immutable, and may be used by any number of threads. `KltPlanes` are
those of a call, a whole block's or one, and where their rows lie. Buffers are as in `ctxreuse.kernels`: used only until
the call returns, strides in elements, offsets in bytes.

Threads. The interpreter lock is released. Decoding of more than `PARALLEL_VALUES` values from several sources is spread
over the kernels' threads.

Errors. ValueError: arguments; StreamError (a FormatError): corrupt streams. Any bytes may be given: nothing outside of
the streams is read and nothing outside of the destination's box is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ctxreuse.errors import FormatError
from ctxreuse.kernels.base import dtype_code, item_bytes
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
    "KltPlanes",
    "Source",
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


#: Tokens, then twice a buffer, where in it each plane's stream lies (int64 [planes, 2]: offset, bytes) and the streams'
#: XXH3-64 (uint64 [planes]) or None: of the streams, and of their refinements or three times None.
Source: TypeAlias = (
    "tuple[int, Memory, Memory, Memory | None, Memory | None, Memory | None, Memory | None]"  # quoted: for types only
)


class StreamError(FormatError):
    """Bytes are no stream of this plane and level; ``plane`` and ``stream``: their indices in the call."""

    plane = stream = -1


class WholeNumbers(NamedTuple):
    """A forward map in whole numbers: ``rows`` int16 [n, C], ``quantum`` float32 [n] and ``unit``, see `klt.h`."""

    rows: ArrayLike
    quantum: ArrayLike
    unit: float


class KltGroup(NamedTuple):
    """A profile's numbers for one group at one level. Components with a ``table`` are coded; rows beyond are ignored.

    ``first`` head and ``heads``, of each part of the plane; ``mean`` and ``gain`` float32 [C], C = parts * heads * dim,
    part by part and head by head; ``forward`` float32 and ``basis``
    int16 (within ±8191) [n, C], n >= components; ``table`` and ``shift`` (<= 10) uint8 [components]; ``refine`` uint8
    [components of the base], for a level with a base. Trailing components whose basis is a multiple of 64 throughout
    and whose shift is 0 decode up to twice as fast (bytes instead of words). ``whole``: encode by it,
    not by ``forward``. ``log_rms``: of tokens that are not scaled; ``large``: smaller ones are not either.
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
    large: bool = False


def klt_name() -> str:
    """The implementation in use: that of `kernels.active()`, but `avx2` for AVX-512 without VNNI."""
    return native.klt_name()


class KltPlane:
    """One plane of a layer at one level, or planes of several layers that are coded as one, prepared.

    ``tables``: the profile's. ``parts``: how many planes are coded as one; ``heads`` are those of each. ``groups``
    cover the heads in order. ``level``: its index in the profile, as in streams.
    ``base``: the plane at the level that this one refines; ``nested``: another level, of a third of this step, refines
    this one. ``rope``: how K is rotated ("half": pairs (i, i + r/2); "pairs": (2i, 2i + 1)); "none" for V. ValueError
    for arrays that do not fit, tables without a frequency for the escape 31, and numbers out of range.
    """

    __slots__ = ("base", "dim", "groups", "heads", "parts", "prepared", "rope")

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
        parts: int = 1,
    ) -> None:
        if rope not in _ROPES:
            raise ValueError(f"rotation {rope!r} is unknown; use one of {', '.join(_ROPES)}")
        self.heads, self.dim, self.groups, self.base, self.rope, self.parts = (
            sum(g.heads for g in groups),
            dim,
            len(groups),
            base,
            rope,
            parts,
        )
        self.prepared: object = native.klt_plane(
            tables.prepared, parts, self.heads, dim, level, step, nested, _ROPES[rope],
            None if base is None else base.prepared, [_fields(group, parts * dim) for group in groups],
        )  # fmt: skip
        """The form that the extension reads."""


class KltPlanes(NamedTuple):
    """Planes of a call and where their rows lie in its tensor.

    ``prepared``: those of the planes; ``layout`` int64 [parts of all planes, 5]: byte offset of the first row; strides
    of heads, rows and dims; which of a call's angles turn it, -1 for none. ``width``: values of a token.
    """

    prepared: tuple[object, ...]
    layout: NDArray[np.int64]
    width: int

    @classmethod
    def of(cls, planes: Sequence[KltPlane], layout: NDArray[np.int64]) -> KltPlanes:
        """Take planes of one profile and level."""
        return cls(tuple(plane.prepared for plane in planes), layout, sum(p.parts * p.heads * p.dim for p in planes))

    def at(self, offset: int) -> KltPlanes:
        """Return the same planes, ``offset`` bytes further on in a tensor."""
        return self._replace(layout=self.layout + np.array([offset, 0, 0, 0, 0], np.int64))

    def encode(
        self,
        src: Memory,
        dtype: str,
        token_counts: Sequence[int],
        *,
        checksums: Memory | None = None,
        raw_first: int = 0,
        raw_dtype: str | None = None,
        angles: Sequence[Angles] = (),
        refinement: bool = False,
        times: NDArray[np.int64] | None = None,
    ) -> tuple[bytes, NDArray[np.int64]]:
        """Encode each plane's rows, cut into blocks: bytes, and every stream's offset and size [planes * blocks, 2].

        Streams are plane by plane. ``checksums``: XXH3-64 that each part's rows must have, of one block whose planes
        have their rows side by side. The first ``raw_first`` rows stay raw, in ``raw_dtype`` (default ``dtype``).
        ``angles``: `Rotary.span_tables` of all rows that undo rotations. ``refinement``: encode what leads from the
        base level to this one instead. ``times``: nanoseconds of each of ENCODE_PARTS are added to it.
        """
        made = native.klt_encode(
            self.prepared, src, dtype_code(dtype), self.layout, checksums, np.ascontiguousarray(token_counts, np.int64),
            raw_first, dtype_code(raw_dtype or dtype), [table for pair in angles for table in pair], refinement, times,
        )  # fmt: skip
        if len(made) != 2:
            raise _error(made, 0)
        return made[0], np.frombuffer(made[1], np.int64).reshape(-1, 2)

    def decode(
        self,
        dst: Memory,
        dtype: str,
        sources: Sequence[Source],
        raw_dtype: str,
        *,
        angles: Sequence[Angles] = (),
        times: NDArray[np.int64] | None = None,
    ) -> None:
        """Decode the planes of consecutive blocks, each to rows behind those of the one before.

        Raw tokens are of ``raw_dtype``. ``angles``: `Rotary.span_tables` of all rows. StreamError: rows have been
        written then. ``times``: nanoseconds of each of DECODE_PARTS are added to it, and one thread works.
        """
        type_, raw = dtype_code(dtype), dtype_code(raw_dtype)
        parts = [(0, len(sources), 0, -1)] if times is not None else self._parts([source[0] for source in sources])

        def decode(i: int) -> None:
            lo, hi, row, end = parts[i]
            layout, tables = self.layout, [table for pair in angles for table in pair]
            if len(parts) > 1:
                layout, tables = layout.copy(), [table[row:end] for table in tables]
                layout[:, 0] += row * item_bytes(type_) * layout[:, 2]
            wrong = native.klt_decode(self.prepared, dst, type_, layout, sources[lo:hi], raw, tables, times)
            if wrong is not None:
                raise _error(wrong, lo)

        spread(decode, len(parts))

    def _parts(self, counts: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """Runs of sources, one a thread: first and behind last source, then row."""
        values = sum(counts) * self.width
        threads = min(cores(), len(counts), values // (PARALLEL_VALUES // 2)) if values > PARALLEL_VALUES else 1
        if threads <= 1:
            return [(0, len(counts), 0, -1)]
        rows = [0, *itertools.accumulate(counts)]
        cuts = np.searchsorted(rows, [rows[-1] * i // threads for i in range(1, threads)]).tolist()
        edges = sorted({0, *cuts, len(counts)})
        return [(lo, hi, rows[lo], rows[hi]) for lo, hi in itertools.pairwise(edges)]


def _fields(group: KltGroup, width: int) -> tuple[Any, ...]:
    table, channels = np.ascontiguousarray(group.table, np.uint8), group.heads * width
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
    return (group.first, group.heads, energy, group.large, float(whole.unit), *arrays)


def _error(wrong: tuple[str, int, int, int, bool], first: int) -> StreamError:
    reason, plane, stream, cell, refinement = wrong
    what = "refinement" if refinement else "stream"
    error = StreamError(f"coded plane: {_REASONS[reason]}", where=f"{what} {first + stream}, cell {cell}")
    error.plane, error.stream = plane, first + stream
    return error
