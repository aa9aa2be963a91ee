"""The engine for Hugging Face causal language models on torch; all use of torch and transformers is in this package."""

from __future__ import annotations

from ctxreuse.engines.waits import short_waits

with short_waits():  # read when torch is loaded
    from ctxreuse.engines.torch_hf.engine import TorchEngine

__all__ = ["TorchEngine"]
