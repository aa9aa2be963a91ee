"""Drafts of answers from what was said before, and how long they should be: what of them is right costs less."""

from ctxreuse.speculate.costs import PassCosts
from ctxreuse.speculate.draft_file import DraftFile, remove_draft_files
from ctxreuse.speculate.drafter import MOST, AnswerDraft, AnswerDrafter, Drafter
from ctxreuse.speculate.memory import DraftMemory
from ctxreuse.speculate.pipelined import PipelinedDrafter
from ctxreuse.speculate.policy import MODEL, Confidence, DraftLedger, DraftPolicy, DraftPrice, PassLoad
from ctxreuse.speculate.suffix import Continuation, SuffixIndex

__all__ = [
    "MODEL",
    "MOST",
    "AnswerDraft",
    "AnswerDrafter",
    "Confidence",
    "Continuation",
    "DraftFile",
    "DraftLedger",
    "DraftMemory",
    "DraftPolicy",
    "DraftPrice",
    "Drafter",
    "PassCosts",
    "PassLoad",
    "PipelinedDrafter",
    "SuffixIndex",
    "remove_draft_files",
]
