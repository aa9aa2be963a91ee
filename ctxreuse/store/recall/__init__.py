"""Finding turns by what they say: an index on disk, which follows the ledger and can be made from it again."""

from __future__ import annotations

from ctxreuse.store.recall.filters import Filters
from ctxreuse.store.recall.recall import EmbedderChoice, Recall
from ctxreuse.store.recall.stems import check_language

__all__ = ["EmbedderChoice", "Filters", "Recall", "check_language"]
