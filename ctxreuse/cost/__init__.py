"""One currency, seconds: what computing, loading and fetching will take, learnt from what they took, and the choice."""

from ctxreuse.cost.levels import Level, Unpacking
from ctxreuse.cost.lines import DecodeLine, DiskLine, PrefillLine
from ctxreuse.cost.link import LinkEstimate
from ctxreuse.cost.log import DecisionLog, Record
from ctxreuse.cost.pricing import CostModel, Decision, Path, Way

__all__ = [
    "CostModel",
    "Decision",
    "DecisionLog",
    "DecodeLine",
    "DiskLine",
    "Level",
    "LinkEstimate",
    "Path",
    "PrefillLine",
    "Record",
    "Unpacking",
    "Way",
]
