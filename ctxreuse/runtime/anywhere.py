"""Chunks of a prompt that were computed elsewhere: found, allowed, moved, probed, repaired. What fails is computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.engines.moving import Move, MoveError, Mover
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.keys import Tokens
from ctxreuse.levels import approx, is_exact, is_raw, rank
from ctxreuse.reuse import (
    LOOKING,
    ChunkShelf,
    Gate,
    Run,
    Verdict,
    budget_tokens,
    forget,
    look_layers,
    parse,
    plan,
    read,
    used,
)
from ctxreuse.reuse.probes import deviation, probe_rows
from ctxreuse.runtime.load import decodes
from ctxreuse.runtime.spans import Spans, rows_of, within, without

if TYPE_CHECKING:
    from ctxreuse.cost import CostModel
    from ctxreuse.engines.base import Engine, Live, Logits
    from ctxreuse.reuse.repair import Repair, Role
    from ctxreuse.runtime.homing import Homing
    from ctxreuse.store.base import Reader, WholeStore

__all__ = ["Anywhere", "Moving"]


class Anywhere:
    """One runtime's reuse at other positions. Any thread may call.

    ``gate``: what has been measured of the model (None: the chunk card on this user's shelf, as soon as there is one).
    ``budget``: what repairs may compute, as `budget_tokens` reads it ("": as little as the allowed level asks for).
    Raises ConfigError for one that it does not. ``homing``: notes what came to the store by other ways.
    """

    def __init__(
        self, engine: Engine, salt: bytes, gate: Gate | None = None, budget: str = "", homing: Homing | None = None
    ) -> None:
        if budget:
            budget_tokens(budget, 1)
        self.engine, self.salt, self.budget, self.homing = engine, salt, budget, homing
        self._given, self._lock = gate, threading.Lock()
        self._shelf: ChunkShelf | None = None
        self._found: tuple[tuple[int, int], Gate] | None = None

    @property
    def gate(self) -> Gate:
        """By what is known now: calibration may end while this runs."""
        if self._given is not None:
            return self._given
        with self._lock:
            space = self.engine.space
            self._shelf = self._shelf or ChunkShelf()
            try:
                status = self._shelf.path(space).stat()
                mark = status.st_mtime_ns, status.st_size
            except OSError:
                mark = 0, 0
            if self._found is None or self._found[0] != mark:
                self._found = mark, Gate(space, self._shelf.find(space) if mark[1] else None)
            return self._found[1]

    def begin(
        self,
        store: WholeStore | None,
        ids: Tokens,
        parts: Sequence[int],
        lossy: str | None,
        cost: CostModel | None,
        clock: Callable[[], float],
    ) -> Moving | None:
        """For one prompt; None where nothing can be moved: exact KV is asked for, or there is no store."""
        if store is None or lossy is None or not isinstance(self.engine, Mover):
            return None
        return Moving(self, self.engine, store, ids, parts, lossy, cost, clock)


class _Placed(NamedTuple):
    """Positions ``start`` to ``end`` were moved there from a tier of the store."""

    start: int
    end: int
    source: str


class Moving:
    """One attempt at one prompt. Used by the thread that holds the runtime's compute lock.

    `look` says what can be moved behind a position, `finish` does it. ``said``: what there is to tell people; ``runs``:
    what will be moved, or was; ``reasons``: spans that were found and are computed all the same, by reason.
    """

    def __init__(
        self,
        anywhere: Anywhere,
        engine: Mover,
        store: WholeStore,
        ids: Tokens,
        parts: Sequence[int],
        lossy: str,
        cost: CostModel | None,
        clock: Callable[[], float],
    ) -> None:
        self._anywhere, self._engine, self._mover = anywhere, anywhere.engine, engine
        self._store, self._ids, self._parts, self._lossy = store, ids, parts, lossy
        self._cost, self._clock = cost, clock
        self._gate = anywhere.gate
        self._start = -1
        self._verdict: Verdict | None = None
        self._placed: list[_Placed] = []
        self.said, self.moved, self.mended = "", 0, 0
        self.runs: list[Run] = []
        self.spans: Spans = ()
        self.reasons: dict[str, Spans] = {}
        self.sources: dict[str, int] = {}

    def look(self, start: int) -> bool:
        """Plan what to move behind the ``start`` tokens that are there; False if nothing is. Raises StoreError."""
        space = self._engine.space
        self._start, self.said, self.reasons = start, "", {}
        if self._anywhere.homing is not None and self._gate.card is not None:
            self._anywhere.homing.catch_up()
        found = plan(self._store, self._anywhere.salt, space, self._ids, start, self._parts, self._lossy)
        self.runs = self._allowed(found) if found else []
        return bool(self.runs)

    def _allowed(self, runs: list[Run]) -> list[Run]:
        """Those of the runs that the gate lets through and that are predicted to pay."""
        self._verdict, good = self._gate.admit(self._lossy, runs, self._budget if self._anywhere.budget else None)
        self.said = self._verdict.reason
        self._refuse("gate", [run for run in runs if run not in good])
        if good and not self._pays(good, self._verdict):
            self._refuse("slow", good)
            self.said, good = "refused: computing them is predicted to be quicker", []
        return good

    def _budget(self, tokens: int) -> int:
        """How many of so many moved tokens may be computed."""
        line = None if self._cost is None else self._cost.prefill
        # They stand all over what is moved: half of it is before them, on average.
        return budget_tokens(self._anywhere.budget, tokens, line, self._start + tokens // 2)

    def _pays(self, runs: Sequence[Run], verdict: Verdict) -> bool:
        if self._cost is None:
            return True
        space, tokens = self._engine.space, sum(run.end - run.start for run in runs)
        lacking = len(self._ids) - self._start
        mended = round(tokens * parse(verdict.repair).work(tokens, len(runs), len(space.layers)))
        return self._cost.moves(tokens * space.token_nbytes, lacking, lacking - tokens + mended, self._start)

    @property
    def _repair(self) -> Repair:
        """Of the verdict that let the runs through."""
        assert self._verdict is not None
        return parse(self._verdict.repair)

    def _refuse(self, reason: str, runs: Sequence[Run]) -> None:
        spans = tuple((run.start, run.end) for run in runs)
        self.reasons[reason] = (*self.reasons.get(reason, ()), *spans)

    @property
    def word(self) -> str:
        """What the gate decided, for counting: ``allowed``, ``exceeded`` (by probes), ``refused``; "": nothing."""
        if not self.said:
            return ""
        return "refused" if not self.runs else "exceeded" if "probe" in self.reasons else "allowed"

    def finish(self, live: Live) -> Logits | None:
        """Bring ``live``, which holds a leading part of the prompt, to its end, with what can be moved there.

        None, and no change, if that is nothing. Raises StoreError, and what `Mover.mend` raises.
        """
        if live.n != self._start:
            self.look(live.n)
        start, at = live.n, self._clock()
        if not self._place(live):
            # Allowed, but nothing of it is there any more.
            self.said = self.said if self.said.startswith("refused") else ""
            return None
        end = live.n
        try:
            rows, good = self._rows(live, start)
        except EngineError as error:
            if not self._engine.crop(live, start):
                raise
            self._refuse("gate", self.runs)
            self.said, self.runs = f"refused: {error.what}", []
            return None
        spans = tuple((run.start, run.end) for run in self.runs)
        if self._cost is not None:
            nbytes = sum(b - a for a, b in spans) * self._engine.space.token_nbytes
            self._cost.move.observe(nbytes, self._clock() - at)
        logits = self._mover.mend(live, rows, self._ids[end:], drift=good if self._repair.drifts else ())
        used(self._store, self.runs)
        self.spans = within(spans, live.moved)  # type: ignore[attr-defined]  # a mover's context: `MovedLive`
        self.moved = sum(b - a for a, b in self.spans)
        self.mended = sum(b - a for a, b in spans) - self.moved
        for source in dict.fromkeys(one.source for one in self._placed):
            of = within(self.spans, [(one.start, one.end) for one in self._placed if one.source == source])
            self.sources[source] = sum(b - a for a, b in of)
        return logits

    def _place(self, live: Live) -> bool:
        """Move the runs into the context, without those that cannot be read (any more)."""
        while self.runs:
            with self._store.read(self._lossy) as reader:
                moves, of = self._moves(reader)
                if not moves:
                    break
                assert self._verdict is not None
                levels = [approx(run.level) for run in self.runs if not is_exact(run.level)]
                level = max([self._verdict.level, *levels], key=rank)
                try:
                    self._mover.place(
                        live, self._ids[live.n : self.runs[-1].end], moves, level, turn=self._repair.turned
                    )
                    return True
                except MoveError as error:
                    bad, key = of[error.index], error.key
                except (EngineError, ConfigError) as error:
                    self._refuse("gate", self.runs)
                    self.said, self.runs = f"refused: {error.what}", []
                    break
                finally:
                    moves.clear()
            self._store.drop(key, "corrupt")
            self._lose(bad)
        return False

    def _moves(self, reader: Reader) -> tuple[list[Move], list[Run]]:
        """The moves of all runs that can be read, and the run that each belongs to."""
        moves: list[Move] = []
        of: list[Run] = []
        self._placed = []
        for run in list(self.runs):
            pieces = read(reader, run, self._ids, self._engine.space)
            if pieces is None:
                self._lose(run)
                continue
            if not all(is_raw(one.view.header.level) or decodes(self._engine, one.view.header.level) for one in pieces):
                self.runs.remove(run)  # the card may come: it stays known
                continue
            at = run.start
            for view, row, count in pieces:
                before = dict(reader.served)
                # Proven already: this counts it as used, and says where it was.
                reader.block(view.header.key, view.tokens, self._engine.space.digest)
                source = next((name for name, n in reader.served.items() if n != before.get(name, 0)), "disk")
                moves.append(Move(at, view, row, count))
                of.append(run)
                self._placed.append(_Placed(at, at + count, source))
                at += count
        return moves, of

    def _lose(self, run: Run) -> None:
        forget(self._store.chunks, run)
        self.runs.remove(run)

    def _rows(self, live: Live, start: int) -> tuple[Tokens, Spans]:
        """Positions to compute: gaps, runs whose probes deviate too much, and what the repair chooses of the others;
        and where these others are."""
        assert self._gate.card is not None
        probes = [probe_rows(run) for run in self.runs]
        far, size = self._mover.deviations(live, np.concatenate(probes), self._gate.card.probe_layer, "v")
        at, good = 0, []
        for run, rows in zip(self.runs, probes):
            part = slice(at, at + len(rows))
            at += len(rows)
            if not self._gate.exceeded(run.kind, deviation(far[part], size[part])):
                good.append(run)
        bad = [run for run in self.runs if run not in good]
        if bad:
            self._refuse("probe", bad)
            self.said += f"; {len(bad)} of {len(self.runs)} runs computed, as their probes deviate too much"

        def deviations(rows: Tokens, layer: int, role: Role) -> npt.NDArray[np.float32]:
            return self._mover.deviations(live, rows, layer, role)[0]

        def attention(rows: Tokens) -> npt.NDArray[np.float32]:
            layers = look_layers(self._engine.space)
            return self._mover.attention(live, rows, self._ids[live.n :], looks=LOOKING, layers=layers)

        moved = tuple((run.start, run.end) for run in good)
        most = sum(b - a for a, b in moved)
        repaired = self._repair.rows(good, most, deviations, attention) if good else np.zeros(0, "<i4")
        computed = rows_of(without(((start, live.n),), moved))
        return np.union1d(computed, repaired).astype("<i4"), moved
