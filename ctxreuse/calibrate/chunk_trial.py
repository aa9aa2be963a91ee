"""One evaluation case through the engine's calls: insert chunks, recompute rows, score against a full prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView, parse, reseal
from ctxreuse.block.levels import EXACT
from ctxreuse.calibrate.cases import KINDS, EvalCase, Kind, SourcePosition
from ctxreuse.engines.calibration import Fidelity
from ctxreuse.engines.chunks import Relocation
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.engines.torch_hf.context import TorchContext
from ctxreuse.engines.torch_hf.fidelity import Scores, score
from ctxreuse.identity.keys import KEY_BYTES, ROOT, Tokens
from ctxreuse.reuse.chunking import Chunk
from ctxreuse.reuse.recompute import PROBE_QUERIES, RecomputePolicy, Role, probe_layers

__all__ = ["PolicyOutcome", "Trial"]

#: The level of relocated rows while their accuracy is unknown.
_LEVEL = "approx~kl-9"


class PolicyOutcome(NamedTuple):
    """Accuracy and cost of a recompute policy.

    ``recomputed``: layers times tokens that were computed for reused tokens, the search for rows included, as a share
    of computing them all. ``seconds``: from the lead in memory to the first logits.
    """

    fidelity: Fidelity
    recomputed: float
    seconds: float


class _Source(NamedTuple):
    """Blocks of an earlier prompt that hold a chunk, and its first row in the first of them."""

    views: list[BlockView]
    row: int


class Trial:
    """A case with its exact scores and the blocks of its sources, in memory; for one thread."""

    def __init__(self, engine: TorchEngine, case: EvalCase, clock: Callable[[], float] = time.perf_counter) -> None:
        self.engine, self.case, self._clock = engine, case, clock
        self._last, self._scored = case.following[:1], case.following[1:]
        self._room = len(case.tokens) + len(case.following)
        self._sources: dict[tuple[Kind, int], _Source] = {}
        for kind in KINDS:
            for sources in case.sources[kind]:
                self._sources |= {(kind, number): source for number, source in self._computed(sources).items()}
        context = self._lead()
        began = clock()
        engine.prefill(context, np.concatenate([*case.chunks, self._last]))
        #: Seconds from the lead in memory to the first logits, with nothing reused.
        self.seconds = clock() - began
        self._exact = score(engine, context, self._scored)

    def _computed(self, sources: SourcePosition) -> dict[int, _Source]:
        """Compute an earlier prompt and keep the blocks that hold chunks, as a store would."""
        engine, size = self.engine, self.engine.space.block_tokens
        context = engine.new_context(len(sources.prompt))
        engine.prefill(context, sources.prompt)
        keys = [bytes([number % 256]) * KEY_BYTES for number in range(len(sources.prompt) // size)]
        blocks = [parse(block) for block in engine.export(context, keys, ROOT, 0)]
        found = {}
        for number, row in sources.at.items():
            first, last = row // size, (row + len(self.case.chunks[number]) - 1) // size
            found[number] = _Source(blocks[first : last + 1], row - first * size)
        return found

    def _lead(self) -> TorchContext:
        context = self.engine.new_context(self._room)
        self.engine.prefill(context, self.case.lead)
        return context

    @property
    def tokens(self) -> int:
        """Tokens that are reused."""
        return sum(map(len, self.case.chunks))

    @property
    def runs(self) -> list[Chunk]:
        """Positions of the chunks in the prompt."""
        starts = [self.case.start(number) for number in range(len(self.case.chunks))]
        return [Chunk(start, start + len(chunk)) for start, chunk in zip(starts, self.case.chunks)]

    def without(self) -> Fidelity:
        """Compare the scores of the prompt without its chunks."""
        context = self._lead()
        self.engine.prefill(context, self._last)
        return self._against(context)

    def placed(self, kind: Kind, *, rotate: bool = True, wrong: bool = False) -> TorchContext:
        """Return a context of the lead and the relocated chunks; ``wrong``: with rows of other tokens.

        K of blocks without a position of their own (`Header.rope_at`) cannot be relocated: raises EngineError.
        """
        context = self._lead()
        self.engine.chunks.insert_rows(
            context, np.concatenate(self.case.chunks), self._moves(kind, wrong=wrong), _LEVEL, rotate=rotate
        )
        return context

    def _moves(self, kind: Kind, *, wrong: bool = False) -> list[Relocation]:
        size, moves = self.engine.space.block_tokens, []
        for number, chunk in enumerate(self.case.chunks):
            at, source = self.case.start(number), self._sources[kind, number]
            views = _mixed_up(source.views) if wrong else source.views
            row, left = source.row, len(chunk)
            for view in views:
                count = min(size - row, left)
                moves.append(Relocation(at, view, row, count))
                at, left, row = at + count, left - count, 0
        return moves

    def outcome(self, policy: RecomputePolicy, kind: Kind) -> PolicyOutcome:
        """Insert the chunks, recompute the rows that the policy chooses, and score."""
        engine, moves = self.engine, self._moves(kind)
        layers = len(engine.space.layers)
        context, work = self._lead(), 0

        def deviations(rows: Tokens, layer: int, role: Role) -> npt.NDArray[np.float32]:
            nonlocal work
            work += len(rows) * layer
            return engine.chunks.deviations(context, rows, layer, role)[0]

        def attention(rows: Tokens) -> npt.NDArray[np.float32]:
            nonlocal work
            layers_probed = probe_layers(engine.space)
            work += PROBE_QUERIES * layers_probed
            return engine.chunks.attention(context, rows, self._last, queries=PROBE_QUERIES, layers=layers_probed)

        began = self._clock()
        engine.chunks.insert_rows(context, np.concatenate(self.case.chunks), moves, _LEVEL, rotate=policy.rotates)
        rows = policy.rows(self.runs, self.tokens, deviations, attention)
        drift = [(run.start, run.end) for run in self.runs] if policy.corrects_drift else []
        engine.chunks.recompute_rows(context, rows, self._last, drift=drift)
        seconds = self._clock() - began
        work += len(rows) * layers
        return PolicyOutcome(self._against(context), work / (self.tokens * layers), seconds)

    def _against(self, context: TorchContext) -> Fidelity:
        scores: Scores = score(self.engine, context, self._scored)
        return scores.against(self._exact)


def _mixed_up(views: Sequence[BlockView]) -> list[BlockView]:
    """The same blocks with the rows of other ones, half a block further on, as from a store with wrong keys."""
    mixed = []
    for number, view in enumerate(views):
        other = views[(number + max(1, len(views) // 2)) % len(views)]
        planes = {}
        for plane in view.layout.planes:
            rows = np.roll(other.array(plane.layer, plane.role), plane.shape[1] // 2, axis=1)
            planes[plane.layer, plane.role] = np.ascontiguousarray(rows).view(np.uint8).ravel()
        mixed.append(parse(reseal(view, planes, level=EXACT)))
    return mixed
