"""The model space of another engine's KV: what of its configuration the numbers depend on, as one digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ctxreuse.engines.text import tokenizer_digest
from ctxreuse.errors import ConfigError
from ctxreuse.identity.model import LayerSpec, ModelSpace
from ctxreuse.models import file_digest, weights_digest

__all__ = ["EngineModel", "space_of"]

#: Fields of a model's configuration that do not touch the numbers in K and V.
_NEUTRAL = {
    "_name_or_path", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id", "pad_token_id", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip


class EngineModel(msgspec.Struct, frozen=True):
    """A model as another engine runs it.

    Args:
        model: folder, GGUF file, or the hub's name of the weights.
        commit: of the hub's repository, for a name; "" if it is unknown.
        architecture: class of the model.
        config: the model's configuration, as JSON values.
        options: what the engine changed of the numbers: quantisation, type of KV, backend.
        dtype: of K and V.
        layers: KV heads and dim of each layer, in order.
        rope: rotary parameters; None: there are none.
        vocab_size: ids of tokens.
        max_tokens: positions.
        page_tokens: tokens of a page, which is a block.
    """

    model: str
    commit: str
    architecture: str
    config: Mapping[str, Any]
    options: Mapping[str, Any]
    dtype: str
    layers: tuple[tuple[int, int], ...]
    rope: Any
    vocab_size: int
    max_tokens: int
    page_tokens: int


def space_of(model: EngineModel) -> ModelSpace:
    """Return the space of a model in another engine.

    Weights in files are identified by their bytes, which are read once (`ctxreuse.models.weights_digest`), those of a
    hub by name and commit. Raises ConfigError where neither identifies them.
    """
    path = Path(model.model).expanduser()
    tokenizer = "none"
    if path.is_dir():
        weights, tokenizer = weights_digest(path), tokenizer_digest(path)
    elif path.is_file():
        weights = file_digest(path)
    elif model.commit:
        weights = f"hub:{model.model}@{model.commit}"
        tokenizer = weights
    else:
        raise ConfigError(
            "the model's weights cannot be identified, so no KV can be kept of them",
            where=model.model,
            fix="Serve the model from a local folder",
        )
    config = {key: value for key, value in model.config.items() if key not in _NEUTRAL}
    facts = _canonical({"config": config, "options": model.options})
    return ModelSpace(
        weights=weights,
        architecture=f"{model.architecture}/{hashlib.sha256(facts.encode()).hexdigest()[:16]}",
        tokenizer=tokenizer,
        dtype=model.dtype,
        layers=tuple(LayerSpec("full", heads, dim, dim) for heads, dim in model.layers),
        rope=_canonical(model.rope),
        vocab_size=model.vocab_size,
        max_tokens=model.max_tokens,
        block_tokens=model.page_tokens,
        attention="vllm",
    )


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
