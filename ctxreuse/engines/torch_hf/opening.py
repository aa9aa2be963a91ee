"""Opens a Hugging Face folder as a model in memory, with every failure turned into one that says what to do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from ctxreuse import models
from ctxreuse.engines.torch_hf.states import DTYPES
from ctxreuse.errors import ConfigError, CtxReuseError

__all__ = ["open_model"]


def open_model(name_or_folder: str | os.PathLike[str], dtype: str) -> tuple[Any, Path]:
    """The model in evaluation mode and its folder; a known name is fetched first. Raises ConfigError or EngineError."""
    if dtype not in DTYPES:
        raise ConfigError(f"no such type: {dtype!r}", fix=f"Use one of {', '.join(DTYPES)}")
    text = os.fspath(name_or_folder)
    folder = models.get(text) if text in models.CATALOG else models.resolve(text)
    disable_progress_bar()  # a folder opens in 0.1 s, and the bar would go to the standard error of a library's user
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=DTYPES[dtype], local_files_only=True)
    except CtxReuseError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"the folder does not open as a causal language model: {reason}",
            where=str(folder),
            fix="It must hold config.json and *.safetensors of a model that transformers knows",
        ) from error
    return model.eval(), folder
