"""Calibration of early exits: a light head behind some layers, from what the model itself says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.calibrate.gather import Progress
from ctxreuse.calibrate.ramp_training import targets_of, train_head
from ctxreuse.calibrate.texts import KindWindow, Texts, windows_by_kind
from ctxreuse.codec import model_digest
from ctxreuse.engines.exits import ExitCalibration, ExitStates, HiddenStates
from ctxreuse.errors import ConfigError
from ctxreuse.exits.profile import ExitProfile, Ramp
from ctxreuse.kernels.linear import linear_top, quantise_weights

__all__ = ["ExitSettings", "calibrate_exits", "exit_settings", "fit_ramp"]

Floats = npt.NDArray[np.float32]

#: Where ramps are, as shares of a model's layers; one more is before the last layer.
_DEPTHS = (0.67, 0.8, 0.9)
#: Tokens that a ramp can say: those that the model says most. With 8,192 in place of 2,048 SmolLM2's ramps agreed with
#: more of what it says, but saved no more within 1 %: tokens that can leave are mostly common, and heads cost more.
_CANDIDATES = 2048
#: Weight of the ridge: as many tokens of hidden states whose numbers are all 1 at random.
_RIDGE = 30.0


class ExitSettings(NamedTuple):
    """``windows`` of ``length`` tokens to learn from, and a sixth as many to see how ramps do; ``depths`` of ramps."""

    windows: int
    length: int
    depths: tuple[int, ...]
    candidates: int = _CANDIDATES


def exit_settings(engine: ExitCalibration, *, quick: bool = False) -> ExitSettings:
    """The usual amounts for a model."""
    layers = len(engine.space.layers)
    depths = sorted({round(share * layers) for share in _DEPTHS} | {layers - 1})
    length = min(512, engine.space.max_tokens)
    return ExitSettings(12 if quick else 36, length, tuple(depth for depth in depths if 0 < depth < layers))


def calibrate_exits(
    engine: ExitCalibration, texts: Texts, settings: ExitSettings, progress: Progress, notes: Mapping[str, str]
) -> ExitProfile:
    """Make the ramps of a model. Each maps the hidden states behind its layer to the last ones, as well as a linear map
    can, and those to the logits of the tokens that the model says most; then that is trained, see `train_head`.

    Raises ConfigError for too little text or no tokenizer, EngineError for a model that tokens cannot leave early.
    """
    if engine.text is None:
        raise ConfigError("the folder holds no tokenizer.json, so no text can be read", fix="Add the file")
    states = engine.exit_states()
    windows = windows_by_kind(texts["calibration"], engine.text, settings.windows, settings.length)
    unseen = windows_by_kind(texts["held-out"], engine.text, max(settings.windows // 6, 1), settings.length)
    if not windows or not unseen or not settings.depths:
        raise ConfigError(
            f"too little text for windows of {settings.length} tokens, or too few layers for a ramp",
            where=engine.space.architecture,
            fix="Give more text",
        )
    sums = {depth: _Sums(states.width) for depth in settings.depths}
    said, kept = np.zeros(engine.space.vocab_size), list[HiddenStates]()
    for number, window in enumerate(windows):
        progress("hidden states", number, len(windows))
        found = states.read(window.ids, settings.depths)
        said += np.bincount(found.said, minlength=len(said))
        kept.append(found._replace(hidden=[hidden.astype(np.float16) for hidden in found.hidden]))
        for depth, hidden in zip(settings.depths, found.hidden):
            sums[depth].add(hidden, found.last)
    progress("hidden states", len(windows), len(windows))
    count = min(settings.candidates, len(said))
    # Of equally rare ones the first in the vocabulary, as those of byte pairs are the more common ones.
    candidates = np.sort(np.lexsort((np.arange(len(said)), -said))[:count]).astype(np.int32)
    rows = states.head_rows(candidates)
    targets = np.concatenate([targets_of(one.last, one.said, candidates, rows) for one in kept])
    made = list[Ramp]()
    for at, depth in enumerate(settings.depths):
        progress("ramps", at, len(settings.depths))
        hidden = np.concatenate([one.hidden[at] for one in kept])
        made.append(fit_ramp(depth, train_head(hidden, targets, sums[depth].solution() @ rows.T), candidates))
    progress("ramps", len(settings.depths), len(settings.depths))
    agrees = _agreement(states, made, unseen, progress)
    ramps = tuple(Ramp(one.depth, one.candidates, one.head, share) for one, share in zip(made, agrees))
    return ExitProfile(
        model_digest(engine.space), states.width, len(engine.space.layers), ramps,
        {**notes, "windows": f"{len(windows)} of {settings.length} tokens"},
    )  # fmt: skip


class _Sums:
    """Normal equations of the linear map from hidden states to the last ones."""

    def __init__(self, width: int) -> None:
        self.squares = np.eye(width + 1) * _RIDGE
        self.products = np.zeros((width + 1, width))

    def add(self, hidden: Floats, last: Floats) -> None:
        """Add rows [n, width]."""
        wide = np.c_[hidden, np.ones(len(hidden), np.float32)]
        self.squares += wide.T @ wide
        self.products += wide.T @ last

    def solution(self) -> Floats:
        """Return the map [width + 1, width]; the last row is the constant."""
        found: Floats = np.linalg.solve(self.squares, self.products).astype(np.float32)
        return found


def fit_ramp(depth: int, head: Floats, candidates: npt.NDArray[np.int32]) -> Ramp:
    """Return the ramp of a head [width + 1, candidates], whose last row is the constant."""
    weights = quantise_weights(np.ascontiguousarray(head[:-1].T), np.ascontiguousarray(head[-1]))
    return Ramp(depth, candidates, weights, 0.0)


def _agreement(
    states: ExitStates, ramps: Sequence[Ramp], windows: Sequence[KindWindow], progress: Progress
) -> list[float]:
    right, total = np.zeros(len(ramps)), 0
    for number, window in enumerate(windows):
        progress("held-out text", number, len(windows))
        found: HiddenStates = states.read(window.ids, [ramp.depth for ramp in ramps])
        total += len(found.said)
        for at, (ramp, hidden) in enumerate(zip(ramps, found.hidden)):
            right[at] += (ramp.candidates[linear_top(hidden, ramp.head)["index"]] == found.said).sum()
    progress("held-out text", len(windows), len(windows))
    return [float(share) for share in right / total]
