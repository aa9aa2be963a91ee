"""LMCache's serde with our codec: chunks go to its second level at a level of a model's calibration profile.

Registered by `ctxreuse_cloud.connectors.lmcache`, beside whose adapter an argument of LMCache's server names it::

    "serde": {"type": "ctxreuse", "model": "smollm2", "level": "kl-0.01"}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from lmcache.v1.distributed.serde import AsyncSerdeProcessor, Deserializer, Serializer

from ctxreuse.dtypes import ITEM_BYTES
from ctxreuse.errors import ConfigError
from ctxreuse_cloud.connectors.access import read_options
from ctxreuse_cloud.connectors.chunks.codec import ChunkCodec, ChunkShape, chunk_key

__all__ = ["CtxReuseDeserializer", "CtxReuseSerializer", "create_serde"]

#: Settings, with their defaults.
_OPTIONS = {"model": "", "level": "kl-0.01", "max_workers": "1"}


class CtxReuseSerializer(Serializer):  # type: ignore[misc]
    """Encodes chunks. Any thread may call."""

    def __init__(self, codec: ChunkCodec) -> None:
        self._codec = codec

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Encode the KV of ``src`` to ``dst``; returns how many bytes it took."""
        return self._codec.encode(
            _bytes_of(src), _shape_of(src.get_shapes(), src.get_dtypes()), _key(key), _bytes_of(dst)
        )

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """Return how many bytes a chunk of this layout takes at most."""
        return self._codec.most_bytes(_shape_of(layout_desc.shapes, layout_desc.dtypes))


class CtxReuseDeserializer(Deserializer):  # type: ignore[misc]
    """Decodes chunks. Any thread may call."""

    def __init__(self, codec: ChunkCodec) -> None:
        self._codec = codec

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        """Decode ``src`` to the KV of ``dst``. Raises FormatError, upon which LMCache's load fails."""
        self._codec.decode(_bytes_of(src), _shape_of(dst.get_shapes(), dst.get_dtypes()), _key(key), _bytes_of(dst))


def create_serde(settings: Mapping[str, Any]) -> Any:
    """Return LMCache's processor of serde tasks over our codec.

    Args:
        settings: ``model`` and ``level`` as for `ChunkCodec`; ``max_workers`` threads.

    Raises ConfigError for a setting that there is not, or that is wrong.
    """
    options = read_options(settings, _OPTIONS, "serde")
    if not options["max_workers"].isdecimal() or not 1 <= int(options["max_workers"]) <= 256:
        raise ConfigError(f"max_workers is {options['max_workers']!r}", where="serde", fix="Choose 1 to 256 threads")
    codec = ChunkCodec(options["level"], options["model"])
    return AsyncSerdeProcessor(CtxReuseSerializer(codec), CtxReuseDeserializer(codec), int(options["max_workers"]))


def _shape_of(shapes: Sequence[Any], dtypes: Sequence[Any]) -> ChunkShape:
    """What a chunk is; parts of several shapes, or of types that we do not know, count as bytes."""
    named = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    if len(named) == 1 and named[0] in ITEM_BYTES:
        return ChunkShape(named[0], tuple(map(int, shapes[0])))
    sizes = (shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    return ChunkShape("uint8", (sum(sizes),))


def _bytes_of(each: Any) -> npt.NDArray[np.uint8]:
    return np.frombuffer(memoryview(each.byte_array).cast("B"), np.uint8)


def _key(key: Any) -> bytes:
    return chunk_key([key.chunk_hash, key.model_name, key.kv_rank, key.object_group_id, key.cache_salt])
