"""Judging a step of an answer that another model wrote: scores, and how far they can be trusted."""

from ctxreuse.judge.cases import LabelledStep, make_steps, read_steps
from ctxreuse.judge.own import OwnJudge
from ctxreuse.judge.profile import LEAST_AUC, MAX_STEP, Judged, JudgeProfile, JudgeProfileStore
from ctxreuse.judge.rule import StepRule
from ctxreuse.judge.scores import area_under_curve, best_threshold, likelihood

__all__ = [
    "LEAST_AUC",
    "MAX_STEP",
    "JudgeProfile",
    "JudgeProfileStore",
    "Judged",
    "LabelledStep",
    "OwnJudge",
    "StepRule",
    "area_under_curve",
    "best_threshold",
    "likelihood",
    "make_steps",
    "read_steps",
]
