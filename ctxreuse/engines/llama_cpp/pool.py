"""Where contexts are: in the cells of one llama.cpp context, which computes them together, or in memory of their own.

A context enters the cells when it computes. The cells grow with the contexts that are there, up to a bound; then who
has computed longest ago leaves, with its rows copied out, and comes back by itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np

from ctxreuse.engines.base import Logits
from ctxreuse.engines.llama_cpp.cell_rows import CellRows, Rows
from ctxreuse.engines.llama_cpp.cells import LlamaCells, SlotRun, rounded
from ctxreuse.engines.llama_cpp.context import LlamaContext
from ctxreuse.engines.llama_cpp.library import LlamaModel
from ctxreuse.engines.llama_cpp.state import MOST_STREAMS, LlamaState, StateLayout
from ctxreuse.errors import EngineError
from ctxreuse.identity.keys import Tokens

__all__ = ["LlamaPool"]

#: The first cells: contexts, and tokens of each.
_STREAMS, _CELLS = 4, 1024
#: Who missed so many passes may be moved, so that the others are neighbours.
_IDLE = 16
#: Seconds that rows which were copied out are kept for the next call: an export comes in several.
_COPIED = 1.0


class _Copied(NamedTuple):
    """Rows that were copied out of the cells, while their context had ``n`` tokens."""

    context: weakref.ref[LlamaContext]
    n: int
    rows: LlamaState


class LlamaPool:
    """The cells of one model and the contexts in them. Any thread may call."""

    def __init__(
        self, model: LlamaModel, layout: StateLayout, rows: CellRows | None, tokens: int, batch: int, threads: int
    ) -> None:
        """``rows`` reads single rows of the cells (None: the library writes them all); ``tokens``: most that the cells
        hold together; ``batch``: most that are computed at once."""
        self._model, self._layout, self._tokens = model, layout, tokens
        self._batch, self._threads, self._cell_rows = batch, threads, rows
        self._most = rounded(min(model.number("n_ctx_train"), tokens))
        self._lock = threading.Condition(threading.RLock())
        #: Callers of `read` that wait. They go before the next pass: passes that follow each other would take the lock
        #: again and again, and answers that end wait for their export.
        self._readers, self._counting = 0, threading.Lock()
        self._cells: LlamaCells | None = None
        self._slots: list[weakref.ref[LlamaContext] | None] = []
        self._used: list[int] = []  # the pass that each slot was in last
        self._passes, self._preparing = 0, False
        self._copied: _Copied | None = None

    def check_room(self, tokens: int) -> None:
        """Raise EngineError if the cells cannot hold a context of so many tokens."""
        if tokens > self._most:
            raise EngineError(
                f"no room for a context of {tokens} tokens in the engine's cells, which are {self._most}",
                fix="Set engine.kv_bytes higher, or shorten the prompt",
            )

    def expect(self, context: LlamaContext, tokens: int) -> None:
        """Let the first cells be made while the rows of a context of so many ``tokens`` are loaded.

        Both touch new memory, which takes longer than to fill it. Waits for no pass, unless the cells are being made.
        """
        if self._cells is not None:
            return
        with self._lock:
            if self._cells is None and not self._preparing:
                self._preparing = True
                size = self._size((), tokens + 1, context.room)
                threading.Thread(target=self._prepare, args=size, name="ctxreuse-cells").start()

    def _prepare(self, each: int, streams: int) -> None:
        """Make the first cells, which no other thread does meanwhile."""
        made = None
        try:
            with suppress(EngineError):  # the next pass tries again, and says so
                made = self._made(each, streams)
        finally:
            with self._lock:
                self._preparing = False
                if made is not None:
                    self._take(made)
                self._lock.notify_all()

    def compute(self, runs: Sequence[tuple[LlamaContext, Tokens, int]], left: Sequence[int] = ()) -> list[Logits]:
        """Append tokens to different contexts in one pass; the logits after so many of the last of each: [vocab], or
        [rows, vocab] of more than one.

        As many of the first contexts as fit into one pass, one at least, and none of the others. A context takes at
        most ``batch`` tokens, and has room for them and the ``left`` ones, which later passes compute. Raises
        EngineError if the library fails: no context has changed.
        """
        with self._lock:
            self._lock.wait_for(lambda: not self._readers and not self._preparing)
            ends = [one.n + len(ids) + (left[i] if left else 0) for i, (one, ids, _) in enumerate(runs)]
            room = max(one.room for one, *_ in runs)
            cells = self._reserve([one for one, *_ in runs], max(ends), room)
            count, tokens = 0, 0
            while count < min(len(runs), cells.streams) and tokens + len(runs[count][1]) <= cells.batch:
                tokens += len(runs[count][1])
                count += 1
            now = runs[:count]
            for one, *_ in now:
                self._changed(one)
            self._seat(cells, [one for one, *_ in now])
            order = sorted(range(count), key=lambda i: now[i][0].slot)
            try:
                placed = [(now[i][0].slot, now[i][0].n, *now[i][1:]) for i in order]
                found = cells.decode([SlotRun(*one) for one in placed])
            except BaseException:
                for one, *_ in now:
                    cells.crop(one.slot, one.n)
                    if self._layout.window:
                        one.broken = "a pass failed, and its sliding windows are lost"
                raise
            for one, ids, _ in now:
                one.set_tokens(np.concatenate([one.tokens, ids]))
            logits = dict(zip(order, found))
            return [logits[i] for i in range(count)]

    def read(self, context: LlamaContext) -> LlamaState:
        """The rows of a context with tokens; not to be changed. Waits for one pass at most, and not twice in a row."""
        copied = self._copied
        if copied is not None and copied.context() is context and copied.n == context.n:
            return copied.rows
        with self._before_next_pass():
            rows = self._rows(context)
            if context.rows is not None:
                return rows
            self._copied = copied = _Copied(weakref.ref(context), context.n, rows)
        drop = threading.Timer(_COPIED, self._drop, (copied,))
        drop.daemon = True
        drop.start()
        return rows

    def read_rows(self, context: LlamaContext, start: int, end: int) -> Rows:
        """K and V of layers without windows between two positions; not to be changed. Waits as `read` does.

        A context's last rows take as long whatever is before them, if the library's memory can be read.
        """
        if self._cell_rows is not None:
            with self._before_next_pass():
                if context.rows is None and self._cells is not None:
                    found = self._cell_rows.read(self._cells, context.slot, start, end)
                    if found:
                        return found
        state = self.read(context)
        layers = range(len(self._layout.caches[0].k))
        return {(layer, role): state.rows(layer, role)[start:end] for layer in layers for role in ("k", "v")}

    @contextmanager
    def _before_next_pass(self) -> Iterator[None]:
        """Hold the lock, which is had when the pass that runs has ended."""
        with self._counting:
            self._readers += 1
        with self._lock:
            with self._counting:
                self._readers -= 1
            self._lock.notify_all()
            yield

    def _rows(self, context: LlamaContext) -> LlamaState:
        if context.rows is not None:
            return context.rows
        assert self._cells is not None
        slot, streams = context.slot, self._cells.streams
        data = self._cells.state(slot, into=self._layout.room(context.n, slot, streams))
        return LlamaState(self._layout, context.n, data, slot=slot, streams=streams)

    def _drop(self, copied: _Copied) -> None:
        with self._lock:
            if self._copied is copied:
                self._copied = None

    def _changed(self, context: LlamaContext) -> None:
        """The rows of a context are to be others; the lock is held."""
        if self._copied is not None and self._copied.context() is context:
            self._copied = None

    def put(self, context: LlamaContext, rows: LlamaState | None) -> None:
        """From now on the context consists of these rows (None: it is empty), and is not in the cells."""
        with self._lock:
            self._changed(context)
            if context.slot >= 0:
                self._slots[context.slot] = None
            context.slot, context.rows = -1, rows

    def read_windows(self, context: LlamaContext) -> LlamaState:
        """The sliding windows of a context, which go on as if they had been loaded: with the same bits."""
        with self._lock:
            if context.rows is not None:
                return context.rows.windows()
            assert self._cells is not None
            slot, streams = context.slot, self._cells.streams
            data = self._cells.state(slot, windows=True)
            found = LlamaState(self._layout.windows, context.n, data, slot=slot, streams=streams).windows()
            self._cells.restore(slot, found.copy(context.n, slot=slot, streams=streams).data, windows=True)
            return found

    def crop(self, context: LlamaContext, n: int, windows: LlamaState | None = None) -> bool:
        """Forget the tokens after position ``n``; ``windows``: those there. False if the library cannot."""
        with self._lock:
            self._changed(context)
            if context.rows is not None:
                context.rows = context.rows.copy(n) if n else None
                if windows is not None and context.rows is not None:
                    context.rows.fill_windows(windows)
            elif context.slot >= 0 and self._cells is not None:
                if not self._cells.crop(context.slot, n):
                    return False
                if windows is not None:
                    data = windows.copy(n, slot=context.slot, streams=self._cells.streams).data
                    self._cells.restore(context.slot, data, windows=True)
            context.set_tokens(context.tokens[:n].copy())
            return True

    def nbytes(self, context: LlamaContext) -> int:
        """Bytes that a context takes; another thread may be computing."""
        cells, rows = self._cells, context.rows
        if rows is not None:
            return rows.data.nbytes
        return self._layout.nbytes(cells.cells) if cells is not None and context.slot >= 0 else 0

    def _reserve(self, contexts: Sequence[LlamaContext], tokens: int, room: int) -> LlamaCells:
        """The cells, with room for ``tokens`` of each context, and for these and those that are there if possible.

        Larger ones are made for what the contexts grow to, ``room`` if that is not much more: each time that they are
        made, all rows are copied.
        """
        cells, size = self._cells, self._size(contexts, tokens, room)
        return cells if cells is not None and (cells.cells, cells.streams) == size else self._rebuild(*size)

    def _size(self, contexts: Sequence[LlamaContext], tokens: int, room: int) -> tuple[int, int]:
        """Tokens of each context and contexts that the cells are to have; see `_reserve`."""
        cells = self._cells
        each, streams = (cells.cells, cells.streams) if cells is not None else (_CELLS, _STREAMS)
        wanted = len({*contexts, *filter(None, map(self._at, range(len(self._slots))))})
        while streams < wanted:
            streams *= 2
        if tokens > each:
            # What an answer may have at most is seldom needed, and the cells of all would be as large.
            grown = max(tokens + min(max(room - tokens, _CELLS), tokens), 2 * each if cells is not None else 0)
            each = max(tokens, min(grown, self._tokens // streams))
        each = min(rounded(each), self._most)
        return each, max(min(streams, self._tokens // each, MOST_STREAMS), 1)

    def _rebuild(self, each: int, streams: int) -> LlamaCells:
        """Cells of another size; everybody leaves."""
        for slot in range(len(self._slots)):
            self._leave(slot)
        if self._cells is not None:
            self._cells.close()
            self._cells = None
        return self._take(self._made(each, streams))

    def _made(self, each: int, streams: int) -> LlamaCells:
        """New cells; where there is no memory for so many contexts, for fewer."""
        watched = self._cell_rows is not None
        while True:
            try:
                return LlamaCells(self._model, each, streams, self._batch, self._threads, watched=watched)
            except EngineError:
                if streams == 1:
                    raise
                streams //= 2

    def _take(self, cells: LlamaCells) -> LlamaCells:
        """Let these be the cells, without contexts."""
        self._cells = cells
        self._slots, self._used = [None] * cells.streams, [0] * cells.streams
        return cells

    def _seat(self, cells: LlamaCells, contexts: Sequence[LlamaContext]) -> None:
        """Let contexts enter the cells, as neighbours unless others between them compute as well."""
        self._passes += 1
        for one in contexts:
            if one.slot < 0:
                self._enter(cells, one, self._find_slot(contexts))
            self._used[one.slot] = self._passes
        while True:
            slots = {one.slot: one for one in contexts}
            gaps = (slot for slot in range(min(slots), max(slots)) if slot not in slots)
            gap = next((slot for slot in gaps if self._at(slot) is None or self._is_idle(slot)), None)
            if gap is None:
                return
            last = slots[max(slots)]
            self._leave(gap)
            self._leave(last.slot)
            self._enter(cells, last, gap)
            self._used[gap] = self._passes

    def _find_slot(self, stay: Sequence[LlamaContext]) -> int:
        """A slot for one more: a free one, else that of who computed longest ago, but of none that must stay."""
        taken = {one.slot for one in stay}
        others = [slot for slot in range(len(self._slots)) if slot not in taken]
        found = min(others, key=lambda slot: (self._at(slot) is not None, self._used[slot] if self._at(slot) else 0))
        self._leave(found)
        return found

    def _at(self, slot: int) -> LlamaContext | None:
        reference = self._slots[slot]
        return reference() if reference is not None else None

    def _is_idle(self, slot: int) -> bool:
        return self._used[slot] + _IDLE <= self._passes

    def _enter(self, cells: LlamaCells, context: LlamaContext, slot: int) -> None:
        if context.rows is None:
            cells.crop(slot, 0)
        else:
            cells.restore(slot, context.rows.as_sequence(slot, cells.streams).data)
        self._slots[slot] = weakref.ref(context)
        context.slot, context.rows = slot, None

    def _leave(self, slot: int) -> None:
        context = self._at(slot)
        if context is not None:
            self.put(context, self._rows(context) if context.n else None)
        self._slots[slot] = None
