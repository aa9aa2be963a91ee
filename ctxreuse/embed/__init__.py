"""Vectors of texts, by which texts of like meaning are found: for the daemon's ``/v1/embeddings``, and for recall.

::

    embedder = open_embedder()
    vectors = embedder.embed(["It rains.", "The weather is wet."]).vectors    # float32 [2, 256], of length 1
"""

from __future__ import annotations

from ctxreuse.embed.base import Embedder, Embeddings
from ctxreuse.embed.multilingual import MULTILINGUAL, MultilingualEmbedder
from ctxreuse.embed.static import NAME, StaticEmbedder

__all__ = ["MULTILINGUAL", "NAME", "Embedder", "Embeddings", "open_embedder"]


def open_embedder(*, multilingual: bool = False) -> Embedder:
    """Open the embedder of the extra ``ctxreuse[embed]``, or that of ``ctxreuse[multilingual]``.

    Raises ConfigError, saying what to install, without it.
    """
    return MultilingualEmbedder.open() if multilingual else StaticEmbedder.open()
