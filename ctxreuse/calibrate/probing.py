"""Limits of the probes: at which layer, and from which deviation on, a moved run is taken for a wrong one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from ctxreuse.calibrate.moved import Trial
from ctxreuse.calibrate.scenes import KINDS, Kind
from ctxreuse.engines.torch_hf.live import TorchLive
from ctxreuse.errors import EngineError
from ctxreuse.model import ModelSpace
from ctxreuse.reuse.probes import deviation, probe_rows

__all__ = ["Limits", "Probing", "limit_between"]

#: Layers at which wrong runs are looked for: probing costs that share of computing the probes.
_LAYERS = (1, 2, 3, 4, 6, 8)
#: A deeper layer must part right from wrong by so much more.
_WORTH = 1.25
#: Where keys that were not turned deviate less than so many times as much, turning makes no difference.
_MATTERS = 2.0
#: Rows that deviate so much are no nearer to fresh ones than nothing is.
_ALIKE = 1.0
_States = Literal["right", "unturned", "other"]


class Limits(NamedTuple):
    """The layer to probe, the limit of each kind, and what that parts, in words.

    A kind has none if runs that hold rows of other tokens cannot be told from right ones, or if right ones are nothing
    like what would be computed: it is not to be used.
    """

    layer: int
    of: Mapping[Kind, float]
    words: str


class Probing:
    """Gathers deviations of runs as they should be, of runs whose keys were not turned, and of runs of other tokens."""

    def __init__(self, space: ModelSpace) -> None:
        held = [layer for layer in _LAYERS if layer < len(space.layers) and space.layers[layer].blocked]
        self._layers = held or [i for i, layer in enumerate(space.layers) if layer.blocked][:1]
        self._found: dict[tuple[_States, int, Kind], list[float]] = {}

    def add(self, trial: Trial, kind: Kind) -> None:
        """Probe a scene's runs, right and wrong; an engine that cannot compare rows leaves no limit."""
        try:
            self._probe(trial, kind, trial.placed(kind), "right")
            self._probe(trial, kind, trial.placed(kind, turn=False), "unturned")
            self._probe(trial, kind, trial.placed(kind, wrong=True), "other")
        except EngineError:
            self._layers = []

    def _probe(self, trial: Trial, kind: Kind, live: TorchLive, state: _States) -> None:
        rows = [probe_rows(run) for run in trial.runs]
        borders = np.cumsum([len(one) for one in rows])[:-1]
        for layer in self._layers:
            distance, length = trial.engine.deviations(live, np.concatenate(rows), layer, "v")
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
        told = {kind: min(_ALIKE, *self._found["other", chosen, kind]) for kind in KINDS}
        trusted = {kind: min(found[kind], _ALIKE) for kind in KINDS if max(self._right(chosen, kind)) < told[kind]}
        return Limits(chosen, trusted, "; ".join(self._words(chosen, kind, trusted.get(kind)) for kind in KINDS))

    def _right(self, layer: int, kind: Kind) -> list[float]:
        return self._found["right", layer, kind]

    def _wrong(self, layer: int, kind: Kind) -> list[float]:
        """Of wrong runs; those with keys not turned are among them if that matters to the model."""
        unturned, right = self._found["unturned", layer, kind], self._found["right", layer, kind]
        matters = statistics.median(unturned) > _MATTERS * statistics.median(right)
        return self._found["other", layer, kind] + (unturned if matters else [])

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
