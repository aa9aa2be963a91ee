"""A model that nobody runs, and runs of prompts that nobody asked."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ctxreuse.identity.model import LayerSpec, ModelSpace

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


class Span(NamedTuple):
    """Where a run stands."""

    start: int
    end: int


def never(*_: object) -> np.ndarray:
    """For repairs that compare nothing, or do not look."""
    raise AssertionError("nobody asked")
