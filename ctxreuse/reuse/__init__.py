"""Reuse at any position: runs of tokens cut by content, found wherever they are stored, relocated and recomputed."""

from ctxreuse.reuse.budget import MaxSeconds, MaxTokens, RecomputeBudget, Share, parse_budget
from ctxreuse.reuse.chunking import Chunk, ChunkLocation, chunks
from ctxreuse.reuse.plan import BlockRows, forget, plan, read, record, used
from ctxreuse.reuse.profile import (
    ChunkKind,
    ChunkProfile,
    ChunkProfileStore,
    InPlaceMeasurement,
    PolicyMeasurement,
    read_chunk_profile,
    write_chunk_profile,
)
from ctxreuse.reuse.quality_gate import GateDecision, QualityGate, deviation, probe_rows
from ctxreuse.reuse.recompute import (
    PROBE_QUERIES,
    Attention,
    Deviations,
    RecomputePolicy,
    parse_policy,
    probe_layers,
)
from ctxreuse.reuse.search import ChunkRun, RowSource

__all__ = [
    "PROBE_QUERIES",
    "Attention",
    "BlockRows",
    "Chunk",
    "ChunkKind",
    "ChunkLocation",
    "ChunkProfile",
    "ChunkProfileStore",
    "ChunkRun",
    "Deviations",
    "GateDecision",
    "InPlaceMeasurement",
    "MaxSeconds",
    "MaxTokens",
    "PolicyMeasurement",
    "QualityGate",
    "RecomputeBudget",
    "RecomputePolicy",
    "RowSource",
    "Share",
    "chunks",
    "deviation",
    "forget",
    "parse_budget",
    "parse_policy",
    "plan",
    "probe_layers",
    "probe_rows",
    "read",
    "read_chunk_profile",
    "record",
    "used",
    "write_chunk_profile",
]
