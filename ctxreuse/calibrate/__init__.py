"""Calibration: learns from a model and some text how its K and V are coded, and measures what each level costs."""

from __future__ import annotations

from ctxreuse.calibrate.mix import default_texts
from ctxreuse.calibrate.run import DEFAULT_TARGETS, Settings, Target, calibrate, settings_for
from ctxreuse.calibrate.texts import Texts, read_texts

__all__ = [
    "DEFAULT_TARGETS",
    "Settings",
    "Target",
    "Texts",
    "calibrate",
    "default_texts",
    "read_texts",
    "settings_for",
]
