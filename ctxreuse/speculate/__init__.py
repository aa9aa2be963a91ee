"""Drafts of answers from what was said before, and how long they should be: what of them is right costs less."""

from ctxreuse.speculate.costs import PassCosts
from ctxreuse.speculate.drafter import AnswerDrafter, Draft
from ctxreuse.speculate.memory import DraftMemory
from ctxreuse.speculate.policy import DraftPolicy, Load
from ctxreuse.speculate.suffix import SuffixIndex

__all__ = ["AnswerDrafter", "Draft", "DraftMemory", "DraftPolicy", "Load", "PassCosts", "SuffixIndex"]
