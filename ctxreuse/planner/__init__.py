"""Order for the parts of a prompt: what is cached and what others will share comes first. No input or output."""

from ctxreuse.planner.cached import CachedPrefixes
from ctxreuse.planner.parts import KINDS, Part, PartKind
from ctxreuse.planner.permutation import Permutation
from ctxreuse.planner.planner import Plan, Planner, ranking_line

__all__ = ["KINDS", "CachedPrefixes", "Part", "PartKind", "Permutation", "Plan", "Planner", "ranking_line"]
