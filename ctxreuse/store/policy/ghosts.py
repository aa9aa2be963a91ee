"""Finding a policy's parameter by experiment: small ghost caches with one value each serve a sample of the requests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Generic

from ctxreuse.store.policy.base import K, RecomputeCost

__all__ = ["ALPHAS", "GhostScores"]

#: The values that are tried, as published.
ALPHAS = tuple(step / 10 for step in range(21))
#: Requests of the experiment for each request before the first eviction, as published; at most so many.
_WINDOW, _LONGEST = 5, 5_000
#: Blocks of each ghost cache, about: a sample of whole contexts, by their first block.
_BLOCKS = 512


class GhostScores(Generic[K]):
    """One ghost cache for each of ``ALPHAS``, from the first eviction on, scored by the seconds of prefill saved.

    The published way is to replay the window from a snapshot for each value; caches that are scaled down (Waldspurger
    et al., ATC 2017) find the same without keeping window or snapshot. They start empty, and only the second half of
    the window counts.
    """

    def __init__(self, make: Callable[[float, int], Any], cost: RecomputeCost) -> None:
        """``make(alpha, capacity)``: an empty shadow of that policy."""
        self._make, self._cost = make, cost
        self._seen = self._window = 0
        self._share = 1
        self._caches: list[Any] = []
        self._saved: list[float] = []

    def start(self, nbytes: int, blocks: int) -> None:
        """Begin, at the first eviction from a cache of so many bytes and blocks; later calls do nothing."""
        if self._caches:
            return
        self._share = max(1, round(blocks / _BLOCKS))
        self._window = min(_WINDOW * max(self._seen, 1), _LONGEST)
        self._caches = [self._make(alpha, max(1, nbytes // self._share)) for alpha in ALPHAS]
        self._saved = [0.0] * len(ALPHAS)
        self._seen = 0

    def request(self, path: Sequence[K], sizes: Sequence[int], tokens: Sequence[int], now: float) -> float | None:
        """Serve a request; returns the best value once the window is over."""
        self._seen += 1
        if not self._caches:
            return None
        if path and _draw(path[0]) % self._share == 0:
            for i, cache in enumerate(self._caches):
                served = cache.request(path, sizes, tokens, now)
                if 2 * self._seen > self._window:
                    self._saved[i] += self._cost(0, served.tokens)
        if self._seen < self._window:
            return None
        return ALPHAS[max(range(len(ALPHAS)), key=lambda i: (self._saved[i], -i))]


def _draw(key: object) -> int:
    """Hash a key to a number, the same in each process."""
    raw = key if isinstance(key, bytes) else repr(key).encode()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")
