"""Tokens that leave an ONNX decoder early: its graph in parts, and how passes that end early run on them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxreuse.engines.base import Logits
from ctxreuse.engines.early import EarlyPasses, Lane, ramp_tops
from ctxreuse.engines.exits import HiddenStates
from ctxreuse.engines.onnx_rt.arena import KvPool, neighbours
from ctxreuse.engines.onnx_rt.context import OnnxContext
from ctxreuse.engines.onnx_rt.model import GraphPart, OnnxModel, floats
from ctxreuse.engines.rows import Bits
from ctxreuse.errors import EngineError
from ctxreuse.exits import ExitPlan
from ctxreuse.exits.profile import ExitProfile
from ctxreuse.identity.keys import Tokens

__all__ = ["OnnxExitStates", "OnnxExits"]

#: A row of several costs so much of a pass of one (SmolLM2 at int4: .16 to .19): what a token that left costs later.
_ROW = 0.17
#: Rows that the head computes at a time, as logits are large.
_HEAD_ROWS = 64
#: Seconds in which it is measured what running in parts adds, and passes at least and at most.
_MEASURED, _LEAST, _MOST = 1.5, 5, 50


class OnnxExits(EarlyPasses[OnnxContext]):
    """See `EarlyPasses`: hidden states are what goes from part to part, [rows, names, width] as bits."""

    def __init__(self, model: OnnxModel, profile: ExitProfile, threads: int) -> None:
        """Split the graph at ramps. Raises EngineError, with the reason, for a model that tokens cannot leave early."""
        _check_device(model)
        if profile.layers != model.folder.decoder.num_hidden_layers:
            raise EngineError("the exit profile has no ramps of this model", where=str(model.folder.path))
        whole, cuts = model.parts, model.split([ramp.depth for ramp in profile.ramps])
        self._model, self._threads = model, threads
        if profile.width != model.parts[0].width:
            raise EngineError("the exit profile has no ramps of this model", where=str(model.folder.path))
        *layers, head = (size for cut in cuts for size in cut.nbytes)
        super().__init__(profile, layers, head, _ROW)
        self._measure(whole)

    def _measure(self, whole: Sequence[GraphPart]) -> None:
        """Find out what a pass of one token takes more in parts than in ``whole``, which is still open."""
        context, token = OnnxContext(KvPool(self._model).lease, _MOST), np.zeros(1, "<i4")
        plan, seconds, started = ExitPlan(range(len(self._ramps))), (list[float](), list[float]()), self._clock()
        for count in range(_MOST):
            if count >= _LEAST and self._clock() - started > _MEASURED:
                break
            for parts in (True, False) if count % 2 else (False, True):
                began, ramps = self._clock(), 0.0
                if parts:
                    ramps = self._step([(context, token, plan)])[0].spent
                else:
                    self._model.run(context.slot.bind(), token[None], [context.n], parts=whole)
                seconds[parts].append(self._clock() - began - ramps)
        self._parted = max(median(seconds[True]) / median(seconds[False]) - 1, 0.0)

    def _begun(self, ids: Tokens) -> npt.NDArray[np.int64]:
        return ids.astype(np.int64)

    def _stacked(self, hidden: Sequence[Bits]) -> Bits:
        return np.stack(hidden)

    def _joined(self, before: Bits, hidden: Bits) -> Bits:
        return np.concatenate([before, hidden])

    def _advance(self, lanes: Sequence[Lane[OnnxContext]], at: int, stop: int) -> None:
        if all(len(lane.rows) == 1 for lane in lanes):
            runs = list(neighbours(lanes, lambda lane: lane.context.slot))
        else:  # the graph takes several tokens of one context only
            runs = [[lane] for lane in lanes]
        for run in runs:
            given: npt.NDArray[Any] = np.stack([lane.hidden for lane in run])
            given = np.ascontiguousarray(np.moveaxis(given, 2, 0)) if at else given[None]
            bind = run[0].context.slot.bind(len(run))
            found = self._model.advance(bind, given, [lane.first for lane in run], at, stop)
            for lane, hidden in zip(run, np.moveaxis(found, 0, 2)):
                lane.hidden = hidden

    def _logits(self, lanes: Sequence[Lane[OnnxContext]]) -> list[Logits]:
        logits = self._model.logits(np.concatenate([lane.hidden[:, 0] for lane in lanes]))
        return np.split(logits, np.cumsum([len(lane.rows) for lane in lanes])[:-1])

    def _tops(
        self, number: int, lanes: Sequence[Lane[OnnxContext]], chosen: Sequence[int]
    ) -> tuple[list[float], list[int]]:
        hidden = np.concatenate([lane.hidden[:, -1] for lane in lanes])[list(chosen)]
        given = _root_mean_square(floats(hidden, self._model.parts[0].dtype, copy=False))
        return ramp_tops(self._ramps[number], given, self._threads)


class OnnxExitStates:
    """See `ExitStates`."""

    def __init__(self, model: OnnxModel, pool: KvPool) -> None:
        """Raises EngineError, with the reason, for a model that tokens cannot leave early."""
        _check_device(model)
        model.split([])
        self._model, self._pool = model, pool
        self.width = model.parts[0].width

    def read(self, ids: Tokens, depths: Sequence[int]) -> HiddenStates:
        """See `ExitStates.read`."""
        model, slot = self._model, self._pool.lease(len(ids))
        model.split(depths)
        given: npt.NDArray[Any] = ids.astype(np.int64)[None, None]
        hidden = []
        for start, stop in pairwise((0, *depths, model.folder.decoder.num_hidden_layers)):
            given = model.advance(slot.bind(), given, [0], start, stop)
            hidden.append(_root_mean_square(floats(given[-1, 0], model.parts[0].dtype, copy=False)))
        last = given[0, 0]
        said = [self._said(last[at : at + _HEAD_ROWS]) for at in range(0, len(last), _HEAD_ROWS)]
        return HiddenStates(hidden[:-1], floats(last, model.parts[-2].dtype, copy=True), np.concatenate(said))

    def _said(self, last: Bits) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = self._model.logits(last).argmax(-1)
        return found

    def head_rows(self, tokens: Tokens) -> npt.NDArray[np.float32]:
        """See `ExitStates.head_rows`: what the head makes of unit vectors, whatever its weights are kept as."""
        dtype = self._model.parts[-2].dtype
        units = np.eye(self.width, dtype=np.float32)
        bits = (units.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else units.astype(dtype)
        found = [self._model.logits(bits[at : at + _HEAD_ROWS])[:, tokens] for at in range(0, self.width, _HEAD_ROWS)]
        return np.ascontiguousarray(np.concatenate(found).T)


def _check_device(model: OnnxModel) -> None:
    if model.device != "cpu":
        raise EngineError("onnxruntime has early exits on the processor only", where=str(model.folder.path))


def _root_mean_square(hidden: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return hidden states [n, width], each divided by its root mean square: what a ramp's head takes."""
    found: npt.NDArray[np.float32] = hidden / np.sqrt(np.square(hidden).mean(-1, keepdims=True) + np.float32(1e-6))
    return found
