"""Real language models without a hub: `get` one by name, or point at any Hugging Face folder.

::

    folder = get("smollm2")          # a Hugging Face folder in the user's cache
    weights_digest(folder)           # part of a model's identity

Importing this package pulls neither torch nor transformers; `get` needs the extra ``ctxreuse[torch]`` to convert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ctxreuse.models.cache import ls, path, resolve, rm, weights_digest
from ctxreuse.models.catalog import CATALOG, ModelEntry

if TYPE_CHECKING:
    from ctxreuse.models.fetch import get as get

__all__ = ["CATALOG", "ModelEntry", "get", "ls", "path", "resolve", "rm", "weights_digest"]


def __getattr__(name: str) -> Any:
    # Fetching converts with numpy, which takes 100 ms to import: too long for every start of the command line.
    if name == "get":
        from ctxreuse.models.fetch import get

        return get
    raise AttributeError(f"module 'ctxreuse.models' has no attribute {name!r}")
