"""Model space: everything that KV depends on, as one frozen value whose digest prefixes each key."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Literal

import msgspec

from ctxreuse.dtypes import FLOATS, ITEM_BYTES
from ctxreuse.errors import ConfigError

__all__ = ["LayerKind", "LayerSpec", "ModelSpace"]

LayerKind = Literal["full", "sliding", "linear", "hybrid", "hybrid_sliding", "none"]

_SCHEMA = 1


class LayerSpec(msgspec.Struct, frozen=True):
    """What one layer keeps between tokens.

    ``full``: K and V of every token. ``sliding``: K and V of the last ``window - 1`` tokens. ``linear``: recurrent and
    convolution states of fixed size. ``hybrid``: full attention and linear states side by side. ``hybrid_sliding``: a
    window and linear states side by side. ``none``: nothing.
    """

    kind: LayerKind
    kv_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    window: int = 0

    @property
    def blocked(self) -> bool:
        """True if the layer has K/V planes in every block."""
        return self.kind in ("full", "hybrid")

    @property
    def stateful(self) -> bool:
        """True if the layer has a part that is valid at one position only."""
        return self.kind in ("sliding", "linear", "hybrid", "hybrid_sliding")


class ModelSpace(msgspec.Struct, frozen=True, dict=True):
    """Identity of the numbers in a block: two engines may exchange KV only if their spaces are equal.

    ``weights`` and ``tokenizer`` are SHA-256 hex digests, ``rope`` is the canonical JSON of the rotary parameters,
    ``attention`` names the numerics (kernel family) where they are known to matter.
    """

    weights: str
    architecture: str
    tokenizer: str
    dtype: str
    layers: tuple[LayerSpec, ...]
    rope: str
    vocab_size: int
    max_tokens: int
    block_tokens: int = 64
    attention: str = "sdpa"

    def __post_init__(self) -> None:
        if self.dtype not in FLOATS:
            raise ConfigError(f"no such KV type: {self.dtype!r}", fix="Use float32, float16 or bfloat16")
        if not 1 <= self.block_tokens <= 4096:
            raise ConfigError(f"block_tokens is {self.block_tokens}", fix="Choose 1 to 4096; 64 is the default")
        if not self.layers:
            raise ConfigError("a model space without layers", where=self.architecture)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over the canonical MessagePack of the fields and the schema version; 32 bytes."""
        body = msgspec.msgpack.encode([_SCHEMA, *msgspec.structs.astuple(self)])
        return hashlib.sha256(b"ctxreuse/space" + body).digest()

    @cached_property
    def needs_state(self) -> bool:
        """True if blocks alone cannot resume this model (sliding windows, recurrent layers)."""
        return any(layer.stateful for layer in self.layers)

    @cached_property
    def token_nbytes(self) -> int:
        """Bytes of K and V of one token over all layers that have blocks."""
        width = sum(spec.kv_heads * (spec.k_dim + spec.v_dim) for spec in self.layers if spec.blocked)
        return width * ITEM_BYTES[self.dtype]
