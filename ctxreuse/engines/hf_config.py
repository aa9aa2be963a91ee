"""What a Hugging Face model's configuration says of its model space, for every program that computes it.

Nothing here imports transformers: an engine of another project has its own version of it in the same process.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

__all__ = ["architecture_of", "positions_of", "rope_of"]

#: Fields of a config that do not touch the numbers in K and V.
_NEUTRAL = {
    "_attn_implementation", "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label",
    "label2id", "pad_token_id", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


def architecture_of(name: str, config: Any) -> str:
    """Return a class name and a digest of the config's fields that differ from its defaults and touch the numbers.

    The weights' digest does not cover config.json, and e.g. a changed norm epsilon changes every K and V.

    Args:
        name: of the model's class in transformers.
        config: transformers' config of the decoder.
    """
    fields = {k: v for k, v in config.to_diff_dict().items() if k not in _NEUTRAL}
    text = json.dumps(fields, sort_keys=True, default=str)
    return f"{name}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def rope_of(config: Any) -> str:
    """Return the rotary parameters as canonical JSON; "null" for a model without."""
    return json.dumps(getattr(config, "rope_parameters", None), sort_keys=True, default=str)


def positions_of(config: Any) -> int:
    """Return how many tokens a context may have so that its first ones never change.

    "dynamic" and "longrope" rotate by other frequencies once a context is longer than the model was first trained on; K
    rotated before is wrong then, cached or not, so such a model ends there. A model without learnt or rotated positions
    has no limit of its own.
    """
    limit = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") in ("dynamic", "longrope"):
            limit = min(limit, int(part.get("original_max_position_embeddings") or limit))
    return limit
