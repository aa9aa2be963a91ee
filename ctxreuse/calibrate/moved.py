"""One scene through the engine's own calls: chunks placed, repaired and scored against computing all of the prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.block import BlockView, parse, reseal
from ctxreuse.calibrate.scenes import KINDS, Kind, Scene, Stood
from ctxreuse.engines.moving import Move
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.engines.torch_hf.live import TorchLive
from ctxreuse.engines.torch_hf.scoring import Fidelity, Scores, score
from ctxreuse.keys import KEY_BYTES, ROOT, Tokens
from ctxreuse.levels import EXACT
from ctxreuse.reuse.repair import LOOKING, Repair, Role, look_layers

__all__ = ["Outcome", "Placed", "Trial"]

#: What moved rows count as while nobody knows what they are worth.
_LEVEL = "approx~kl-9"


class Outcome(NamedTuple):
    """What a repair came to.

    ``recomputed``: layers times tokens that were computed for reused tokens, the search for rows included, as a share
    of computing them all. ``seconds``: from the lead in memory to the first logits.
    """

    fidelity: Fidelity
    recomputed: float
    seconds: float


class Placed(NamedTuple):
    """Positions of a run."""

    start: int
    end: int


class _Source(NamedTuple):
    """Blocks of an earlier prompt that hold a chunk, and its first row in the first of them."""

    views: list[BlockView]
    row: int


class Trial:
    """A scene with its exact scores and the blocks of its sources, which stay in memory; used by one thread."""

    def __init__(self, engine: TorchEngine, scene: Scene, clock: Callable[[], float] = time.perf_counter) -> None:
        self.engine, self.scene, self._clock = engine, scene, clock
        self._told, self._scored = scene.following[:1], scene.following[1:]
        self._room = len(scene.tokens) + len(scene.following)
        self._sources: dict[tuple[Kind, int], _Source] = {}
        for kind in KINDS:
            for stood in scene.stood[kind]:
                self._sources |= {(kind, number): held for number, held in self._computed(stood).items()}
        live = self._lead()
        began = clock()
        engine.prefill(live, np.concatenate([*scene.chunks, self._told]))
        #: Seconds from the lead in memory to the first logits, with nothing reused.
        self.seconds = clock() - began
        self._exact = score(engine, live, self._scored)

    def _computed(self, stood: Stood) -> dict[int, _Source]:
        """Compute an earlier prompt and keep the blocks that hold chunks, as a store would."""
        engine, size = self.engine, self.engine.space.block_tokens
        live = engine.start(len(stood.prompt))
        engine.prefill(live, stood.prompt)
        keys = [bytes([number % 256]) * KEY_BYTES for number in range(len(stood.prompt) // size)]
        blocks = [parse(block) for block in engine.export(live, keys, ROOT, 0)]
        found = {}
        for number, row in stood.at.items():
            first, last = row // size, (row + len(self.scene.chunks[number]) - 1) // size
            found[number] = _Source(blocks[first : last + 1], row - first * size)
        return found

    def _lead(self) -> TorchLive:
        live = self.engine.start(self._room)
        self.engine.prefill(live, self.scene.lead)
        return live

    @property
    def tokens(self) -> int:
        """Tokens that are reused."""
        return sum(map(len, self.scene.chunks))

    @property
    def runs(self) -> list[Placed]:
        """Where the chunks are to stand."""
        starts = [self.scene.start(number) for number in range(len(self.scene.chunks))]
        return [Placed(start, start + len(chunk)) for start, chunk in zip(starts, self.scene.chunks)]

    def without(self) -> Fidelity:
        """How far the scores move if the chunks are left out of the prompt."""
        live = self._lead()
        self.engine.prefill(live, self._told)
        return self._against(live)

    def placed(self, kind: Kind, *, turn: bool = True, wrong: bool = False) -> TorchLive:
        """A context of the lead and the chunks with what was computed before; ``wrong``: for other tokens than these.

        K of blocks without a position of their own (`Header.rope_at`) cannot be moved: place() says so.
        """
        live = self._lead()
        self.engine.place(live, np.concatenate(self.scene.chunks), self._moves(kind, wrong=wrong), _LEVEL, turn=turn)
        return live

    def _moves(self, kind: Kind, *, wrong: bool = False) -> list[Move]:
        size, moves = self.engine.space.block_tokens, []
        for number, chunk in enumerate(self.scene.chunks):
            at, source = self.scene.start(number), self._sources[kind, number]
            views = _mixed_up(source.views) if wrong else source.views
            row, left = source.row, len(chunk)
            for view in views:
                count = min(size - row, left)
                moves.append(Move(at, view, row, count))
                at, left, row = at + count, left - count, 0
        return moves

    def outcome(self, repair: Repair, kind: Kind) -> Outcome:
        """Place the chunks, recompute what the repair chooses, and score."""
        engine, moves = self.engine, self._moves(kind)
        layers = len(engine.space.layers)
        live, work = self._lead(), 0

        def deviations(rows: Tokens, layer: int, role: Role) -> npt.NDArray[np.float32]:
            nonlocal work
            work += len(rows) * layer
            return engine.deviations(live, rows, layer, role)[0]

        def attention(rows: Tokens) -> npt.NDArray[np.float32]:
            nonlocal work
            looked = look_layers(engine.space)
            work += LOOKING * looked
            return engine.attention(live, rows, self._told, looks=LOOKING, layers=looked)

        began = self._clock()
        engine.place(live, np.concatenate(self.scene.chunks), moves, _LEVEL, turn=repair.turned)
        rows = repair.rows(self.runs, self.tokens, deviations, attention)
        drift = [(run.start, run.end) for run in self.runs] if repair.drifts else []
        engine.mend(live, rows, self._told, drift=drift)
        seconds = self._clock() - began
        work += len(rows) * layers
        return Outcome(self._against(live), work / (self.tokens * layers), seconds)

    def _against(self, live: TorchLive) -> Fidelity:
        scores: Scores = score(self.engine, live, self._scored)
        return scores.against(self._exact)


def _mixed_up(views: Sequence[BlockView]) -> list[BlockView]:
    """The same blocks with the rows of other ones, half a block further on: what a store would give whose keys lie."""
    mixed = []
    for number, view in enumerate(views):
        other = views[(number + max(1, len(views) // 2)) % len(views)]
        planes = {}
        for plane in view.layout.planes:
            rows = np.roll(other.array(plane.layer, plane.role), plane.shape[1] // 2, axis=1)
            planes[plane.layer, plane.role] = np.ascontiguousarray(rows).view(np.uint8).ravel()
        mixed.append(parse(reseal(view, planes, level=EXACT)))
    return mixed
