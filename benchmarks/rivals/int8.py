"""8-bit integers, a scale a token and head, and zstd over them: what is done where nothing else is."""

from __future__ import annotations

import numpy as np

from benchmarks.rivals.base import Coded, Values, half

__all__ = ["Int8Zstd"]


class Int8Zstd:
    """The bytes are compressed token by token and channel by channel; the smaller counts."""

    family, setting = "int8 + zstd", "-3"

    def code(self, values: Values, role: str, layer: int, layers: int) -> Coded:
        """See `Rival.code`."""
        import zstandard

        scale = half(np.abs(values).max(-1, keepdims=True) / 127)
        q = np.clip(np.rint(values / np.where(scale > 0, scale, 1)), -127, 127).astype(np.int8)
        flat = q.reshape(len(q), -1)
        pack = zstandard.ZstdCompressor(level=3)
        size = min(len(pack.compress(flat.tobytes())), len(pack.compress(flat.T.tobytes())))
        return Coded(q.astype(np.float32) * scale, 8.0 * size + 16.0 * scale.size)
