"""Real language models without a hub: `get` one by name, or point at any Hugging Face folder.

::

    folder = get("smollm2")          # a Hugging Face folder in the user's cache
    weights_digest(folder)           # part of a model's identity

Importing this package pulls neither torch nor transformers; `get` needs the extra ``ctxreuse[torch]`` to convert.
"""

from __future__ import annotations

from ctxreuse.models.cache import ls, path, resolve, rm, weights_digest
from ctxreuse.models.catalog import CATALOG, ModelEntry
from ctxreuse.models.fetch import get

__all__ = ["CATALOG", "ModelEntry", "get", "ls", "path", "resolve", "rm", "weights_digest"]
