"""Attention over chunks in place: queries are rotated to them, results merged."""

from ctxreuse.reuse.inplace.pages import Selection
from ctxreuse.reuse.inplace.pinned import AttachedRun, CodedSlab, PinnedRun, Slab
from ctxreuse.reuse.inplace.runs import InPlaceRuns, ScoreOptions

__all__ = ["AttachedRun", "CodedSlab", "InPlaceRuns", "PinnedRun", "ScoreOptions", "Selection", "Slab"]
