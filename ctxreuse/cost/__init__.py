"""One currency, seconds: what computing, loading and fetching will take, learnt from what they took, and the choice."""

from ctxreuse.cost.levels import Level, Unpacking
from ctxreuse.cost.lines import DecodeLine, DiskLine, PrefillLine
from ctxreuse.cost.link import LinkEstimate
from ctxreuse.cost.log import DecisionLog, DecisionRecord
from ctxreuse.cost.pricing import CostModel, Decision, FetchPath, Way

__all__ = [
    "CostModel",
    "Decision",
    "DecisionLog",
    "DecisionRecord",
    "DecodeLine",
    "DiskLine",
    "FetchPath",
    "Level",
    "LinkEstimate",
    "PrefillLine",
    "Unpacking",
    "Way",
]
