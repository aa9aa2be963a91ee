"""Eviction policies at a million blocks: the cost of a step and the memory of a block, alone and adaptive."""

from __future__ import annotations

import gc
import hashlib
import os
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.store.policy import DEFAULT_EXPERTS, NATIVE, AdaptivePolicy, Facts, NativeResidentSet, NativeShadow

__all__ = ["run"]

#: Blocks of a context, tokens and bytes of a block, and how often a context that was seen comes back.
_LENGTH, _TOKENS, _NBYTES, _RETURN = 24, 64, 1 << 20, 0.6
_STEP_BAR, _MEMORY_BAR = 5.0, 200
#: Seconds from one prompt to the next.
_PAUSE = 0.5


class _Cache(Protocol):
    def held(self, path: list[bytes]) -> int: ...

    def request(self, path: list[bytes], held: int) -> None: ...


class _Plain:
    """The least that an LRU can be: one ordered dictionary of keys."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def held(self, path: list[bytes]) -> int:
        return 0

    def request(self, path: list[bytes], held: int) -> None:
        keys = self._held
        for key in reversed(path):
            keys[key] = None
            keys.move_to_end(key)
        while len(keys) > self._blocks:
            keys.popitem(last=False)


class _Alone:
    def __init__(self, name: str, blocks: int) -> None:
        self.shadow: NativeShadow[bytes] = NativeShadow(name, blocks * _NBYTES, alpha=0.5)
        self._now = 0.0

    def held(self, path: list[bytes]) -> int:
        return 0

    def request(self, path: list[bytes], held: int) -> None:
        self._now += _PAUSE
        self.shadow.request(path, _NBYTES, _TOKENS, self._now)


class _Followed:
    """What the store does with its policy for a prompt: tell it, use what is held, take in the rest, make room."""

    def __init__(self, blocks: int) -> None:
        capacity = blocks * _NBYTES
        shadows: list[NativeShadow[bytes]] = []
        for name in DEFAULT_EXPERTS:
            shadows.append(NativeShadow(name, capacity, beside=shadows[0] if shadows else None))
        self.residents: NativeResidentSet[bytes] = NativeResidentSet()
        self.policy: AdaptivePolicy[bytes] = AdaptivePolicy(shadows, capacity, Random(0), self.residents)
        self._blocks, self._now = blocks, 0.0

    def held(self, path: list[bytes]) -> int:
        """The store knows by its tree."""
        return self.residents.match(path)

    def request(self, path: list[bytes], held: int) -> None:
        policy = self.policy
        self._now = now = self._now + _PAUSE
        policy.on_lookup(path, [_NBYTES] * len(path), [_TOKENS] * len(path), now)
        if held:
            policy.access(path[:held], now)
        for i in range(held, len(path)):
            policy.insert(Facts(path[i], path[i - 1] if i else None, _TOKENS, (i + 1) * _TOKENS, _NBYTES), now)
        policy.access(path, now)
        over = len(policy) - self._blocks
        if over > 0:
            for key in _first(policy.order(), over, frozenset(path)):
                policy.remove(key, now)

    @property
    def memory(self) -> int:
        """Bytes of all arenas."""
        return self.residents.memory + sum(
            expert.memory for expert in self.policy.experts if isinstance(expert, NativeShadow)
        )


def _first(order: Iterator[bytes], count: int, spared: frozenset[bytes]) -> list[bytes]:
    found: list[bytes] = []
    for key in order:
        if key not in spared:
            found.append(key)
            if len(found) == count:
                break
    return found


def _paths(count: int, seed: int, first: int) -> Iterator[list[bytes]]:
    """Contexts numbered from ``first`` on, among which earlier ones return, the recent ones more often."""
    rng, fresh = Random(seed), first
    for _ in range(count):
        if fresh > first and rng.random() < _RETURN:
            context = max(0, fresh - int(rng.paretovariate(0.35)))
        else:
            context, fresh = fresh, fresh + 1
        yield [hashlib.sha256(b"%d %d" % (context, i)).digest() for i in range(_LENGTH)]


def _fill(cache: _Cache, blocks: int) -> int:
    """Fill, and go on until ghosts are as many as they get, with contexts that come once; returns the next's number."""
    contexts = -(-blocks * 3 // (2 * _LENGTH))
    for context in range(contexts):
        path = [hashlib.sha256(b"%d %d" % (context, i)).digest() for i in range(_LENGTH)]
        cache.request(path, cache.held(path))
    return contexts


def _step(caches: dict[str, _Cache], first: int, requests: int) -> dict[str, float]:
    """Microseconds of one thread's time a block of a request, the caches taking turns; the best of five rounds.

    The best, for what else runs on a machine only ever adds to it.
    """
    best = dict.fromkeys(caches, float("inf"))
    for turn in range(5):
        paths = list(_paths(requests, turn, first + turn * requests))
        for name, cache in caches.items():
            spent = 0.0
            for path in paths:
                held = cache.held(path)
                began = time.thread_time()
                cache.request(path, held)
                spent += time.thread_time() - began
            best[name] = min(best[name], spent / (requests * _LENGTH) * 1e6)
    return best


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _filled(make: Callable[[], _Cache], blocks: int) -> tuple[_Cache, float]:
    """A full cache, and the bytes a block by which this process grew."""
    gc.collect()
    before = _resident()
    cache = make()
    _fill(cache, blocks)
    gc.collect()
    return cache, (_resident() - before) / blocks


def _plain_bytes(blocks: int) -> float:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        plain = _Plain(blocks)
        _fill(plain, blocks)
        return (tracemalloc.get_traced_memory()[0] - before) / blocks
    finally:
        tracemalloc.stop()


def run(options: Options) -> Sequence[Figure]:
    """Contexts of 24 blocks of 64 tokens; three in five requests are for one that was there before."""
    blocks, requests = options.pick(20_000, 1_000_000), options.pick(100, 2_000)
    options.step(f"fill the adaptive policy with {blocks:,} blocks")
    adaptive, grown = _filled(lambda: _Followed(blocks), blocks)
    assert isinstance(adaptive, _Followed)
    alone: dict[str, _Alone] = {}
    for name in NATIVE:
        options.step(f"fill {name}")
        alone[name] = _Alone(name, blocks)
        _fill(alone[name], blocks)
    options.step("fill a plain LRU")
    plain = _Plain(blocks)
    first = _fill(plain, blocks)
    options.step("serve requests")
    caches: dict[str, _Cache] = {"adaptive": adaptive, "plain": plain, **alone}
    spent = _step(caches, first, requests)
    plain_memory = _plain_bytes(options.pick(20_000, 200_000))
    against = "baseline: one OrderedDict of keys, the least that an LRU can be"
    figures = [
        Figure(
            metric="adaptive_step",
            value=spent["adaptive"],
            unit="us/block",
            baseline=spent["plain"],
            better="lower",
            bar=_STEP_BAR,
            note=f"{', '.join(DEFAULT_EXPERTS)}, the guard and the real cache; {against}",
        ),
        Figure(
            metric="adaptive_memory",
            value=adaptive.memory / len(adaptive.policy),
            unit="bytes/block",
            baseline=plain_memory,
            better="lower",
            # A small cache has more ghosts than blocks.
            bar=None if options.quick else _MEMORY_BAR,
            note=f"all arenas, spare room included; {against}",
        ),
        Figure(
            metric="adaptive_growth", value=grown, unit="bytes/block", better="lower", note="of the process, resident"
        ),
    ]
    for name, one in alone.items():
        step, memory = spent[name], one.shadow.memory / len(one.shadow)
        figures.append(
            Figure(metric=f"{name}_step", value=step, unit="us/block", baseline=spent["plain"], better="lower")
        )
        figures.append(
            Figure(metric=f"{name}_memory", value=memory, unit="bytes/block", baseline=plain_memory, better="lower")
        )
    return figures
