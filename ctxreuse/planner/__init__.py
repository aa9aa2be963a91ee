"""Order for the parts of a prompt: what is cached and what others will share comes first. No input or output."""

from ctxreuse.planner.batch import BatchPlan, plan_batch
from ctxreuse.planner.cached import CachedPrefixes
from ctxreuse.planner.documents import DocumentOrder, check_order, document_order, document_parts, ranking_line
from ctxreuse.planner.markers import MarkedRequest, ProviderApi, mark_request
from ctxreuse.planner.parts import KINDS, Part, PartKind
from ctxreuse.planner.permutation import Permutation
from ctxreuse.planner.planner import Plan, Planner
from ctxreuse.planner.repeats import Repeats, without_repeats

__all__ = [
    "KINDS",
    "BatchPlan",
    "CachedPrefixes",
    "DocumentOrder",
    "MarkedRequest",
    "Part",
    "PartKind",
    "Permutation",
    "Plan",
    "Planner",
    "ProviderApi",
    "Repeats",
    "check_order",
    "document_order",
    "document_parts",
    "mark_request",
    "plan_batch",
    "ranking_line",
    "without_repeats",
]
