"""A context whose tokens lie in two kinds of places: attached runs, and rows of its own memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxreuse.kernels.attention import Attended, Part, Plane, attend, dequantise
from ctxreuse.reuse.inplace.pages import Selection, ceilings, chosen
from ctxreuse.reuse.inplace.pinned import AttachedRun, CodedSlab, Slab, rotated_queries
from ctxreuse.rope import Rotary

__all__ = ["InPlaceRuns", "ScoreOptions", "SeenRows"]

Floats = NDArray[np.float32]
Positions = NDArray[np.int64]


class _Span(NamedTuple):
    """Rows of one slab of a run, at positions ``start`` to ``end``."""

    start: int
    end: int
    slab: int
    first: int
    shift: int
    attached: AttachedRun

    def of(self, layer: int) -> Slab | CodedSlab:
        return self.attached.run.layers[layer][self.slab]


class SeenRows(NamedTuple):
    """Rows ``first``..``last`` of a slab that some query sees; ``at`` and ``hidden`` as of `Part`.

    ``shift``: how far the run is attached behind its own place.
    """

    slab: Slab | CodedSlab
    first: int
    last: int
    at: int | None
    shift: int
    hidden: NDArray[np.int64] | None


def _end(part: Part) -> int:
    return part.k.tokens if part.last is None else part.last


def _of_head(part: Part, head: int, group: int) -> Part:
    """The part as one KV head and its queries see it; views."""
    q = None if part.q is None else part.q[head * group : (head + 1) * group]
    return part._replace(k=_plane_of_head(part.k, head), v=_plane_of_head(part.v, head), q=q)


def _plane_of_head(plane: Plane, head: int) -> Plane:
    scales = None if plane.scales is None else plane.scales[head : head + 1]
    return Plane(plane.format, plane.data[head : head + 1], scales)


class ScoreOptions(NamedTuple):
    """How scores are formed; see `ctxreuse.kernels.attention.attend`."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None


