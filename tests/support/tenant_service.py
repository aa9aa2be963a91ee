"""Blocks of a tenant as small made-up bytes, and a service over a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ctxreuse.block.format import rekey
from ctxreuse.bus.protocol.base import PutRequest
from ctxreuse.identity.keys import ROOT, prefix_keys
from ctxreuse.peer.serve.service import ServeOptions, StoreService
from ctxreuse.store import TieredStore
from ctxreuse.testing.store import Context
from support.waiting import patient

TENANTS = {"ann": "a", "ann-2": "a", "bob": "b"}


class Given:
    """A `Context` under the keys of a salt."""

    def __init__(self, salt: bytes, blocks: int, **options: Any) -> None:
        self.context = Context(blocks, **options)
        self.space, self.tokens = self.context.space, self.context.tokens
        self.keys = prefix_keys(self.space, salt, self.tokens, self.context.size)
        self.blocks = [rekey(self.context.block(i), self.keys[i], self.parent(i)) for i in range(blocks)]
        self.sizes = [data.nbytes for data in self.blocks]

    def parent(self, i: int) -> bytes:
        return self.keys[i - 1] if i else ROOT

    def state(self, i: int) -> np.ndarray[Any, Any]:
        return rekey(self.context.state(i), self.keys[i], self.parent(i))

    def put(self, service: StoreService, tenant: str = "a", user: str = "ann") -> list[str]:
        """Give all blocks that are wanted; what became of each."""
        receiver = service.open_put(tenant, PutRequest(self.space, self.keys, self.sizes, ROOT), user=user)
        return [receiver.put(item, self.blocks[item].data.toreadonly()) for item in receiver.wanted]


class Gate:
    """An audit that waits to be opened, and then says ``sound``."""

    def __init__(self, sound: bool = True) -> None:
        self.open, self.sound = threading.Event(), sound

    def __call__(self, space: bytes, views: Any) -> bool:
        return self.open.wait(patient(20)) and self.sound


@contextmanager
def service(folder: Path, store: Any = None, **options: Any) -> Iterator[StoreService]:
    """A service over ``store`` (default: 16 MiB of memory)."""
    mine = TieredStore(16 << 20) if store is None else store
    made = StoreService(mine, folder, ServeOptions(tenant_of=TENANTS.get, **options))
    made.store = mine  # type: ignore[attr-defined]
    try:
        yield made
        made.check()
    finally:
        made.close()
        if store is None:
            mine.close()
