"""Chunks of a prompt that were computed elsewhere: found, admitted, relocated, probed, partly recomputed.

Chunks that fail on the way are computed like other tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.block.levels import approx, is_exact, is_raw, quality_key
from ctxreuse.engines.chunks import ChunkEngine, ChunkOps, Relocation, RelocationError
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.identity.keys import Tokens
from ctxreuse.reuse import (
    PROBE_QUERIES,
    ChunkProfileStore,
    ChunkRun,
    GateDecision,
    QualityGate,
    forget,
    parse_policy,
    plan,
    probe_layers,
    read,
    used,
)
from ctxreuse.reuse.quality_gate import deviation, probe_rows
from ctxreuse.runtime.load import decodes
from ctxreuse.runtime.spans import Spans, difference, intersection, positions

if TYPE_CHECKING:
    from ctxreuse.cost import CostModel
    from ctxreuse.engines.base import Context, Engine, Logits
    from ctxreuse.reuse.recompute import RecomputePolicy, Role
    from ctxreuse.runtime.chunks.backfill import ChunkBackfill
    from ctxreuse.runtime.options import RuntimeOptions
    from ctxreuse.runtime.request import Request
    from ctxreuse.store.base import Reader, Store

__all__ = ["ChunkReuse", "ChunkReuseAttempt"]


class ChunkReuse:
    """One runtime's reuse at other positions. Any thread may call.

    Args:
        engine, salt: of the KV, of the keys.
        options: ``gate``, ``recompute`` and ``clock`` are used.
        cost: predicts whether relocating pays (None: it always does).
        backfill: indexes blocks that came to the store in other ways.
    """

    def __init__(
        self,
        engine: Engine,
        salt: bytes,
        options: RuntimeOptions,
        cost: CostModel | None = None,
        backfill: ChunkBackfill | None = None,
    ) -> None:
        self.engine, self.salt, self.cost, self.backfill = engine, salt, cost, backfill
        self.recompute, self.clock = options.recompute, options.clock
        self._given, self._lock = options.gate, threading.Lock()
        self._profiles: ChunkProfileStore | None = None
        self._found: tuple[tuple[int, int], QualityGate] | None = None

    @property
    def gate(self) -> QualityGate:
        """The gate by what is known now: calibration may end while this runs."""
        if self._given is not None:
            return self._given
        with self._lock:
            space = self.engine.space
            self._profiles = self._profiles or ChunkProfileStore()
            try:
                status = self._profiles.path(space).stat()
                version = status.st_mtime_ns, status.st_size
            except OSError:
                version = 0, 0
            if self._found is None or self._found[0] != version:
                self._found = version, QualityGate(space, self._profiles.find(space) if version[1] else None)
            return self._found[1]

    def begin(self, store: Store | None, request: Request) -> ChunkReuseAttempt | None:
        """Return an attempt for one prompt; None where nothing can be relocated: exact KV is requested, or no store."""
        if store is None or request.max_kl is None or not isinstance(self.engine, ChunkEngine):
            return None
        return ChunkReuseAttempt(self, self.engine.chunks, store, request, request.max_kl)


class _Placed(NamedTuple):
    """Positions ``start`` to ``end`` were filled from a tier of the store."""

    start: int
    end: int
    source: str


class ChunkReuseAttempt:
    """One attempt at one prompt. Used by one thread.

    `look` plans what to relocate behind a position, `finish` does it.

    Attributes:
        runs: what will be relocated, or was.
        decision: the gate's decision in words, see ``Usage.gate_decision``.
        reasons: spans that were found and are computed nevertheless, by reason.
        spans, sources: what was reused: where, and its tokens by tier.
        relocated, recomputed: see `TokenUsage`.
    """

    def __init__(self, of: ChunkReuse, ops: ChunkOps, store: Store, request: Request, max_kl: float) -> None:
        self._of, self._engine, self._ops, self._store = of, of.engine, ops, store
        self._request, self._ids, self._max_kl, self._gate = request, request.ids, max_kl, of.gate
        self._start = -1
        self._verdict: GateDecision | None = None
        self._placed: list[_Placed] = []
        self.decision, self.relocated, self.recomputed = "", 0, 0
        self.runs: list[ChunkRun] = []
        self.spans: Spans = ()
        self.reasons: dict[str, Spans] = {}
        self.sources: dict[str, int] = {}

    def look(self, start: int) -> bool:
        """Plan what to relocate behind the first ``start`` tokens; False if nothing is. Raises StoreError."""
        of = self._of
        self._start, self.decision, self.reasons = start, "", {}
        if of.backfill is not None and self._gate.profile is not None:
            of.backfill.catch_up()
        found = plan(self._store, of.salt, self._engine.space, self._ids, start, self._request.parts, self._max_kl)
        self.runs = self._admitted(found) if found else []
        return bool(self.runs)

    def _admitted(self, runs: list[ChunkRun]) -> list[ChunkRun]:
        """The runs that the gate admits and that are predicted to pay."""
        self._verdict, good = self._gate.admit(self._max_kl, runs, self._budget if self._of.recompute else None)
        self.decision = self._verdict.reason
        self._refuse("gate", [run for run in runs if run not in good])
        if good and not self._pays(good, self._verdict):
            self._refuse("slow", good)
            self.decision, good = "refused: computing them is predicted to be quicker", []
        return good

    def _budget(self, tokens: int) -> int:
        """How many of so many relocated tokens may be recomputed."""
        assert self._of.recompute is not None
        line = None if self._of.cost is None else self._of.cost.prefill
        # They lie all over what is relocated: half of it is before them, on average.
        return self._of.recompute.tokens(tokens, line, self._start + tokens // 2)

    def _pays(self, runs: Sequence[ChunkRun], verdict: GateDecision) -> bool:
        if self._of.cost is None:
            return True
        space, tokens = self._engine.space, sum(run.end - run.start for run in runs)
        missing = len(self._ids) - self._start
        again = round(tokens * parse_policy(verdict.policy).work(tokens, len(runs), len(space.layers)))
        left = missing - tokens + again
        return self._of.cost.relocation_pays(tokens * space.token_nbytes, missing, left, self._start)

    @property
    def _policy(self) -> RecomputePolicy:
        """The recompute policy of the verdict."""
        assert self._verdict is not None
        return parse_policy(self._verdict.policy)

    def _refuse(self, reason: str, runs: Sequence[ChunkRun]) -> None:
        spans = tuple((run.start, run.end) for run in runs)
        self.reasons[reason] = (*self.reasons.get(reason, ()), *spans)

    def _give_up(self, why: str) -> None:
        self._refuse("gate", self.runs)
        self.decision, self.runs = f"refused: {why}", []

    @property
    def outcome(self) -> str:
        """The decision for counting: ``allowed``, ``exceeded`` (by probes), ``refused``; "": there was none."""
        if not self.decision:
            return ""
        return "refused" if not self.runs else "exceeded" if "probe" in self.reasons else "allowed"

    def finish(self, context: Context) -> Logits | None:
        """Bring ``context``, which holds a leading part of the prompt, to its end, with what can be relocated there.

        None, and no change, if that is nothing. Raises StoreError, and what `ChunkOps.recompute_rows` raises.
        """
        if context.n != self._start:
            self.look(context.n)
        start, at = context.n, self._of.clock()
        if not self._insert(context):
            # Admitted, but nothing of it could be read.
            self.decision = self.decision if self.decision.startswith("refused") else ""
            return None
        end = context.n
        try:
            rows, good = self._rows(context, start)
        except EngineError as error:
            if not self._engine.crop(context, start):
                raise
            self._give_up(error.what)
            return None
        spans = tuple((run.start, run.end) for run in self.runs)
        if self._of.cost is not None:
            nbytes = sum(b - a for a, b in spans) * self._engine.space.token_nbytes
            self._of.cost.relocate.observe(nbytes, self._of.clock() - at)
        drift = good if self._policy.corrects_drift else ()
        logits = self._ops.recompute_rows(context, rows, self._ids[end:], drift=drift)
        used(self._store, self.runs)
        self.spans = intersection(spans, context.relocated)  # type: ignore[attr-defined]  # a `RelocatedContext`
        self.relocated = sum(b - a for a, b in self.spans)
        self.recomputed = sum(b - a for a, b in spans) - self.relocated
        for source in dict.fromkeys(one.source for one in self._placed):
            of = intersection(self.spans, [(one.start, one.end) for one in self._placed if one.source == source])
            self.sources[source] = sum(b - a for a, b in of)
        return logits

    def _insert(self, context: Context) -> bool:
        """Insert the runs into the context, without those that cannot be read."""
        while self.runs:
            with self._store.read(self._max_kl) as reader:
                rows, of = self._relocations(reader)
                if not rows:
                    break
                assert self._verdict is not None
                levels = [approx(run.level) for run in self.runs if not is_exact(run.level)]
                level = max([self._verdict.level, *levels], key=quality_key)
                ids = self._ids[context.n : self.runs[-1].end]
                try:
                    self._ops.insert_rows(context, ids, rows, level, rotate=self._policy.rotates)
                    return True
                except RelocationError as error:
                    bad, key = of[error.index], error.key
                except (EngineError, ConfigError) as error:
                    self._give_up(error.what)
                    break
                finally:
                    rows.clear()
            self._store.drop(key, "corrupt")
            self._lose(bad)
        return False

    def _relocations(self, reader: Reader) -> tuple[list[Relocation], list[ChunkRun]]:
        """The relocations of all runs that can be read, and the run that each belongs to."""
        rows: list[Relocation] = []
        of: list[ChunkRun] = []
        self._placed = []
        for run in list(self.runs):
            pieces = read(reader, run, self._ids, self._engine.space)
            if pieces is None:
                self._lose(run)
                continue
            if not all(is_raw(one.view.header.level) or decodes(self._engine, one.view.header.level) for one in pieces):
                self.runs.remove(run)  # the profile may come: it stays indexed
                continue
            at = run.start
            for view, row, count in pieces:
                before = dict(reader.served)
                # Compared already: this counts it as used, and tells the tier.
                reader.block(view.header.key, view.tokens, self._engine.space.digest)
                source = next((name for name, n in reader.served.items() if n != before.get(name, 0)), "disk")
                rows.append(Relocation(at, view, row, count))
                of.append(run)
                self._placed.append(_Placed(at, at + count, source))
                at += count
        return rows, of

    def _lose(self, run: ChunkRun) -> None:
        forget(self._store.chunks, run)
        self.runs.remove(run)

    def _rows(self, context: Context, start: int) -> tuple[Tokens, Spans]:
        """Positions to compute: gaps, runs whose probes deviate too much, and what the recompute policy chooses of the
        other runs; and the spans of these."""
        assert self._gate.profile is not None
        probes = [probe_rows(run) for run in self.runs]
        far, size = self._ops.deviations(context, np.concatenate(probes), self._gate.profile.probe_layer, "v")
        at, good = 0, []
        for run, rows in zip(self.runs, probes):
            part = slice(at, at + len(rows))
            at += len(rows)
            if not self._gate.exceeded(run.kind, deviation(far[part], size[part])):
                good.append(run)
        bad = [run for run in self.runs if run not in good]
        if bad:
            self._refuse("probe", bad)
            self.decision += f"; {len(bad)} of {len(self.runs)} runs computed, as their probes deviate too much"

        def deviations(rows: Tokens, layer: int, role: Role) -> npt.NDArray[np.float32]:
            return self._ops.deviations(context, rows, layer, role)[0]

        def attention(rows: Tokens) -> npt.NDArray[np.float32]:
            layers = probe_layers(self._engine.space)
            return self._ops.attention(context, rows, self._ids[context.n :], queries=PROBE_QUERIES, layers=layers)

        relocated = tuple((run.start, run.end) for run in good)
        most = sum(b - a for a, b in relocated)
        again = self._policy.rows(good, most, deviations, attention) if good else np.zeros(0, "<i4")
        computed = positions(difference(((start, context.n),), relocated))
        return np.union1d(computed, again).astype("<i4"), relocated
