"""Limits of the probes: at which layer, and from which deviation on, a relocated run is taken for a wrong one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from ctxreuse.calibrate.cases import KINDS, Kind
from ctxreuse.calibrate.chunk_trial import Trial
from ctxreuse.engines.torch_hf.context import TorchContext
from ctxreuse.errors import EngineError
from ctxreuse.identity.model import ModelSpace
from ctxreuse.reuse.quality_gate import deviation, probe_rows

__all__ = ["Limits", "Probing", "limit_between"]

#: Layers at which wrong runs are looked for: probing costs that share of computing the probes.
_LAYERS = (1, 2, 3, 4, 6, 8)
#: A deeper layer must part right from wrong by so much more.
_WORTH = 1.25
#: Where keys that were not rotated deviate less than so many times as much, rotation makes no difference.
_MATTERS = 2.0
#: Rows that deviate so much are no nearer to fresh ones than nothing is.
_ALIKE = 1.0
_States = Literal["right", "unrotated", "other"]


class Limits(NamedTuple):
    """The layer to probe, the limit of each kind, and what that parts, in words.

    A kind has none, and is not used, if runs with rows of other tokens look like right ones, or if right ones do not
    resemble computed rows.
    """

    layer: int
    of: Mapping[Kind, float]
    words: str


class Probing:
    """Gathers deviations of right runs, of runs whose keys were not rotated, and of runs of other tokens."""

    def __init__(self, space: ModelSpace) -> None:
        layers = [layer for layer in _LAYERS if layer < len(space.layers) and space.layers[layer].blocked]
        self._layers = layers or [i for i, layer in enumerate(space.layers) if layer.blocked][:1]
        self._found: dict[tuple[_States, int, Kind], list[float]] = {}

    def add(self, trial: Trial, kind: Kind) -> None:
        """Probe a case's runs, right and wrong; an engine that cannot compare rows leaves no limit."""
        try:
            self._probe(trial, kind, trial.placed(kind), "right")
            self._probe(trial, kind, trial.placed(kind, rotate=False), "unrotated")
            self._probe(trial, kind, trial.placed(kind, wrong=True), "other")
        except EngineError:
            self._layers = []

    def _probe(self, trial: Trial, kind: Kind, context: TorchContext, state: _States) -> None:
        rows = [probe_rows(run) for run in trial.runs]
        borders = np.cumsum([len(one) for one in rows])[:-1]
        for layer in self._layers:
            distance, length = trial.engine.chunks.deviations(context, np.concatenate(rows), layer, "v")
            parts = zip(np.split(distance, borders), np.split(length, borders))
            found = self._found.setdefault((state, layer, kind), [])
            found += [deviation(far, long) for far, long in parts]

    def limits(self) -> Limits:
        """The layer where right and wrong runs lie farthest apart, by the kind for which that is least so."""
        gaps = {layer: min(self._gap(layer, kind) for kind in KINDS) for layer in self._layers}
        if not gaps:
            return Limits(0, {}, "rows cannot be compared in this model, so no run is trusted")
        chosen = self._layers[0]
        for layer in self._layers[1:]:
            if gaps[layer] > _WORTH * gaps[chosen]:
                chosen = layer
        found = {kind: limit_between(self._right(chosen, kind), self._wrong(chosen, kind)) for kind in KINDS}
        least = {kind: min(_ALIKE, *self._found["other", chosen, kind]) for kind in KINDS}
        trusted = {kind: min(found[kind], _ALIKE) for kind in KINDS if max(self._right(chosen, kind)) < least[kind]}
        return Limits(chosen, trusted, "; ".join(self._words(chosen, kind, trusted.get(kind)) for kind in KINDS))

    def _right(self, layer: int, kind: Kind) -> list[float]:
        return self._found["right", layer, kind]

    def _wrong(self, layer: int, kind: Kind) -> list[float]:
        """Of wrong runs; those with keys not rotated are among them if that matters to the model."""
        unrotated, right = self._found["unrotated", layer, kind], self._found["right", layer, kind]
        matters = statistics.median(unrotated) > _MATTERS * statistics.median(right)
        return self._found["other", layer, kind] + (unrotated if matters else [])

    def _gap(self, layer: int, kind: Kind) -> float:
        return min(self._wrong(layer, kind)) / max(*self._right(layer, kind), 1e-9)

    def _words(self, layer: int, kind: Kind, limit: float | None) -> str:
        right, wrong = max(self._right(layer, kind)), min(self._wrong(layer, kind))
        trusted = "no run is trusted" if limit is None else f"trusted to {limit:.3g}"
        return f"{kind} at layer {layer}: right runs up to {right:.3g}, wrong ones from {wrong:.3g}, {trusted}"


def limit_between(right: Sequence[float], wrong: Sequence[float]) -> float:
    """Half way (in ratios) from the largest right to the least wrong deviation; the former if they overlap."""
    high, low = max(right), min(wrong)
    return math.sqrt(high * low) if high < low < math.inf else high