class InPlaceRuns:
    """Where each position of a context lies. Not thread-safe: call from the context's owner.

    Own memory is filled in the order in which rows are computed; a computed row hides the same row of a run. At first
    ``n`` positions lie in rows 0 to n - 1.
    """

    def __init__(self, n: int) -> None:
        self._spans: list[_Span] = []
        self._hidden: dict[int, NDArray[np.int64] | None] = {}
        self._row_of = np.arange(n, dtype=np.int64)
        self._at = np.arange(n, dtype=np.int64)
        #: Which pages of the runs are read; None: all. Own memory always is.
        self.selection: Selection | None = None
        #: Rows of own memory in use.
        self.rows = n

    @property
    def plain(self) -> bool:
        """True if no run is attached, and every position lies in the row of its number."""
        return not self._spans and bool((self._at[: self.rows] == np.arange(self.rows)).all())

    @property
    def nbytes(self) -> int:
        """Bytes of the attached runs; other contexts may share them."""
        return sum(run.nbytes for run in {id(span.attached.run): span.attached.run for span in self._spans}.values())

    @property
    def runs(self) -> list[AttachedRun]:
        """The attached runs, by position, as far as the context reaches."""
        found: list[AttachedRun] = []
        for span in self._spans:
            if found and found[-1].run is span.attached.run:
                found[-1] = replace(found[-1], count=span.end - found[-1].start)
            else:
                found.append(replace(span.attached, count=span.end - span.start))
        return found

    def attach(self, one: AttachedRun) -> None:
        """Attach a run at positions behind all others and behind what is computed."""
        done = 0
        slabs = next(iter(one.run.layers.values()))
        shift = one.start - (one.run.at + one.row)
        skip = one.row
        for number, slab in enumerate(slabs):
            take = min(slab.rows - skip, one.count - done)
            if take > 0:
                start = one.start + done
                self._spans.append(_Span(start, start + take, number, slab.first + skip, shift, one))
                done += take
            skip = max(skip - slab.rows, 0)

    def allocate(self, positions: Positions) -> Positions:
        """The rows of own memory for tokens at ascending ``positions``; new ones where they have none yet."""
        end = int(positions[-1]) + 1
        if end > len(self._row_of):
            more = max(end, 2 * len(self._row_of)) - len(self._row_of)
            self._row_of = np.concatenate([self._row_of, np.full(more, -1, np.int64)])
        new = positions[self._row_of[positions] < 0]
        if len(new):
            self._row_of[new] = np.arange(self.rows, self.rows + len(new))
            if self.rows + len(new) > len(self._at):
                grown = np.zeros(max(self.rows + len(new), 2 * len(self._at)), np.int64)
                grown[: self.rows] = self._at[: self.rows]
                self._at = grown
            self._at[self.rows : self.rows + len(new)] = new
            self.rows += len(new)
            self._hidden.clear()
        return self._row_of[positions]

    def own(self, positions: Positions) -> Positions:
        """The rows of own memory that hold some of these positions, in their order."""
        rows = self.rows_at(positions)
        return rows[rows >= 0]

    def rows_at(self, positions: Positions) -> Positions:
        """The rows of own memory that hold these positions, which may lie beyond all that was computed; -1: none."""
        known = np.full(len(positions), -1, np.int64)
        inside = positions < len(self._row_of)
        known[inside] = self._row_of[positions[inside]]
        return known

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Rows that are allocated inside are freed afterwards, and what they hid is seen again."""
        rows, row_of = self.rows, self._row_of.copy()
        try:
            yield
        finally:
            self.rows, self._row_of = rows, row_of
            self._hidden.clear()

    def read(self, layer: int, role: str, positions: Positions, own: Plane, rotary: Rotary) -> Floats:
        """K or V float32 [heads, n, dim] as attention takes it for these positions; zeros where nothing is."""
        found = np.zeros((own.data.shape[0], len(positions), own.dim), np.float32)
        for span in self._spans:
            inside = np.flatnonzero((positions >= span.start) & (positions < span.end))
            if len(inside):
                plane = span.of(layer).k if role == "k" else span.of(layer).v
                at = positions[inside] - span.start + span.first
                rows = dequantise(plane.rows(int(at.min()), int(at.max()) + 1).on_host())[:, at - at.min()]
                found[:, inside] = (
                    rotated_queries(np.ascontiguousarray(rows), rotary, -span.shift) if role == "k" else rows
                )
        known = self.rows_at(positions)
        computed = np.flatnonzero(known >= 0)
        if len(computed):
            plane = Plane(own.format, np.ascontiguousarray(own.data[:, known[computed]]))
            found[:, computed] = dequantise(plane)
        return found

    def row_of(self, start: int, end: int) -> int:
        """The first of the rows of own memory that hold ``start`` to ``end`` one behind another; -1 if none do."""
        rows = self._row_of[start:end]
        together = len(rows) == end - start and bool((rows >= 0).all() and (np.diff(rows) == 1).all())
        return int(rows[0]) if together else -1

    def covers(self, start: int, end: int) -> bool:
        """True if a run holds some of these positions."""
        return any(span.start < end and start < span.end for span in self._spans)

    def crop(self, n: int) -> Positions | None:
        """Forget positions from ``n`` on. Returns the rows to keep, in their order, if they are not the first ones."""
        kept = np.flatnonzero(self._at[: self.rows] < n)
        self._at = self._at[: self.rows][kept]
        self._row_of = np.full(n, -1, np.int64)
        self._row_of[self._at] = np.arange(len(kept))
        self._spans = [span._replace(end=min(span.end, n)) for span in self._spans if span.start < n]
        self._hidden.clear()
        self.rows = len(kept)
        return kept if len(kept) and kept[-1] != len(kept) - 1 else None

    def attend(
        self,
        layer: int,
        q: Floats,
        positions: Positions,
        k: Plane,
        v: Plane,
        rotary: Rotary,
        scores: ScoreOptions,
    ) -> Attended:
        """Attention of ``q`` float32 [Hq, S, D] at ascending ``positions`` [S] over all that stands before each.

        ``k``, ``v``: own memory, [heads, capacity, dim], its rows placed. See `ctxreuse.kernels.attention.attend`.
        """
        rotated: dict[int, Floats] = {}
        runs = list[tuple[_Span, Part]]()
        for span, rows in self._seen(layer, positions, scores.window):
            if span.shift not in rotated:
                rotated[span.shift] = rotated_queries(q, rotary, span.shift)
            slab = rows.slab
            runs.append((span, Part(slab.k, slab.v, *rows[1:4], rotated[span.shift], rows.hidden)))
        own = self._own(k, v)
        if self.selection is None or not runs or not self.selection.applies(layer, q.shape[1]):
            parts = [*own, *(part for _, part in runs)]
            return attend(q, parts, positions=positions, **scores._asdict())
        each = [
            attend(mine, parts, positions=positions, **scores._asdict())
            for mine, parts in self._by_head(layer, q, own, runs, self.selection)
        ]
        return Attended(np.concatenate([one.o for one in each]), np.concatenate([one.lse for one in each]))

    def seen_rows(self, layer: int, positions: Positions, window: int | None) -> list[SeenRows]:
        """The rows of the runs that queries at ascending ``positions`` see in a layer."""
        return [rows for _, rows in self._seen(layer, positions, window)]

    def _seen(self, layer: int, positions: Positions, window: int | None) -> Iterator[tuple[_Span, SeenRows]]:
        first, last = int(positions[0]), int(positions[-1])
        for number, span in enumerate(self._spans):
            if span.start > last or (window is not None and span.end <= first - window + 1):
                continue
            # Rows that all queries see need no positions.
            at = None if span.end <= first + 1 and window is None else span.start - span.first
            stop = span.first + span.end - span.start
            yield span, SeenRows(span.of(layer), span.first, stop, at, span.shift, self._hides(number, span))

    def own_seen(self, positions: Positions, window: int | None) -> NDArray[np.bool_] | None:
        """Which rows of own memory each query at ``positions`` sees, bool [queries, rows]; None: all see all."""
        at = self._at[: self.rows]
        seen = at <= positions[:, None]
        if window is not None:
            seen &= at > positions[:, None] - window
        return None if seen.all() else seen

    def _by_head(
        self, layer: int, q: Floats, own: list[Part], runs: list[tuple[_Span, Part]], selection: Selection
    ) -> Iterator[tuple[Floats, list[Part]]]:
        """For each KV head its queries and what it reads: own memory, and the pages that it selects."""
        page = selection.page
        spans = [(part.first // page, -(-_end(part) // page)) for _, part in runs]
        tops = [
            ceilings(q if part.q is None else part.q, span.attached.run.bounds(layer, span.slab, page))[:, a:b]
            for (span, part), (a, b) in zip(runs, spans)
        ]
        picked = chosen(np.concatenate(tops, axis=1), selection)
        heads = len(picked)
        group = len(q) // heads
        for head in range(heads):
            parts, at = [_of_head(part, head, group) for part in own], 0
            for (_, part), (a, b) in zip(runs, spans):
                mine = _of_head(part, head, group)
                pages = np.flatnonzero(picked[head, at : at + b - a]) + a
                at += b - a
                for some in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1):
                    if len(some):
                        low, high = int(some[0]) * page, (int(some[-1]) + 1) * page
                        parts.append(mine._replace(first=max(mine.first, low), last=min(_end(mine), high)))
            yield q[head * group : (head + 1) * group], parts

    def _own(self, k: Plane, v: Plane) -> list[Part]:
        at = self._at[: self.rows]
        cuts = np.flatnonzero(np.diff(at) <= 0) + 1
        bounds = [0, *cuts.tolist(), self.rows]
        parts = []
        for first, last in pairwise(bounds):
            if first == last:
                continue
            base = int(at[first]) - first
            dense = int(at[last - 1]) - (last - 1) == base
            parts.append(Part(k, v, first, last, base if dense else at))
        return parts

    def _hides(self, number: int, span: _Span) -> NDArray[np.int64] | None:
        """Rows of the span's slab that were recomputed, and so lie in own memory."""
        if number not in self._hidden:
            rows = np.flatnonzero(self._row_of[span.start : span.end] >= 0) + span.first
            self._hidden[number] = rows if len(rows) else None
        return self._hidden[number]

    def check(self, n: int) -> None:
        """Raises AssertionError if rows and positions of a context of ``n`` tokens do not agree."""
        at = self._at[: self.rows]
        assert np.array_equal(self._row_of[at], np.arange(self.rows)), "a row is not where its position says"
        assert int((self._row_of[:n] >= 0).sum()) == self.rows, "rows beyond the end"
        assert all(a.end <= b.start for a, b in pairwise(self._spans)), "runs overlap"
        assert not self._spans or self._spans[-1].end <= n, "a run is beyond the end"
