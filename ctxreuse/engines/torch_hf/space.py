"""The model space of a Hugging Face model: its digests, and what each layer keeps, learnt by running it once."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from ctxreuse import models
from ctxreuse.engines.hf_config import architecture_of, positions_of, rope_of
from ctxreuse.engines.text import tokenizer_digest
from ctxreuse.engines.torch_hf.cache.layers import (
    ArenaLayer,
    FullWindowLayer,
    HybridLayer,
    HybridWindowLayer,
    WindowLayer,
)
from ctxreuse.errors import EngineError
from ctxreuse.identity.model import LayerSpec, ModelSpace

__all__ = ["config_of", "model_space", "new_cache", "weights_of"]


def config_of(model: Any) -> Any:
    """The decoder's part of a model's config."""
    return model.config.get_text_config(decoder=True)


def new_cache(model: Any, *, full_windows: bool = False) -> DynamicCache:
    """A cache with this package's layers; raises EngineError for a kind of layer that cannot be exported.

    ``full_windows``: layers with a sliding window keep K and V of all tokens.
    """
    cache = DynamicCache(config=config_of(model))
    for index, layer in enumerate(cache.layers):
        kind = type(layer)
        if kind is DynamicLayer:
            cache.layers[index] = ArenaLayer()
        elif kind is DynamicSlidingWindowLayer:
            cache.layers[index] = (FullWindowLayer if full_windows else WindowLayer)(layer.sliding_window)
        elif kind is LinearAttentionAndFullAttentionLayer:
            cache.layers[index] = HybridLayer(layer.number_of_states)
        elif kind is LinearAttentionAndSlidingWindowAttentionLayer:
            cache.layers[index] = HybridWindowLayer(layer.sliding_window, layer.number_of_states)
        elif kind not in (LinearAttentionLayer, DummyLayer):
            raise EngineError(
                f"layer {index} keeps its context in a {kind.__name__}, which cannot be exported",
                where=type(model).__name__,
                fix="Full, sliding-window, linear and parallel hybrid layers are supported",
            )
    return cache


def model_space(
    model: Any,
    filled: DynamicCache,
    folder: Path | None,
    weights: str,
    attention: str,
    block_tokens: int,
    *,
    full_windows: bool = False,
) -> ModelSpace:
    """The space of a model; ``filled`` is a plain cache that a few tokens have been run into.

    ``folder`` holds the model's files, None for a model that exists in memory only; ``weights``: see
    `weights_of`; ``full_windows``: see `new_cache`.
    """
    config = config_of(model)
    dtypes = {t.dtype for layer in filled.layers for t in (getattr(layer, "keys", None),) if t is not None}
    if len(dtypes) > 1:
        raise EngineError(f"layers keep K and V in different types: {dtypes}", where=type(model).__name__)
    dtype = str(dtypes.pop() if dtypes else model.dtype).removeprefix("torch.")
    return ModelSpace(
        weights=weights,
        architecture=architecture_of(type(model).__name__, config),
        tokenizer=tokenizer_digest(folder),
        dtype=dtype,
        layers=layer_specs(model, filled, full_windows),
        rope=rope_of(config),
        vocab_size=int(config.vocab_size),
        max_tokens=positions_of(config),
        block_tokens=block_tokens,
        attention=attention,
    )


def weights_of(model: Any, folder: Path | None, *, int8: bool) -> str:
    """What a space says of a model's weights: their digest, and ``int8`` behind it if they are computed with as int8.

    Call before they are changed.
    """
    digest = models.weights_digest(folder) if folder is not None else state_dict_digest(model)
    return f"{digest}/int8" if int8 else digest


def layer_specs(model: Any, filled: DynamicCache, full_windows: bool) -> tuple[LayerSpec, ...]:
    """What each layer keeps, read off a plain cache after a few tokens; ``full_windows``: see `new_cache`."""
    specs = []
    for layer in filled.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        linear = isinstance(layer, LinearAttentionLayer)
        if keys is None or values is None or not keys.numel():
            specs.append(LayerSpec("linear" if linear else "none"))
            continue
        if keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
            raise EngineError("K and V have different heads or types", where=type(model).__name__)
        slides = isinstance(layer, DynamicSlidingWindowLayer) and (linear or not full_windows)
        kind = ("hybrid_sliding" if linear else "sliding") if slides else "hybrid" if linear else "full"
        window = layer.sliding_window if slides else 0
        specs.append(LayerSpec(kind, keys.shape[1], keys.shape[3], values.shape[3], window))  # type: ignore[arg-type]
    return tuple(specs)


def state_dict_digest(model: torch.nn.Module) -> str:
    """SHA-256 over names, types, shapes and bytes of a model in memory, in the order of the names; hex."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
