"""Reuse at any position: runs of tokens cut by content, found wherever they were computed, moved, and repaired."""

from ctxreuse.reuse.budget import budget_tokens, is_time
from ctxreuse.reuse.card import ChunkCard, Kind, Measured, read_chunk_card, write_chunk_card
from ctxreuse.reuse.chunking import Chunk, chunks
from ctxreuse.reuse.gate import Gate, Verdict
from ctxreuse.reuse.home import Home
from ctxreuse.reuse.naming import parse
from ctxreuse.reuse.plan import Piece, Run, Source, forget, plan, read, record, used
from ctxreuse.reuse.repair import LOOKING, Attention, Deviations, Repair, look_layers
from ctxreuse.reuse.shelf import ChunkShelf

__all__ = [
    "LOOKING",
    "Attention",
    "Chunk",
    "ChunkCard",
    "ChunkShelf",
    "Deviations",
    "Gate",
    "Home",
    "Kind",
    "Measured",
    "Piece",
    "Repair",
    "Run",
    "Source",
    "Verdict",
    "budget_tokens",
    "chunks",
    "forget",
    "is_time",
    "look_layers",
    "parse",
    "plan",
    "read",
    "read_chunk_card",
    "record",
    "used",
    "write_chunk_card",
]
