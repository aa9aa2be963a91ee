"""Blocks that no runtime noted are found at other positions all the same: imported ones, and those of older stores."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import StoreError
from ctxreuse.identity.keys import ROOT, tenant_salt
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.runtime.chunks.backfill import ChunkBackfill
from ctxreuse.store import TieredStore, open_store
from ctxreuse.store.chunks.index import FOLDER
from support.shuffled import Pool, gate, prefill

FORWARD, BACKWARD = (0, 1), (1, 0)
SALT = tenant_salt("default")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with open_store(tmp_path / "kv", capacity=1 << 27) as opened:
        yield opened
        opened.check()
        opened.chunks.check()


@pytest.fixture
def pool() -> Any:
    return Pool(2, sizes=(220, 240))  # long enough for chunks that content ends


def given(engine: TorchEngine, store: TieredStore, tokens: Any, tenant: str = "default") -> list[bytes]:
    """Put a context's blocks as an import or a peer does: bytes by key, and nothing is said of them."""
    context = engine.new_context()
    engine.prefill(context, tokens)
    other = Runtime(engine, None, RuntimeOptions(tenant=tenant))
    keys = other.keys(tokens)
    for key, data in zip(keys, engine.export(context, keys, ROOT, 0)):
        assert store.put(key, data)
    store.flush()
    other.close()
    return keys


def test_what_was_given_to_the_store_is_moved(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    runtime = Runtime(llama, store, RuntimeOptions(gate=gate(llama)))
    keys = given(llama, store, pool.ask(FORWARD)[0])
    assert len(store.chunks) == 0
    usage = prefill(runtime, pool.ask(BACKWARD)).usage
    assert usage.tokens.relocated >= 220  # at least one of the documents
    assert usage.gate_decision == "kl-0.020 by rotate"
    known = len(store.chunks)
    assert runtime.chunk_backfill is not None
    assert runtime.chunk_backfill.catch_up() == 0  # nothing new: nothing is read
    assert len(store.chunks) == known
    assert keys
    runtime.close()


def test_what_is_older_than_the_index_is_found_piece_by_piece(llama: TorchEngine, tmp_path: Path, pool: Any) -> None:
    with open_store(tmp_path / "kv", capacity=1 << 27) as store:
        total = len(given(llama, store, pool.ask(FORWARD)[0]))
    shutil.rmtree(tmp_path / "kv" / FOLDER)
    with open_store(tmp_path / "kv", capacity=1 << 27) as store:
        homing = ChunkBackfill(store, llama.space, SALT)
        steps = [homing.catch_up(3) for _ in range(total // 3 + 1)]
        assert sum(count > 0 for count in steps) > 2
        assert homing.catch_up() == 0
        homing.close()
        runtime = Runtime(llama, store, RuntimeOptions(gate=gate(llama)))
        assert prefill(runtime, pool.ask(BACKWARD)).usage.tokens.relocated >= 220
        runtime.close()
        # Whoever opens a store whose index knows something looks at what comes only.
        again = ChunkBackfill(store, llama.space, SALT)
        assert again.catch_up() == 0
        again.close()


def test_blocks_of_others_are_left_alone(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    homing = ChunkBackfill(store, llama.space, SALT)
    given(llama, store, pool.ask(FORWARD)[0], tenant="someone else")
    assert homing.catch_up() == 0
    assert len(store.chunks) == 0
    homing.close()


def test_what_a_runtime_noted_is_not_looked_at_again(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    runtime = Runtime(llama, store, RuntimeOptions(gate=gate(llama)))
    done = prefill(runtime, pool.ask(FORWARD))
    runtime.release(done)
    store.flush()
    known = len(store.chunks)
    assert known > 0
    assert runtime.chunk_backfill is not None
    assert runtime.chunk_backfill.catch_up() == 0
    assert len(store.chunks) == known
    runtime.close()


def test_a_context_of_which_a_part_is_gone(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    homing = ChunkBackfill(store, llama.space, SALT)
    keys = given(llama, store, pool.ask(FORWARD)[0])
    store.drop(keys[-1], "corrupt")
    assert homing.catch_up() > 0
    store.drop(keys[0], "corrupt")
    given(llama, store, pool.ask(BACKWARD)[0])
    homing.catch_up()
    homing.close()


def test_what_left_the_store_and_came_again_is_noted_again(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    homing = ChunkBackfill(store, llama.space, SALT)
    ids = pool.ask(FORWARD)[0]
    keys = given(llama, store, ids)
    assert homing.catch_up() > 0
    store.drop(keys[0], "corrupt")
    homing.catch_up()
    given(llama, store, ids)
    assert homing.catch_up() > 0
    homing.close()


def test_keys_of_blocks_that_left_are_forgotten(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    homing = ChunkBackfill(store, llama.space, SALT)
    keys = given(llama, store, pool.ask(FORWARD)[0])
    assert homing.catch_up() > 0
    known = len(store.chunks)
    for n in range(20_000):
        homing.noted([n.to_bytes(32, "little")])
    assert len(homing) < 10_000
    homing._came(keys)  # they may have come again, says the store
    homing.catch_up()
    assert len(store.chunks) == known
    assert set(keys) <= homing._done.keys()
    homing.close()


def test_what_comes_while_keys_are_forgotten_is_looked_at(llama: TorchEngine, store: TieredStore, pool: Any) -> None:
    homing = ChunkBackfill(store, llama.space, SALT)
    for n in range(4090):
        homing.noted([n.to_bytes(32, "little")])
    given(llama, store, pool.ask(FORWARD)[0])
    homing.noted([n.to_bytes(32, "little") for n in range(5000, 5010)])
    assert len(homing) < 100
    assert homing.catch_up() > 0
    homing.close()


def test_a_store_that_cannot_be_read_is_looked_at_again(
    llama: TorchEngine, store: TieredStore, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    homing = ChunkBackfill(store, llama.space, SALT)
    given(llama, store, pool.ask(FORWARD)[0])

    def fail(*_: Any) -> Any:
        raise StoreError("the disk is gone")

    with monkeypatch.context() as broken:
        broken.setattr(store, "read", fail)
        with pytest.raises(StoreError, match="gone"):
            homing.catch_up()
    assert homing.catch_up() > 0
    homing.close()
