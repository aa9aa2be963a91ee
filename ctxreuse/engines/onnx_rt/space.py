"""The model space of an ONNX folder, with a proof that its K and V can be copied from context to context."""

from __future__ import annotations

import json

import numpy as np

from ctxreuse.engines.onnx_rt.arena import KvPool
from ctxreuse.engines.onnx_rt.model import OnnxModel
from ctxreuse.engines.text import tokenizer_digest
from ctxreuse.errors import EngineError
from ctxreuse.identity.model import LayerSpec, ModelSpace

__all__ = ["measure_space"]

#: Tokens of the proof, and how many of them are copied.
_TOKENS, _COPIED = 8, 5


def measure_space(model: OnnxModel, pool: KvPool, block_tokens: int) -> ModelSpace:
    """The space of a model, after some rows were copied to another slot and the context continued there.

    Raises EngineError if the result was not the same to the bit.
    """
    ids = np.ones(_TOKENS, np.int32)
    first, second = pool.lease(_TOKENS), pool.lease(_TOKENS)
    first.compute(ids[:_COPIED], 0)
    second.copy(first, _COPIED)
    a, b = (slot.compute(ids[_COPIED:], _COPIED) for slot in (first, second))
    rows = first.rows(0, "k")[:, :_TOKENS]  # of the same token at several positions
    folder = model.folder
    if not np.array_equal(a, b) or not rows[:, _COPIED:].any():
        raise EngineError(
            "a context whose K and V were copied continues with other numbers",
            where=str(folder.path),
            fix="Its attention must be GroupQueryAttention with shared buffers",
        )
    rotated = not np.array_equal(rows[:, 0], rows[:, 1])
    layers = (LayerSpec("full", heads, model.dim, model.dim) for (_, role), heads in model.heads.items() if role == "k")
    return ModelSpace(
        weights=folder.digest,
        architecture=f"onnx/{folder.model.type}",
        tokenizer=tokenizer_digest(folder.path),
        dtype=model.dtype,
        layers=tuple(layers),
        rope=json.dumps({"rotated": rotated}),
        vocab_size=model.vocab_size,
        max_tokens=folder.model.context_length,
        block_tokens=block_tokens,
        attention=f"onnxruntime-{model.version}-{model.device}",
    )
