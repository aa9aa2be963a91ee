"""What another engine's hints do to its contexts in a full store."""

from __future__ import annotations

from pathlib import Path

import pytest
from ctxreuse_cloud.connectors.access import StoreAccess

from ctxreuse.config import StoreConfig
from ctxreuse.pauses.envelope import HintOrder
from ctxreuse.store import TieredStore
from ctxreuse.testing.store import Context
from support.waiting import until

# Blocks of a context take 4 KiB each: 128 fit, and pins may have 32 of them.
CONFIG = {"capacity": 128 * 4096, "host_bytes": 0, "policy": "lru"}


def flood(store: TieredStore, first: int) -> None:
    for seed in range(first, first + 12):
        Context(16, seed=seed).fill(store)
    store.flush()


@pytest.mark.parametrize("name", ["retain", "pin"])
def test_what_is_retained_stays_until_it_is_demoted(tmp_path: Path, name: str) -> None:
    access = StoreAccess(StoreConfig(path=str(tmp_path), **CONFIG))
    store = access.writing()
    assert store is not None
    kept, other = Context(10, seed=1), Context(10, seed=2)
    for context, order in ((kept, HintOrder(name, 600.0)), (other, HintOrder("prefetch"))):
        context.fill(store)
        access.hint(context.keys, order)
    pins = tmp_path / "hinted.json"
    until(lambda: pins.is_file() and pins.read_bytes() != b"[]")
    flood(store, 100)
    assert [store.match(context.keys).blocks for context in (kept, other)] == [10, 0]
    access.close()
    access = StoreAccess(StoreConfig(path=str(tmp_path), **CONFIG))  # as after a restart
    store = access.writing()
    assert store is not None
    flood(store, 150)
    assert store.match(kept.keys).blocks == 10
    access.hint(kept.keys, HintOrder("demote"))
    until(lambda: pins.read_bytes() == b"[]")
    flood(store, 200)
    assert store.match(kept.keys).blocks == 0
    access.close()
