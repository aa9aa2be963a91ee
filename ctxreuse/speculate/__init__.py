"""Drafts of answers from what was said before, and how long they should be: what of them is right costs less."""

from ctxreuse.speculate.costs import PassCosts
from ctxreuse.speculate.draft_file import DraftFile, remove_draft_files
from ctxreuse.speculate.drafter import AnswerDraft, AnswerDrafter
from ctxreuse.speculate.memory import DraftMemory
from ctxreuse.speculate.pipelined import PipelinedDrafter
from ctxreuse.speculate.policy import DraftPolicy, PassLoad
from ctxreuse.speculate.suffix import SuffixIndex

__all__ = [
    "AnswerDraft",
    "AnswerDrafter",
    "DraftFile",
    "DraftMemory",
    "DraftPolicy",
    "PassCosts",
    "PassLoad",
    "PipelinedDrafter",
    "SuffixIndex",
    "remove_draft_files",
]
