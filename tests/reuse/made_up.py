"""A model that nobody runs."""

from __future__ import annotations

from ctxreuse.model import LayerSpec, ModelSpace

SPACE = ModelSpace(
    weights="0" * 64,
    architecture="made-up",
    tokenizer="1" * 64,
    dtype="float32",
    layers=(LayerSpec("full", 1, 8, 8),),
    rope="{}",
    vocab_size=100,
    max_tokens=1000,
)
