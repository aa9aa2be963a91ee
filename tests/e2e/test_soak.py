"""Thousands of requests with eviction, faults, forks and threads: the tokens stay right, and nothing grows."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ctxreuse_agents import Memory

from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.errors import ContextTooLongError, TokenRangeError
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import BlockStore, TieredStore
from ctxreuse.store.removals import RemovalLog
from ctxreuse.why import RequestLog
from support.tiny_text import tiny_engine
from support.waiting import patient

pytestmark = pytest.mark.slow

# What the round that leaves least behind may leave: some caches of libraries still fill in one round or another.
_SLACK_BYTES = 32 << 10
# What the allocator and pages of mapped files may add; a context that is never given back is 64 KB.
_SLACK_RSS = 24 << 20
# Rounds after which all that is bounded is full.
_WARM = 5


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of late is bounded, but by more than a test could fill: smaller bounds."""
    monkeypatch.setattr("ctxreuse.runtime.paused._MOST", 16)
    monkeypatch.setattr("ctxreuse.runtime.paused._TYPES", 64)
    monkeypatch.setattr("ctxreuse.why.log._SEEN", 64)
    monkeypatch.setattr("ctxreuse.runtime.chunks.backfill._KEPT", 64)
    for book in (RequestLog, RemovalLog):
        monkeypatch.setitem(book.__init__.__kwdefaults__, "most", 64)


@pytest.fixture(scope="module")
def engine() -> Any:
    return tiny_engine(positions=256, block_tokens=16)


def held() -> tuple[int, int]:
    """Threads and open files of this process."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def resident() -> int:
    """Bytes of this process in memory, those that no Python object knows of included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def assert_flat(work: Callable[[int], None], figures: Callable[[], tuple[int, ...]], rounds: int = 3) -> None:
    """After a warm-up, more rounds of ``work`` leave the Python heap and ``figures`` as they were.

    What leaks does so in each round; a cache that fills, or a book on its way to its bound, does not.
    """
    tracemalloc.start()  # before what stays is made: what takes its place later is no growth
    try:
        for n in range(_WARM):
            work(-n)
        gc.collect()
        before, rss, heaps = figures(), resident(), [tracemalloc.get_traced_memory()[0]]
        for n in range(rounds):
            work(1 + n)
            gc.collect()
            heaps.append(tracemalloc.get_traced_memory()[0])
        after, grown = figures(), [late - early for early, late in pairwise(heaps)]
    finally:
        tracemalloc.stop()
    assert min(grown) < _SLACK_BYTES, f"the heap grew by {grown} bytes"
    assert resident() - rss < _SLACK_RSS, f"the process grew by {resident() - rss} bytes"
    assert all(late <= early for early, late in zip(before, after)), f"{before} became {after}"


@pytest.mark.usefixtures("few")
def test_requests_leave_nothing_behind(engine: Any, tmp_path: Path) -> None:
    """Overlapping prompts over a store and a pool too small for them, with refused, left, forgotten and bad ones."""
    draw = np.random.default_rng(0)
    roots = [draw.integers(3, 250, 100).astype("<i4") for _ in range(6)]
    with TieredStore(40_000, BlockStore.open(tmp_path, capacity=120_000)) as store:
        runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=1 << 18))

        def request(chance: random.Random) -> None:
            ids = np.append(roots[chance.randrange(6)][: chance.randrange(100)], chance.randrange(250)).astype("<i4")
            keys, act = runtime.keys(ids), chance.random()
            if act < 0.1:
                runtime.forget(ids)
            elif act < 0.2 and keys:
                store.drop(chance.choice(keys), "corrupt")
            elif act < 0.3:
                with pytest.raises(TokenRangeError):
                    runtime.prefill(np.append(ids, 999))
            else:
                short = SamplingParams(max_tokens=chance.randrange(1, 4), ignore_eos=True)
                with contextlib.closing(runtime.complete(ids, short)) as answer:
                    next(answer)

        def work(n: int) -> None:
            chance = random.Random(n)
            for _ in range(300):
                request(chance)
            store.flush()
            store.check()
            runtime.context_cache.check()

        def figures() -> tuple[int, ...]:
            stats = store.stats()
            assert stats.nbytes <= stats.capacity
            assert runtime.context_cache.nbytes <= runtime.context_cache.capacity
            return (*held(), stats.queued, max(stats.file_bytes, 4 * 120_000))

        assert_flat(work, figures)
        assert store.stats().evicted > 100


@pytest.mark.usefixtures("few")
def test_sessions_leave_nothing_behind(engine: Any, tmp_path: Path) -> None:
    """Asks that are read, left or forgotten, forks, rollbacks and deletions."""
    with Memory.open(tmp_path / "m", engine, capacity=300_000) as memory:

        def ask(chance: random.Random) -> None:
            session = memory.session(f"agent {chance.randrange(4)}")
            try:
                answer = session.ask("Why?", max_tokens=chance.randrange(1, 4), ignore_eos=True)
            except ContextTooLongError:
                memory.delete(session)
                return
            act = chance.random()
            if act < 0.6:
                assert answer.text is not None
            elif act < 0.8:
                answer.close()
            del answer
            if act < 0.1:
                memory.delete(session.fork())
            elif act < 0.2:
                session.rollback()
                session.evict()

        def work(n: int) -> None:
            chance = random.Random(n)
            for _ in range(100):
                ask(chance)
            for session in memory.sessions():
                memory.delete(session)
            memory.gc()
            memory.flush()
            memory.check()

        def figures() -> tuple[int, ...]:
            stats = memory.stats()
            return (*held(), stats.text.turns, stats.text.tokens, stats.text.sessions)

        assert_flat(work, figures)
        assert memory.stats().text.turns == 0


def test_many_threads_on_one_runtime(engine: Any, tmp_path: Path) -> None:
    """Eight threads with overlapping prompts while blocks are dropped and forgotten and the store is closed: each
    answer is that of an engine without a store, and nothing but the answers' own end is raised."""
    draw = np.random.default_rng(1)
    root = draw.integers(3, 250, 60).astype("<i4")
    prompts = [np.append(root[:n], draw.integers(3, 250, 30)).astype("<i4") for n in (5, 16, 33, 48, 60)]
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = []
    for ids in prompts:
        plain = Runtime(engine, None, RuntimeOptions(context_cache_bytes=0)).complete(ids, greedy)
        plain.drain()
        expected.append(plain.tokens)
    store = TieredStore(60_000, BlockStore.open(tmp_path, capacity=120_000))
    runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=1 << 19))
    begun: list[Any] = []
    wrong: list[object] = []
    half = threading.Barrier(9)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for step in range(24):
                if step == 12:
                    half.wait(patient(60))  # the store is closed while all go on
                n = chance.randrange(len(prompts))
                answer = runtime.complete(prompts[n], greedy)
                begun.append(answer)
                if chance.random() < 0.3:
                    chance.choice(begun).close()
                answer.drain()
                if answer.tokens != expected[n][: len(answer.tokens)] or answer.finish not in ("length", "cancelled"):
                    wrong.append((answer.finish, answer.tokens, expected[n]))
                act, keys = chance.random(), runtime.keys(prompts[n])
                if act < 0.1:
                    runtime.forget(prompts[n])
                elif act < 0.3:
                    store.drop(chance.choice(keys), "corrupt")
        except BaseException as error:
            wrong.append(error)
            half.abort()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    half.wait(patient(60))
    store.close()
    for thread in threads:
        thread.join(patient(60))
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)
    runtime.context_cache.check()
