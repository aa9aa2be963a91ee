"""What a calibrated rival learns: the K and V of the texts that our cards are made from."""

from __future__ import annotations

import numpy as np

from benchmarks.rivals import KvtcBasis
from ctxreuse.calibrate import default_texts, settings_for
from ctxreuse.calibrate.gather import Channels, Window, window_rows
from ctxreuse.calibrate.texts import windows_by_kind
from ctxreuse.engines.calibration import CalibrationModel
from ctxreuse.engines.text import TextModel

__all__ = ["learn"]


def learn(model: CalibrationModel, text: TextModel) -> dict[str, KvtcBasis]:
    """A basis of K and one of V over all layers, which must all keep all tokens; two or three minutes."""
    settings, rotaries = settings_for(model), model.rotaries()
    length = settings.prefix + settings.scored
    cut = windows_by_kind(default_texts()["calibration"], text, settings.windows["calibration"], length)
    found: dict[str, list[np.ndarray]] = {"k": [], "v": []}
    for kind, ids in cut:
        window = Window(model.read(ids), ids[:0], kind)
        for role, rows in found.items():
            places = tuple((layer, role) for layer in rotaries)
            heads, _, dim = window.reading.planes[places[0]].shape
            rows.append(window_rows(window, Channels(places, 0, heads, dim), rotaries))
    return {role: KvtcBasis.learn(np.concatenate(rows)) for role, rows in found.items()}
