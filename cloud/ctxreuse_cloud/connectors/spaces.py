"""The model space of another engine's KV: what of its configuration the numbers depend on, as one digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ctxreuse.engines.hf_config import architecture_of, positions_of, rope_of
from ctxreuse.engines.text import tokenizer_digest
from ctxreuse.errors import ConfigError
from ctxreuse.identity.model import LayerSpec, ModelSpace
from ctxreuse.models import file_digest, weights_digest

__all__ = ["EngineModel", "space_of", "torch_space_of"]

#: Fields of a model's configuration that do not touch the numbers in K and V.
_NEUTRAL = {
    "_name_or_path", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id", "pad_token_id", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip

#: Models and kinds of rotation whose K and V were compared with the torch engine's (tests/connectors/test_shared.py):
#: another class may keep K unrotated, in another order of heads or dims, or rotated by other angles.
_COMPARED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROTATIONS = ("default", "llama3")


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
        layers=_layers(model),
        rope=_canonical(model.rope),
        vocab_size=model.vocab_size,
        max_tokens=model.max_tokens,
        block_tokens=model.page_tokens,
        attention="vllm",
    )


def torch_space_of(model: EngineModel, config: Any) -> ModelSpace:
    """Return the space in which the torch engine keeps the KV of the same model folder, with its blocks of 64 tokens.

    Args:
        model: as the other engine runs it; its pages need not have the size of blocks.
        config: transformers' config of the decoder, as the other engine changed it: what differs is another space.

    Raises ConfigError for a model whose KV is not known to be the torch engine's, with what to do.
    """
    folder = Path(model.model).expanduser()
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    expected = {"quantization": None, "dtype": f"torch.{model.dtype}"}
    changed = sorted(name for name, value in expected.items() if model.options.get(name) != value)
    if model.options.get("load_format") not in ("auto", "safetensors"):
        changed.append("load_format")
    for wrong, what, fix in (
        (not folder.is_dir(), "the model is no local folder", "Serve it from a folder"),
        (model.architecture not in _COMPARED, f"it is a {model.architecture}", f"Use one of {', '.join(_COMPARED)}"),
        (kind not in _ROTATIONS, f"it rotates by {kind}", f"Use a model that rotates by {' or '.join(_ROTATIONS)}"),
        (bool(changed), f"the engine changes its {', '.join(changed)}", "Leave these settings as they are by default"),
    ):
        if wrong:
            raise ConfigError(f"KV cannot be shared with the torch engine: {what}", where=model.model, fix=fix)
    return ModelSpace(
        weights=weights_digest(folder),
        architecture=architecture_of(model.architecture, config),
        tokenizer=tokenizer_digest(folder),
        dtype=model.dtype,
        layers=_layers(model),
        rope=rope_of(config),
        vocab_size=int(config.vocab_size),
        max_tokens=positions_of(config),
    )


def _layers(model: EngineModel) -> tuple[LayerSpec, ...]:
    return tuple(LayerSpec("full", heads, dim, dim) for heads, dim in model.layers)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
