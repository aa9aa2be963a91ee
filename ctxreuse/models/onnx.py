"""ONNX folders: where the decoders stand that ``ctxreuse model build`` made of a model."""

from __future__ import annotations

import os
from pathlib import Path

from ctxreuse.errors import ConfigError
from ctxreuse.models import cache
from ctxreuse.models.catalog import CATALOG

__all__ = ["GENAI_FILE", "PRECISIONS", "PROVIDERS", "built_folder", "built_of", "find_built"]

#: What makes a folder an ONNX folder.
GENAI_FILE = "genai_config.json"
#: Precisions of weights, the fastest to decode first.
PRECISIONS = ("int4", "fp16", "fp32")
#: What graphs are built for.
PROVIDERS = ("cpu", "cuda")


def built_folder(model: Path, precision: str, provider: str = "cpu") -> Path:
    """Where a model's decoder of a precision is built, unless another folder is named."""
    return model / "onnx" / (precision if provider == "cpu" else f"{precision}-{provider}")


def find_built(name_or_folder: str | os.PathLike[str], provider: str = "cpu") -> Path:
    """The ONNX folder meant by a path, or by the name or folder of a model that one was built of: the fastest.

    Never builds. Raises ConfigError if there is none.
    """
    text = os.fspath(name_or_folder)
    folder = cache.path(text) if text in CATALOG else Path(text).expanduser().absolute()
    for found in (folder, *(built_folder(folder, precision, provider) for precision in PRECISIONS)):
        if (found / GENAI_FILE).is_file():
            return found
    raise ConfigError(
        f"no ONNX folder was built of {text!r}",
        where=str(folder),
        fix=f"Run: ctxreuse model build {text} --engine onnxruntime --precision int4"
        + (f" --provider {provider}" if provider != "cpu" else ""),
    )


def built_of(name: str) -> tuple[str, ...]:
    """What was built of a known model, as the folders are called: ``int4``, ``fp16-cuda``."""
    return tuple(sorted(file.parent.name for file in (cache.path(name) / "onnx").glob(f"*/{GENAI_FILE}")))
