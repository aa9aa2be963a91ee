"""Requests over blocks of several levels: each gets what it allows, says what it got, and leaves what is true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ctxreuse.block.format import BlockWriter, parse
from ctxreuse.block.levels import EXACT, family, is_exact
from ctxreuse.codec import Codec, ProfileStore
from ctxreuse.engines.provenance import leading
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import ConfigError
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import BlockStore, TieredStore
from ctxreuse.testing.profiles import plain_codec
from ctxreuse.testing.sealed import random_tokens, seal

BLOCK = 16
#: Large enough that every block shrinks to fewer pages, as those of real models do.
WHOLE = 12 * BLOCK
both = pytest.mark.parametrize("engine", ["llama", "gemma"], indirect=True)


@pytest.fixture
def coded(engine: TorchEngine, tmp_path: Path) -> Iterator[TorchEngine]:
    """The engine with a card on a shelf of its own."""
    sealed = seal(engine, random_tokens(engine, 6 * BLOCK, seed=5))
    views = [parse(data) for data in (*sealed.blocks, *sealed.states.values())]
    engine.codec = plain_codec(engine.space, views, tmp_path / "cards")
    yield engine
    engine._codec = None


def kept(store: TieredStore | BlockStore) -> Counter[str]:
    store.flush(30)
    store.check()
    return Counter(family(entry.level) for entry in store.walk())


def lossy_store(engine: TorchEngine, folder: Path, ids: np.ndarray) -> BlockStore:
    """A store that holds the whole blocks of ``ids`` at kl-0.05, where that is smaller."""
    store = BlockStore.open(folder, level="kl-0.05")
    Runtime(engine, store, RuntimeOptions(context_cache_bytes=0)).warm(
        Runtime(engine, store, RuntimeOptions(context_cache_bytes=0)).request(ids, max_kl=0.05)
    )
    store.flush(30)
    return store


@both
def test_exact_requests_are_not_touched_by_lossy_blocks(coded: TorchEngine, tmp_path: Path) -> None:
    ids = random_tokens(coded, WHOLE + 5)
    expected = coded.prefill(coded.new_context(), ids)
    with lossy_store(coded, tmp_path / "s", ids) as store:
        held = kept(store)
        assert held["kl-0.05"] >= 10
        runtime = Runtime(coded, store, RuntimeOptions(context_cache_bytes=0))
        done = runtime.prefill(ids)
        assert np.abs(done.logits - expected).max() <= 1e-5 * np.abs(expected).max()
        assert done.usage.miss_reason == "level"
        assert not done.usage.approximate
        assert set(done.usage.tokens.by_level) <= {EXACT}
        runtime.release(done)
        # It computed them exactly and allows no less: that is what is held now.
        assert all(is_exact(level) for level in kept(store))
        again = runtime.prefill(ids)
        assert np.array_equal(again.logits, runtime.prefill(ids).logits)
        assert again.usage.cached_tokens == WHOLE
        assert not again.usage.miss_reason


@both
def test_a_request_that_allows_loss_uses_it_and_says_so(coded: TorchEngine, tmp_path: Path) -> None:
    ids = random_tokens(coded, WHOLE + 5)
    with lossy_store(coded, tmp_path / "s", ids) as store:
        runtime = Runtime(coded, store, RuntimeOptions(context_cache_bytes=0))
        done = runtime.prefill(runtime.request(ids, max_kl=0.05))
        assert done.usage.cached_tokens == WHOLE
        assert done.usage.approximate
        assert done.usage.tokens.by_level == {level: n * BLOCK for level, n in kept(store).items()}
        assert done.usage.tokens.by_source == {"disk": WHOLE}
        # kl-0.01 is stricter than what is held: computed.
        strict = runtime.prefill(runtime.request(ids, max_kl=0.01))
        assert strict.usage.miss_reason == "level"
        assert not strict.usage.approximate


@both
def test_what_stands_on_lossy_blocks_is_kept_as_such(coded: TorchEngine, tmp_path: Path) -> None:
    ids, more = random_tokens(coded, WHOLE), random_tokens(coded, 3 * BLOCK + 3, seed=2)
    longer = np.concatenate([ids, more])
    with lossy_store(coded, tmp_path / "s", ids) as store:
        before = kept(store)
        runtime = Runtime(coded, store, RuntimeOptions(context_cache_bytes=0))
        runtime.warm(runtime.request(longer, max_kl=0.05))
        after = kept(store)
        # The last of the old blocks is computed again if the model's state lies before it.
        assert after["approx"] >= 3
        assert after[EXACT] == before[EXACT]
        reused = runtime.prefill(runtime.request(longer, max_kl=0.05)).usage
        assert reused.tokens.by_level["approx"] >= 3 * BLOCK
        assert reused.approximate
        exact = runtime.prefill(longer)
        assert not exact.usage.approximate
        assert np.allclose(exact.logits, coded.prefill(coded.new_context(), longer), atol=1e-4)


@both
def test_contexts_in_memory_are_lent_to_those_who_allow_them(coded: TorchEngine, tmp_path: Path) -> None:
    ids = random_tokens(coded, WHOLE + 5)
    with lossy_store(coded, tmp_path / "s", ids) as store:
        runtime = Runtime(coded, store)
        done = runtime.prefill(runtime.request(ids, max_kl=0.05))
        clean = leading(done.context.levels, None)
        runtime.release(done)
        assert runtime.context_cache.match(coded, ids, 0, 0.05) > WHOLE - BLOCK
        assert runtime.context_cache.match(coded, ids, 0) <= clean
        assert not runtime.prefill(ids).usage.approximate
        lent = runtime.prefill(runtime.request(ids, max_kl=0.05)).usage
        assert lent.approximate
        # Where states are needed, memory reaches no further than the store does.
        assert lent.tokens.by_source == {"disk" if coded.space.needs_state else "device": lent.cached_tokens}
        assert sum(lent.tokens.by_level.values()) == lent.cached_tokens


@both
def test_blocks_whose_card_is_gone_are_computed_and_stay(coded: TorchEngine, tmp_path: Path) -> None:
    ids = random_tokens(coded, WHOLE + 5)
    with lossy_store(coded, tmp_path / "s", ids) as store:
        before = kept(store)
        codec = coded.codec
        coded.codec = Codec(coded.space, (codec.digest[::-1], codec.profile), profiles=ProfileStore(tmp_path / "empty"))
        done = Runtime(coded, store, RuntimeOptions(context_cache_bytes=0)).prefill(
            Runtime(coded, store, RuntimeOptions(context_cache_bytes=0)).request(ids, max_kl=0.05)
        )
        assert done.usage.miss_reason == "card"
        assert not done.usage.approximate
        assert kept(store) == before


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_a_stream_that_decodes_to_nothing_is_computed_and_dropped(coded: TorchEngine, tmp_path: Path) -> None:
    ids = random_tokens(coded, WHOLE + 5)
    expected = coded.prefill(coded.new_context(), ids)
    with lossy_store(coded, tmp_path / "s", ids) as store:
        runtime = Runtime(coded, store, RuntimeOptions(context_cache_bytes=0))
        key = runtime.keys(ids)[5]
        with store.read(0.05) as reader:
            view = reader.peek(key)
            assert view is not None
            writer = BlockWriter(
                view.layout, kind="block", space=view.header.space, key=key, parent=view.header.parent,
                end=view.header.end, tokens=view.tokens, level=view.header.level, rope_at=view.header.rope_at,
            )  # fmt: skip
            for plane in view.layout.planes:  # right checksums over wrong bytes
                writer.plane(plane.layer, plane.role)[:] = 7
            del view
        assert store.put(key, writer.seal(), replace=True, max_kl=0.05)
        store.flush(30)
        done = runtime.prefill(runtime.request(ids, max_kl=0.05))
        assert done.usage.cached_tokens == 5 * BLOCK
        assert done.usage.miss_reason == "corrupt"
        assert np.abs(done.logits - expected).max() < np.abs(expected).max()
        assert store.match(runtime.keys(ids), 0.05).blocks == 5


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_levels_without_a_card_are_refused(coded: TorchEngine, tmp_path: Path) -> None:
    runtime = Runtime(coded)
    runtime.check_max_kl(None)
    runtime.check_max_kl(0.05)
    runtime.check_max_kl(0.2)
    for max_kl, says in ((0.001, "the levels are .*kl-0.05"), (-1.0, "such as 0.01")):
        with pytest.raises(ConfigError, match=says):
            runtime.prefill(runtime.request([1, 2, 3], max_kl=max_kl))
    coded.codec = Codec(coded.space, profiles=ProfileStore(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="ctxreuse calibrate"):
        runtime.complete(runtime.request([1, 2, 3], max_kl=0.05), None)  # type: ignore[arg-type]


@both
def test_full_stores_serve_both_kinds(coded: TorchEngine, tmp_path: Path) -> None:
    """Contexts of one who allows loss shrink for the sake of new ones; those of one who does not stay exact."""
    mine, *theirs = (random_tokens(coded, WHOLE + 5, seed=n) for n in range(7))
    with BlockStore.open(tmp_path / "s", capacity=1 << 20) as store:
        runtime = Runtime(coded, store, RuntimeOptions(context_cache_bytes=0))
        runtime.warm(mine)
        store.flush(30)
        size = store.stats().nbytes
    # By recency: what the adaptive policy values most after a dozen requests depends on how long they took.
    with BlockStore.open(tmp_path / "s", capacity=3 * size, policy="lru") as store:
        runtime = Runtime(coded, store, RuntimeOptions(context_cache_bytes=0))
        for ids in theirs:
            runtime.warm(mine)
            runtime.warm(runtime.request(ids, max_kl=0.05))
        assert kept(store)["kl-0.05"] > 0
        usage = runtime.prefill(mine).usage
        assert not usage.approximate
        assert usage.cached_tokens >= WHOLE - 2 * BLOCK
        reused = [runtime.prefill(runtime.request(ids, max_kl=0.05)).usage.cached_tokens for ids in theirs]
        # Two contexts beside mine would fit as they are.
        assert sum(n >= WHOLE - 2 * BLOCK for n in reused) > 2
