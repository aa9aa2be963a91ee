"""The end of a context that fills no block comes back from the store, and goes when the context has grown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.block.format import parse
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.peer.sync.plan import Holdings
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import BlockStore
from support.examples import examples

BLOCK, VOCAB = 16, 512


def tokens(n: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(3, VOCAB, n).astype("<i4")


def kept(engine: TorchEngine, store: BlockStore, ids: Any, **options: Any) -> Any:
    """Prefill in a runtime of its own, so that nothing comes from memory, and keep the context."""
    runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0, **options))
    done = runtime.prefill(ids)
    runtime.release(done)
    store.flush()
    return done


def lengths(store: BlockStore) -> list[int]:
    return sorted(entry.tokens for entry in store.walk())


def plain(engine: TorchEngine, ids: Any) -> Any:
    return engine.prefill(engine.new_context(), ids)


@pytest.mark.parametrize("end", [2 * BLOCK, 2 * BLOCK + 7, 2 * BLOCK + 8, 3 * BLOCK - 1])
def test_a_partial_block_comes_back(llama: TorchEngine, store: BlockStore, end: int) -> None:
    ids = tokens(end + 20)
    kept(llama, store, ids[:end])
    found = kept(llama, store, ids)
    whole = end if end % BLOCK >= 8 else end // BLOCK * BLOCK  # fewer than eight are not worth it
    assert found.usage.tokens.by_source == {"disk": whole}
    assert np.allclose(found.logits, plain(llama, ids), atol=1e-4)


def test_the_longest_that_the_prompt_begins_with_is_taken(llama: TorchEngine, store: BlockStore) -> None:
    ids = tokens(40)
    for end in (29, 25):  # the shorter one did not grow out of the longer one
        kept(llama, store, ids[:end])
    assert lengths(store) == [9, 13, BLOCK]
    assert kept(llama, store, np.concatenate([ids[:29], tokens(30, 1)])).usage.cached_tokens == 29
    assert kept(llama, store, np.concatenate([ids[:28], tokens(9, 2)])).usage.cached_tokens == 25


def test_a_context_that_grew_leaves_no_partial_block_behind(llama: TorchEngine, store: BlockStore) -> None:
    ids = tokens(120)
    runtime = Runtime(llama, store, RuntimeOptions())
    for end in (29, 31, 45, 63, 70):
        runtime.release(runtime.prefill(ids[:end]))
        store.flush()
        partial = [n for n in lengths(store) if n < BLOCK]
        assert partial == ([end % BLOCK] if end % BLOCK >= 8 else [])
    # A process that finds one in the store drops it too.
    kept(llama, store, ids[:78])
    assert lengths(store)[0] == 78 % BLOCK
    kept(llama, store, ids[:80])
    store.flush()
    assert set(lengths(store)) == {BLOCK}


def test_a_damaged_partial_block_is_dropped_and_computed(llama: TorchEngine, store: BlockStore) -> None:
    ids = tokens(60)
    kept(llama, store, ids[:45])
    (entry,) = (entry for entry in store.walk() if entry.tokens < BLOCK)
    with store.read() as reader:
        view = reader.peek(entry.key)
        assert view is not None
        damaged = bytearray(view.buffer)
        place = view.spans[0, 0]
        del view
    damaged[place] ^= 1
    store.put(entry.key, damaged, replace=True)
    store.flush()
    done = kept(llama, store, ids)
    assert done.usage.tokens.by_source == {"disk": 2 * BLOCK}
    assert done.usage.miss_reason == "corrupt"
    assert np.allclose(done.logits, plain(llama, ids), atol=1e-4)


def test_a_partial_block_is_deleted_with_its_text(llama: TorchEngine, store: BlockStore) -> None:
    shared = tokens(2 * BLOCK)
    mine, other = (np.concatenate([shared, tokens(n, seed)]) for n, seed in ((12, 1), (40, 2)))
    runtime = Runtime(llama, store, RuntimeOptions(context_cache_bytes=0))
    for ids in (mine, other):
        runtime.release(runtime.prefill(ids))
    store.flush()
    assert lengths(store)[:2] == [8, 12]
    runtime.erase(mine, keep=[other])
    store.flush()
    assert lengths(store) == [8, BLOCK, BLOCK, BLOCK, BLOCK]
    assert kept(llama, store, np.concatenate([other, tokens(3, 5)])).usage.cached_tokens == len(other)
    runtime.forget(other)
    store.flush()
    assert lengths(store) == []


def test_an_old_partial_block_of_an_erased_context_goes_too(llama: TorchEngine, store: BlockStore) -> None:
    shared, mine = tokens(2 * BLOCK), tokens(60)
    other = np.concatenate([shared, tokens(40, 2)])
    for ids in (mine[:42], other, mine):  # another process knows nothing of the first one's
        runtime = Runtime(llama, store, RuntimeOptions(context_cache_bytes=0))
        done = runtime.prefill(ids)
        done.record.partial = b""
        runtime.release(done)
    store.flush()
    assert lengths(store)[:3] == [8, 10, 12]
    runtime.erase(mine, keep=[other])
    store.flush()
    assert lengths(store) == [8, BLOCK, BLOCK, BLOCK, BLOCK]


def test_partial_blocks_stay_on_the_device(llama: TorchEngine, store: BlockStore) -> None:
    kept(llama, store, tokens(45))
    holdings = Holdings(store, RuntimeOptions().tenant)
    assert holdings.refresh(lambda: False)
    assert len(holdings.entries) == 3
    assert len(holdings.order) == 2


def test_models_with_windows_have_none(gemma: TorchEngine, store: BlockStore) -> None:
    kept(gemma, store, tokens(45))
    assert set(lengths(store)) == {BLOCK}


@examples("heavy")
@given(turns=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.booleans()), min_size=1, max_size=12))
def test_whatever_chats_do_the_logits_are_those_of_a_whole_prefill(
    llama: TorchEngine, tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[int, int, bool]]
) -> None:
    """Chats that begin alike grow in any order, in processes that come and go."""
    with BlockStore.open(tmp_path_factory.mktemp("chats"), capacity=64 << 20) as store:
        runtime, texts = Runtime(llama, store, RuntimeOptions()), {n: tokens(20) for n in range(3)}
        for step, (chat, grow, restart) in enumerate(turns):
            if restart:
                runtime = Runtime(llama, store, RuntimeOptions())
            texts[chat] = np.concatenate([texts[chat], tokens(grow, step)])
            done = runtime.prefill(texts[chat])
            assert np.allclose(done.logits, plain(llama, texts[chat]), atol=1e-4)
            runtime.release(done)
            store.flush()
            store.check()
        for entry in store.walk():
            with store.read() as reader:
                view = reader.peek(entry.key)
                assert view is not None
                assert len(view.tokens) == entry.tokens
                parse(view.buffer).verify()
                del view


def test_a_store_that_is_opened_again_knows_them(llama: TorchEngine, tmp_path: Path) -> None:
    ids = tokens(45)
    with BlockStore.open(tmp_path, capacity=64 << 20) as store:
        kept(llama, store, ids)
    with BlockStore.open(tmp_path, capacity=64 << 20) as store:
        store.check()
        assert lengths(store) == [13, BLOCK, BLOCK]
        assert Runtime(llama, store, RuntimeOptions()).forget(ids[:40]) == 3
        store.flush()
        store.check()
        assert lengths(store) == []
