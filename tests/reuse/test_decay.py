"""Reuse does not wear off: hundreds of prompts over a pool of documents, in a store that holds a part of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ctxreuse.store import BlockStore, TieredStore, open_store

SYSTEM, DOCUMENTS, PER_PROMPT = 1, 40, 4


def sizes(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(100, 400, DOCUMENTS).tolist()


def rates(world, prompt, queries: int, seed: int = 0, max_kl: float | None = 0.05) -> list[float]:
    """Of each prompt the share of its documents' tokens that was reused, from wherever."""
    return [share for share, _ in shares(world, prompt, queries, seed, max_kl)]


def shares(world, prompt, queries: int, seed: int = 0, max_kl: float | None = 0.05) -> list[tuple[float, int]]:
    """As `rates`, each with the blocks that the prompt had beyond its stored prefix, and offered to the store."""
    rng = np.random.default_rng(seed)
    size, found = sizes(seed), []
    for query in range(queries):
        chosen = rng.choice(DOCUMENTS, PER_PROMPT, replace=False)
        parts = [(SYSTEM, 50), *((100 + int(i), size[i]) for i in chosen), (10_000 + query, 20)]
        tokens, ends = prompt(*parts)
        done = world.ask(tokens, ends, max_kl)
        fresh = (len(tokens) - done.prefix) // world.space.block_tokens
        found.append(((done.prefix + done.moved) / (len(tokens) - 20), fresh))
    return found


def window(found: Sequence[float], start: int, end: int) -> float:
    return float(np.mean(found[start:end]))


def test_in_a_store_that_holds_all_everything_is_reused_for_ever(new_world, prompt) -> None:
    found = rates(new_world(open_store(None)), prompt, 150)
    assert window(found, 50, 100) > 0.97
    assert window(found, 100, 150) > 0.97


def test_under_eviction_it_stays_where_it_was_once_warm(tmp_path, new_world, prompt) -> None:
    """Room for about half of the pool, as blocks of 4 KiB pages."""
    room = int(0.5 * sum(sizes(0))) // 16 * 4096
    # Without a clock, so that what is evicted does not depend on how long prompts take here.
    disk = BlockStore.open(tmp_path, capacity=room, clock=lambda: 0.0)
    world = new_world(TieredStore(0, disk))
    found, fresh = zip(*shares(world, prompt, 300))
    # Whether a document is held is a coin for each: means over 100 prompts of 4 lie within 0.03 of each other.
    early, late = window(found, 100, 200), window(found, 200, 300)
    assert late > early - 0.05
    assert late > 0.35
    # Some are evicted, others declined by a policy that would evict them first.
    stats = world.store.stats()
    assert sum(fresh) - stats.blocks > 10_000
    assert stats.evicted > 1000
    assert len(world.store.chunks) < 1000


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_what_is_only_ever_moved_stays(tmp_path, new_world, prompt, policy: str) -> None:
    """A document in every third prompt, behind a new beginning each time; all else never comes again."""
    disk = BlockStore.open(tmp_path, capacity=200 * 4096, policy=policy)
    world = new_world(TieredStore(0, disk))
    world.ask(*prompt((SYSTEM, 50), (100, 400), (2, 20)))
    for query in range(90):
        again = query % 3 == 0
        tokens, ends = prompt((1000 + query, 60), (100 if again else 7000 + query, 400), (3000 + query, 300))
        assert world.ask(tokens, ends).moved == (400 if again else 0), query
    assert world.store.stats().evicted > 1000
