"""Limits of the probes: at which layer, and from which deviation on, a moved run is taken for a wrong one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
_WORTH = 1.1


class Limits(NamedTuple):
    """The layer to probe, the limit of each kind, and what that parts, in words."""

    layer: int
    of: Mapping[Kind, float]
    words: str


class Probing:
    """Gathers deviations of runs as they should be, of runs whose keys were not turned, and of runs of other tokens."""

    def __init__(self, space: ModelSpace) -> None:
        held = [layer for layer in _LAYERS if layer < len(space.layers) and space.layers[layer].blocked]
        self._layers = held or [i for i, layer in enumerate(space.layers) if layer.blocked][:1]
        self._right: dict[tuple[int, Kind], list[float]] = {}
        self._wrong: dict[tuple[int, Kind], list[float]] = {}

    def add(self, trial: Trial, kind: Kind) -> None:
        """Probe a scene's runs, right and wrong; an engine that cannot compare rows leaves no limit."""
        try:
            self._probe(trial, kind, trial.placed(kind), self._right)
            self._probe(trial, kind, trial.placed(kind, turn=False), self._wrong)
            self._probe(trial, kind, trial.placed(kind, wrong=True), self._wrong)
        except EngineError:
            self._layers = []

    def _probe(self, trial: Trial, kind: Kind, live: TorchLive, into: dict[tuple[int, Kind], list[float]]) -> None:
        rows = [probe_rows(run) for run in trial.runs]
        borders = np.cumsum([len(one) for one in rows])[:-1]
        for layer in self._layers:
            distance, length = trial.engine.deviations(live, np.concatenate(rows), layer, "v")
            parts = zip(np.split(distance, borders), np.split(length, borders))
            into.setdefault((layer, kind), []).extend(deviation(far, long) for far, long in parts)

    def limits(self) -> Limits:
        """The layer where right and wrong runs lie farthest apart, by the kind for which that is least so."""
        gaps = {layer: min(self._gap(layer, kind) for kind in KINDS) for layer in self._layers}
        if not gaps:
            return Limits(0, {}, "rows cannot be compared in this model, so no run is trusted")
        chosen = self._layers[0]
        for layer in self._layers[1:]:
            if gaps[layer] > _WORTH * gaps[chosen]:
                chosen = layer
        found = {kind: limit_between(self._right[chosen, kind], self._wrong[chosen, kind]) for kind in KINDS}
        return Limits(chosen, found, "; ".join(self._words(chosen, kind) for kind in KINDS))

    def _gap(self, layer: int, kind: Kind) -> float:
        return min(self._wrong[layer, kind]) / max(*self._right[layer, kind], 1e-9)

    def _words(self, layer: int, kind: Kind) -> str:
        right, wrong = self._right[layer, kind], self._wrong[layer, kind]
        told = "" if min(wrong) > max(right) else ", not told apart"
        return f"{kind} at layer {layer}: right up to {max(right):.3f}, wrong from {min(wrong):.3f}{told}"


def limit_between(right: Sequence[float], wrong: Sequence[float]) -> float:
    """Half way (in ratios) from the largest right to the least wrong deviation; the former if they overlap."""
    high, low = max(right), min(wrong)
    if not math.isfinite(high):
        return 0.0
    return math.sqrt(high * low) if high < low < math.inf else high
