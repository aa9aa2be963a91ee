"""Context: small blocks of made-up tokens to fill a store with, and to recognise in what comes back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView, BlockWriter, Plane, layout_of
from ctxreuse.identity.keys import ROOT, as_tokens, prefix_key, prefix_keys, tenant_salt
from ctxreuse.store.base import Reader, Store

__all__ = ["Context"]

_SALT = tenant_salt("contract")


class Context:
    """A context of ``blocks`` blocks of ``size`` made-up tokens, as sealed bytes; equal arguments give equal bytes.

    Contexts of equal ``seed`` share their first blocks; ``branch`` changes all tokens from block ``fork`` on.
    ``floats``: numbers in each of the two planes of a block.
    """

    def __init__(
        self,
        blocks: int,
        *,
        seed: int = 0,
        branch: int = 0,
        fork: int = 0,
        size: int = 4,
        floats: int = 64,
        space: bytes = bytes(range(32)),
    ) -> None:
        tokens = np.arange(blocks * size) + seed * 100_000
        tokens[fork * size :] += branch * 1_000_000
        self.tokens, self.size, self.space, self.floats = as_tokens(tokens), size, space, floats
        self.keys = prefix_keys(space, _SALT, self.tokens, size)

    def __len__(self) -> int:
        return len(self.keys)

    def run(self, i: int) -> npt.NDArray[np.int32]:
        """Token ids of block ``i``."""
        return self.tokens[i * self.size : (i + 1) * self.size]

    def parent(self, i: int) -> bytes:
        """Key of the block before block ``i``."""
        return self.keys[i - 1] if i else ROOT

    def block(self, i: int, fill: int | None = None) -> npt.NDArray[np.uint8]:
        """Sealed bytes of block ``i``; its planes hold the byte ``fill`` (default: one that follows from its key)."""
        planes = tuple(Plane(0, role, "float32", (1, 1, self.floats)) for role in "kv")
        return self._seal(i, planes, "block", fill)

    def state(self, i: int) -> npt.NDArray[np.uint8]:
        """Sealed bytes of a state at the end of block ``i``."""
        return self._seal(i, (Plane(0, "recurrent0", "float32", (self.floats,)),), "state", None)

    def partial(self, after: int, count: int) -> tuple[bytes, npt.NDArray[np.uint8]]:
        """Key and sealed bytes of a partial block of ``count`` tokens after block ``after``."""
        tokens = self.run(after + 1)[:count] if after + 1 < len(self) else self.run(after)[:count]
        key = prefix_key(self.space, _SALT, self.keys[after], tokens)
        planes = tuple(Plane(0, role, "float32", (1, 1, self.floats)) for role in "kv")
        writer = BlockWriter(
            layout_of(planes),
            kind="block",
            space=self.space,
            key=key,
            parent=self.keys[after],
            end=(after + 1) * self.size + count,
            tokens=tokens,
        )
        for plane in planes:
            writer.plane(plane.layer, plane.role)[:] = key[0]
        return key, writer.seal()

    def _seal(self, i: int, planes: tuple[Plane, ...], kind: str, fill: int | None) -> npt.NDArray[np.uint8]:
        writer = BlockWriter(
            layout_of(planes),
            kind="block" if kind == "block" else "state",
            space=self.space,
            key=self.keys[i],
            parent=self.parent(i),
            end=(i + 1) * self.size,
            tokens=self.run(i),
        )
        for plane in planes:
            writer.plane(plane.layer, plane.role)[:] = self.keys[i][0] if fill is None else fill
        return writer.seal()

    def fill(self, store: Store, upto: int | None = None) -> int:
        """Put the first ``upto`` blocks (default: all) and flush; returns how many were accepted."""
        accepted = sum(store.put(self.keys[i], self.block(i)) for i in range(len(self) if upto is None else upto))
        store.flush(60)
        return accepted

    def get(self, reader: Reader, i: int) -> BlockView | None:
        """Block ``i`` as this reader sees it."""
        return reader.block(self.keys[i], self.run(i), self.space)

    def intact(self, store: Store, indices: Sequence[int] | None = None) -> bool:
        """True if these blocks (default: all) can be read and hold what was put."""
        with store.read() as reader:
            for i in range(len(self)) if indices is None else indices:
                view = self.get(reader, i)
                if view is None or bytes(view.buffer) != self.block(i).tobytes():
                    return False
        return True
