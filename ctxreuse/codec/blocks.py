"""All planes of K and V of a block at one level of a profile: coded in one native call, decoded in one."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse import kernels
from ctxreuse.block.format import BlockView, Layout
from ctxreuse.codec.planes import PlaneCoder, raw_type
from ctxreuse.codec.profile import Place
from ctxreuse.errors import FormatError
from ctxreuse.rope import Rotary

__all__ = ["BlockCoder", "source_of"]


class BlockCoder(NamedTuple):
    """Planes of so many ``tokens`` of a layout of raw planes, as native calls take them.

    ``coders``: of each stream; ``numbers``: indices in the layout of all planes that they code; ``planes``: from the
    first plane on; ``ropes``: what turns them.
    """

    tokens: int
    coders: tuple[PlaneCoder, ...]
    numbers: npt.NDArray[np.intp]
    planes: kernels.KltPlanes
    ropes: tuple[Rotary, ...]

    @classmethod
    def of(cls, layout: Layout, dtype: str, wanted: Callable[[Place], PlaneCoder | None]) -> tuple[BlockCoder, ...]:
        """Take apart a layout: one coder for each number of tokens that its ``wanted`` planes have.

        Raises FormatError for a plane of another shape or type than its coder's, and if one is missing of those that
        are coded as one.
        """
        found: dict[int, dict[int, PlaneCoder]] = {}
        for plane in layout.planes:
            coder = wanted((plane.layer, plane.role)) if plane.nbytes else None
            if coder is None:
                continue
            tokens = plane.shape[-2] if len(plane.shape) > 1 else 0
            shape = coder.plane.heads, tokens, coder.plane.dim
            if plane.shape[-3:] != shape or plane.dtype != dtype or prod(plane.shape) != prod(shape):
                raise FormatError(
                    f"plane {plane.role!r} of layer {plane.layer} has shape {plane.shape[:8]} of {plane.dtype}"
                )
            found.setdefault(tokens, {})[id(coder)] = coder
        return tuple(cls._of(layout, dtype, tokens, list(planes.values())) for tokens, planes in found.items())

    @classmethod
    def _of(cls, layout: Layout, dtype: str, tokens: int, planes: list[PlaneCoder]) -> BlockCoder:
        turns: dict[int, tuple[int, Rotary]] = {}
        numbers, rows = [], []
        for coder in planes:
            for place, rope in zip(coder.places, coder.ropes):
                i = layout.index.get(place, -1)
                if i < 0 or layout.planes[i].shape[-2:-1] != (tokens,):
                    raise FormatError(
                        f"plane {place[1]!r} of layer {place[0]} has not the tokens of those coded with it"
                    )
                turn = -1 if rope is None else turns.setdefault(id(rope), (len(turns), rope))[0]
                numbers.append(i)
                rows.append((layout.offsets[i], tokens * coder.plane.dim, coder.plane.dim, 1, turn))
        return cls(
            tokens, tuple(planes), np.array(numbers, np.intp),
            kernels.KltPlanes.of([coder.native for coder in planes], np.array(rows, np.int64)),
            tuple(rope for _, rope in turns.values()),
        )  # fmt: skip

    def encode(self, view: BlockView, dtype: str, *, refinement: bool) -> dict[Place, memoryview]:
        """Encode the planes of ``view``, of this layout; ``refinement``: of the base level. Raises FormatError.

        Planes whose stream stands in another's place are empty.
        """
        start = self._start(view)
        sinks = {coder.plane.sinks for coder in self.coders}
        assert len(sinks) == 1  # all are of one level
        try:
            data, spans = self.planes.at(view.start).encode(
                view.buffer, dtype, [self.tokens], checksums=view.checksums[self.numbers],
                raw_first=max(sinks.pop() - start, 0), raw_dtype=raw_type(dtype), refinement=refinement,
                angles=[rope.span_tables(start, self.tokens, undo=True) for rope in self.ropes],
            )  # fmt: skip
        except kernels.StreamError as error:
            raise self._named(error, view) from None
        whole = memoryview(data)
        streams = {place: whole[:0] for coder in self.coders for place in coder.places[1:]}
        return streams | {coder.place: whole[at : at + size] for coder, (at, size) in zip(self.coders, spans.tolist())}

    def decode(self, view: BlockView, more: BlockView | None, target: npt.NDArray[Any], first: int, dtype: str) -> None:
        """Decode the planes of ``view``, with the refinement ``more``, to ``target``, where they begin at ``first``.

        Raises FormatError for damaged bytes.
        """
        start = self._start(view)
        numbers = self._numbers(view)
        also = (None, None, None) if more is None else _streams(more, self._numbers(more))
        try:
            self.planes.at(first).decode(
                target, dtype, [(self.tokens, *_streams(view, numbers), *also)], raw_type(dtype),
                angles=[rope.span_tables(start, self.tokens) for rope in self.ropes],
            )  # fmt: skip
        except kernels.StreamError as error:
            raise self._named(error, view, more) from None

    def _numbers(self, view: BlockView) -> list[int]:
        """Where the streams are among the planes of a coded block. FormatError for bytes where none belong."""
        for coder in self.coders:
            for place in coder.places[1:]:
                if view.layout.sizes[_number(view, place)]:
                    raise FormatError(f"plane {place[1]!r} of layer {place[0]} is not empty in a joint block")
        return [_number(view, coder.place) for coder in self.coders]

    def _start(self, view: BlockView) -> int:
        if self.tokens > view.header.end:
            raise FormatError(f"planes of {self.tokens} tokens in a {view.header.kind} that ends at {view.header.end}")
        return view.header.end - self.tokens

    def _named(self, error: kernels.StreamError, *views: BlockView | None) -> FormatError:
        """The error with its plane; where that is a checksum, as the block says it."""
        places = self.coders[error.plane].places
        for view in views:
            if view is not None:
                for place in places:
                    view.plane(*place)
        layer, role = places[0]
        return FormatError(f"plane {role!r} of layer {layer}: {error}", where=error.where)


def source_of(view: BlockView, more: BlockView | None, place: Place, tokens: int) -> kernels.Source:
    """One plane of a block, with its refinement, as `kernels.KltPlanes.decode` takes it. Raises FormatError."""
    own = _stream(view, place)
    return (tokens, *own, None, None, None) if more is None else (tokens, *own, *_stream(more, place))


def _stream(view: BlockView, place: Place) -> tuple[memoryview, npt.NDArray[np.int64], bytes]:
    i = _number(view, place)
    # By the view's own word: planes that are still arriving lie elsewhere than in a whole block.
    span = np.array([view.offset(*place), view.layout.sizes[i]], np.int64)
    return view.buffer, span, view.header.checksums[8 * i : 8 * i + 8]


def _number(view: BlockView, place: Place) -> int:
    i = view.layout.index.get(place)
    if i is None:
        view.plane(*place)  # raises, naming the plane
        raise KeyError(place)
    return i


def _streams(view: BlockView, numbers: list[int]) -> tuple[memoryview, npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    return view.buffer, view.spans[numbers], view.checksums[numbers]
