"""Engines: what runs a model and lets its contexts be loaded, continued and exported; each is imported when opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ctxreuse.engines.base import Engine, Live, Loading

if TYPE_CHECKING:
    from ctxreuse.engines.torch_hf import TorchEngine

__all__ = ["Engine", "Live", "Loading", "open_engine"]


def open_engine(name_or_folder: str | None = None, **options: Any) -> TorchEngine:
    """The engine for a known model name (``smollm2``) or a Hugging Face folder; fetches a known model if need be.

    Without a name: what the user's settings (``ctxreuse config show``) say of the engine. ``options`` are those of
    `TorchEngine.open` and beat the settings. Raises ConfigError for an unknown name, a folder without a model, or if
    the extra ``ctxreuse[torch]`` is not installed.
    """
    from ctxreuse.config import load
    from ctxreuse.errors import ConfigError

    if name_or_folder is None:
        chosen = load().settings.engine
        name_or_folder = chosen.model
        usual = {"dtype": chosen.dtype, "threads": chosen.threads or None, "chunk": chosen.chunk, "whole": chosen.whole}
        options = {**usual, **options}
    try:
        from ctxreuse.engines.torch_hf import TorchEngine
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("torch", "transformers", "tokenizers", "safetensors"):
            raise
        raise ConfigError(
            f"the engine needs {error.name}", where=name_or_folder, fix="Run: pip install 'ctxreuse[torch]'"
        ) from error
    return TorchEngine.open(name_or_folder, **options)
