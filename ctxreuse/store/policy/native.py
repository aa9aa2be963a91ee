"""Eviction policies in native arenas: shadows, single policies, and the set of blocks that a cache really holds."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Generic

from ctxreuse.errors import ConfigError
from ctxreuse.kernels.dispatch import native as _native
from ctxreuse.store.policy.base import Facts, K, Policy, StoreContents, prefill_line
from ctxreuse.store.policy.ghosts import GhostScores
from ctxreuse.store.policy.hazard_counts import AGES, pack_counts, unpack_counts
from ctxreuse.store.policy.pause_counts import pack_pauses, unpack_pauses
from ctxreuse.store.policy.shadow import Served, ids_of

__all__ = ["NATIVE", "NativePolicy", "NativeResidentSet", "NativeShadow", "counts_of"]

#: Native policies, in the order of the native core.
NATIVE: Final = ("lru", "lfu", "s3fifo", "arc", "gdsf", "hazard", "pauses")

_ID, _KEY, _MOST = 8, 32, (1 << 32) - 1
#: A class and its counts by age.
_COUNTS = f"={1 + 2 * AGES}d"
#: Keys of an order that are listed at first; then eight times as many, and so on.
_CHUNK = 64


def _one(key: Any) -> tuple[bytes, int]:
    if isinstance(key, bytes):
        return key, _KEY
    return int(key).to_bytes(_ID, "little"), _ID


def counts_of(values: Sequence[int] | int, n: int) -> array[int]:
    """Return one number for each of ``n`` blocks, as the native core takes them; at most 4 Gi each."""
    if isinstance(values, array):
        return values
    if isinstance(values, int):
        return array("I", [min(values, _MOST)]) * n
    try:
        return array("I", values)
    except OverflowError:
        return array("I", [min(value, _MOST) for value in values])


class NativeShadow(Generic[K]):
    """A cache of ``capacity`` bytes without contents under a native policy; see `Shadow`.

    Keys are numbers below 2**64, or 32 bytes, of which 8 tell them apart here: a collision, which takes keys made for
    it, costs a wrong guess. Evicted and ordered blocks are named by 8-byte ids.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        *,
        per_token: float = 1e-3,
        per_pair: float = 1e-7,
        alpha: float | None = None,
        ghosts: tuple[int, float] | None = None,
        beside: NativeShadow[K] | None = None,
    ) -> None:
        """Create an empty shadow.

        Args:
            name: one of `NATIVE`.
            capacity: bytes.
            per_token: seconds of prefill a token, for ``gdsf``.
            per_pair: seconds a pair of tokens, for ``gdsf``.
            alpha: weight of efficiency under ``gdsf``; None: found by `GhostScores`.
            ghosts: evicted blocks that ``hazard`` remembers at least, and for each cached block.
            beside: a shadow of the same requests; the two then share what is known of a block, which
                saves memory. A block has one size for both: that at which the first took it in.

        Raises:
            ConfigError: another name.
            ValueError: ghosts for a policy that remembers none.
        """
        if name not in NATIVE:
            raise ConfigError(f"no native policy {name!r}", fix=f"Choose one of: {', '.join(NATIVE)}")
        self.name, self.capacity = name, capacity
        #: See `Policy.has_admission`.
        self.has_admission = name in ("hazard", "pauses")
        self._line, self.alpha = (per_token, per_pair), alpha or 0.0
        other = None if beside is None else beside.arena
        self.arena: object = _native.shadow_new(NATIVE.index(name), capacity, per_token, per_pair, self.alpha, other)
        self._scores: GhostScores[K] | None = None
        if ghosts is not None:
            _native.shadow_remember(self.arena, *ghosts)
        if name == "gdsf" and alpha is None:
            self._scores = GhostScores(self._trial, lambda start, tokens: prefill_line(*self._line)(start, tokens))

    def _trial(self, alpha: float, capacity: int) -> NativeShadow[K]:
        return NativeShadow("gdsf", capacity, per_token=self._line[0], per_pair=self._line[1], alpha=alpha)

    @property
    def tuned(self) -> bool:
        """False while ``alpha`` is still to be found."""
        return self._scores is None

    def __len__(self) -> int:
        return _native.shadow_figures(self.arena)[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that it stands for."""
        return _native.shadow_figures(self.arena)[1]

    @property
    def memory(self) -> int:
        """Bytes that it takes itself, with its share of what it has in common with others."""
        return _native.shadow_figures(self.arena)[2]

    def __contains__(self, key: K) -> bool:
        return _native.shadow_match(self.arena, *_one(key)) > 0

    def match(self, path: Sequence[K]) -> int:
        """See `Shadow.match`."""
        return _native.shadow_match(self.arena, *ids_of(path))

    def request(
        self, path: Sequence[K], sizes: Sequence[int] | int, tokens: Sequence[int] | int, now: float
    ) -> Served[Any]:
        """See `Shadow.request`."""
        size, count = counts_of(sizes, len(path)), counts_of(tokens, len(path))
        self._tune(path, size, count, now)
        if not len(path):
            return Served(0, 0, path, memoryview(b"").cast("Q"))
        scores = self._scores
        cached, nbytes, _ = _native.shadow_figures(self.arena) if scores is not None else (0, 0, 0)
        blocks, evicted = _native.shadow_request(self.arena, *ids_of(path), size, count, now)
        if evicted and scores is not None:
            scores.start(nbytes + sum(size[blocks:]), cached + len(path) - blocks)
        return Served(blocks, sum(count[:blocks]), path[blocks:], memoryview(evicted).cast("Q"))

    def _tune(self, path: Sequence[K], sizes: Sequence[int], tokens: Sequence[int], now: float) -> None:
        if self._scores is None:
            return
        alpha = self._scores.request(path, sizes, tokens, now)
        if alpha is not None:
            self.alpha, self._scores = alpha, None
            _native.shadow_tune(self.arena, *self._line, alpha)

    def insert(self, facts: Facts[K]) -> None:
        """Add a block whose parent is cached, without evicting any."""
        key, stride = _one(facts.key)
        parent = None if facts.parent is None else _one(facts.parent)[0]
        _native.shadow_hold(self.arena, key, stride, parent, facts.nbytes, facts.start, facts.tokens)

    def access(self, path: Sequence[K], sizes: Sequence[int], tokens: Sequence[int], now: float) -> None:
        """Count one use of a path of cached blocks, without evicting any."""
        _native.shadow_use(self.arena, *ids_of(path), now)
        self._tune(path, sizes, tokens, now)

    def fill(self, facts: Sequence[Facts[K]], uses: Sequence[Sequence[K]], now: float) -> Sequence[Any]:
        """See `Shadow.fill`."""
        for one in facts:
            self.insert(one)
        for path in uses:
            _native.shadow_use(self.arena, *ids_of(path), now)
        return memoryview(_native.shadow_fit(self.arena)).cast("Q")

    def fill_stored(self, stored: StoreContents, now: float) -> Sequence[Any]:
        """See `Policy.fill_stored`; as `fill`, for an empty shadow and keys that are ``unique``."""
        _native.shadow_fill(self.arena, stored.tree, stored.order, now)
        return memoryview(_native.shadow_fit(self.arena)).cast("Q")

    def drop(self, key: K) -> bool:
        """Remove one leaf; False if it is not cached, or no leaf."""
        if self._scores is not None:
            cached, nbytes, _ = _native.shadow_figures(self.arena)
            self._scores.start(nbytes, cached)
        return _native.shadow_drop(self.arena, *_one(key))

    def remove(self, key: K, now: float) -> None:
        """See `Shadow.remove`; also raises KeyError if the block is no leaf."""
        if not self.drop(key):
            raise KeyError(key)

    def set_recompute_cost(self, per_token: float, per_pair: float) -> None:
        """See `Policy.set_recompute_cost`."""
        self._line = per_token, per_pair
        _native.shadow_tune(self.arena, per_token, per_pair, self.alpha)

    def on_pause(self, tip: K, label: int, now: float) -> None:
        """See `Policy.on_pause`; only ``hazard`` and ``pauses`` mind it."""
        _native.shadow_mark(self.arena, *_one(tip), label & 0xFF, now)

    def on_lookup(self, path: Sequence[K], now: float) -> None:
        """See `Policy.on_lookup`; `request` calls it itself."""
        _native.shadow_lookup(self.arena, *ids_of(path), now)

    def batches(self) -> Iterator[bytes]:
        """Iterate over the order of eviction as ids, 8 bytes each, in ever larger pieces."""
        done, limit = 0, _CHUNK
        while True:
            ids = _native.shadow_order(self.arena, limit)
            yield ids[done * _ID :]
            if len(ids) < limit * _ID:
                return
            done, limit = limit, limit * 8

    def order(self) -> Iterator[Any]:
        """Iterate over ids of the cached blocks, first to go first. Valid until the next change."""
        for ids in self.batches():
            yield from memoryview(ids).cast("Q")

    def beyond(self, other: Any) -> int:
        """See `Shadow.beyond`; if the other is not native, as if all blocks had the same size."""
        if other.arena is not None:
            return _native.shadow_beyond(self.arena, other.arena)
        return sum(id not in other for id in self.order()) * self.nbytes // max(len(self), 1)

    def dump(self) -> bytes:
        """See `Policy.dump`; only ``hazard`` and ``pauses`` learn."""
        if self.name == "pauses":
            return pack_pauses(_native.shadow_learnt(self.arena))
        if self.name != "hazard":
            return b""
        rows = struct.iter_unpack(_COUNTS, _native.shadow_learnt(self.arena))
        return pack_counts((int(row[0]), row[1 : 1 + AGES], row[1 + AGES :]) for row in rows)

    def load(self, raw: bytes) -> bool:
        """See `Policy.load`."""
        taught = self._rows_of(raw)
        if taught:
            _native.shadow_teach(self.arena, array("d", taught))
        return taught is not None

    def _rows_of(self, raw: bytes) -> bytes | None:
        """Rows of what was learnt, as the native core takes them."""
        if self.name == "pauses":
            return unpack_pauses(raw)
        rows = unpack_counts(raw) if self.name == "hazard" else None
        if rows is None:
            return None
        taught, none = array("d"), [0.0] * AGES
        for which, used, seen in rows:
            taught.extend((which, *(*used, *none)[:AGES], *(*seen, *none)[:AGES]))
        return taught.tobytes()

    def check(self) -> None:
        """Raise AssertionError where the arena is inconsistent. O(blocks)."""
        wrong = _native.shadow_check(self.arena)
        assert wrong is None, wrong
        ids = list(self.order())
        assert len(ids) == len(set(ids)) == len(self), "the policy orders other blocks"


class NativeResidentSet(Generic[K]):
    """The blocks that a cache really holds, by full key of 8 or 32 bytes, and which of them are orphans.

    An orphan is cached, but not by the expert that the cache follows. Orphans go first, in the order in which the
    expert gave them up; before them what it never took in. Not thread-safe. O(1) a block.
    """

    def __init__(self) -> None:
        self._arena = _native.residents_new()
        self._numbers = False

    def __len__(self) -> int:
        return _native.residents_figures(self._arena)[0]

    @property
    def tokens(self) -> int:
        """Tokens of all blocks."""
        return _native.residents_figures(self._arena)[1]

    @property
    def memory(self) -> int:
        """Bytes that it takes itself."""
        return _native.residents_figures(self._arena)[3]

    def __contains__(self, key: K) -> bool:
        return self.match((key,)) > 0

    def insert(self, facts: Facts[K], followed: bool) -> None:
        """Add a block; ``followed``: the expert has it too."""
        key, stride = _one(facts.key)
        self._numbers = stride == _ID
        _native.residents_hold(self._arena, key, stride, facts.nbytes, facts.tokens, followed)

    def fill_stored(self, stored: StoreContents) -> None:
        """Add what a store holds, which the expert has too; see `Policy.fill_stored`."""
        _native.residents_fill(self._arena, stored.tree)

    def remove(self, key: K) -> None:
        """Remove a block. Raises KeyError if it is not cached."""
        if not _native.residents_drop(self._arena, *_one(key)):
            raise KeyError(key)

    def sizes(self, path: Sequence[K]) -> tuple[Sequence[int], Sequence[int]]:
        """Return the bytes and tokens of cached blocks. Raises KeyError if one is not."""
        cached, sizes, tokens = _native.residents_match(self._arena, *ids_of(path))
        if cached < len(path):
            raise KeyError(path[cached])
        return memoryview(sizes).cast("I"), memoryview(tokens).cast("I")

    def match(self, path: Sequence[K]) -> int:
        """Return the number of leading blocks of ``path`` that are cached."""
        return _native.residents_match(self._arena, *ids_of(path))[0]

    def on_insert(self, keys: Iterable[Any]) -> None:
        """Note that the expert took these in: they are no orphans. Keys or ids."""
        _native.residents_moved(self._arena, *ids_of(list(keys)), False)

    def on_evict(self, keys: Iterable[Any]) -> None:
        """Note that the expert gave these up: they are orphans if cached. Keys or ids."""
        _native.residents_moved(self._arena, *ids_of(list(keys)), True)

    def follow(self, old: Any, new: Any) -> None:
        """Follow the expert ``new`` after ``old``: orphans are the blocks that ``new`` does not cache. O(blocks)."""
        if old.arena is not None and new.arena is not None:
            _native.residents_follow(self._arena, old.arena, new.arena)
            return
        orphans = _native.residents_orphans(self._arena, len(self))
        self.on_insert(id for id in memoryview(b"".join(key[:_ID] for key in orphans)).cast("Q") if id in new)
        for ids in old.batches():
            self.on_evict(id for id in memoryview(ids).cast("Q") if id not in new)

    def order(self, followed: Any) -> Iterator[Any]:
        """Iterate over all cached keys: orphans, then the rest in the expert's order."""
        done, limit = 0, _CHUNK
        while True:
            orphans = _native.residents_orphans(self._arena, limit)
            yield from self._keys(orphans[done:])
            if len(orphans) < limit:
                break
            done, limit = limit, limit * 8
        for ids in followed.batches():
            yield from self._keys(_native.residents_keys(self._arena, ids, _ID))

    def _keys(self, raw: list[bytes]) -> Iterable[Any]:
        return (int.from_bytes(key[:_ID], "little") for key in raw) if self._numbers else raw

    def check(self, followed: Any) -> None:
        """Raise AssertionError where an orphan is the expert's. O(blocks)."""
        cached, _, orphans, _ = _native.residents_figures(self._arena)
        named = list(self.order(followed))
        assert len(named) == len(set(named)) == cached, "the order names other keys"
        assert all(key not in followed for key in named[:orphans]), "the expert has an orphan"


class NativePolicy(Policy[K]):
    """One of the native policies as the policy of a cache: a shadow that never evicts by itself, and the full keys."""

    def __init__(
        self, name: str, *, per_token: float = 1e-3, per_pair: float = 1e-7, alpha: float | None = None
    ) -> None:
        """Create an empty policy; see `NativeShadow`."""
        self._shadow: NativeShadow[K] = NativeShadow(
            name, (1 << 63) - 1, per_token=per_token, per_pair=per_pair, alpha=alpha
        )
        self.name, self.has_admission = name, self._shadow.has_admission
        self.wants_lookups = name == "pauses"
        self.evicts_one_at_a_time = name in ("s3fifo", "arc", "gdsf")
        self._residents: NativeResidentSet[K] = NativeResidentSet()
        #: Removed before their children, which a store does when it drops a block while evicting one below it.
        self._early: dict[K, None] = {}

    @property
    def memory(self) -> int:
        """Bytes that it takes itself."""
        return self._shadow.memory + self._residents.memory

    def __len__(self) -> int:
        return len(self._residents)

    def insert(self, facts: Facts[K], now: float) -> None:
        self._early.pop(facts.key, None)
        self._shadow.insert(facts)
        self._residents.insert(facts, followed=True)

    def access(self, path: Sequence[K], now: float) -> None:
        if path:
            sizes, tokens = ((), ()) if self._shadow.tuned else self._residents.sizes(path)
            self._shadow.access(path, sizes, tokens, now)

    def on_lookup(self, path: Sequence[K], sizes: Sequence[int], tokens: Sequence[int], now: float) -> None:
        self._shadow.on_lookup(path, now)

    def fill_stored(self, stored: StoreContents, now: float) -> None:
        if not stored.unique or not self._shadow.tuned:
            super().fill_stored(stored, now)
            return
        self._residents.fill_stored(stored)
        self._shadow.fill_stored(stored, now)

    def remove(self, key: K, now: float) -> None:
        self._residents.remove(key)
        waiting = [key, *self._early]
        while (left := [one for one in waiting if not self._shadow.drop(one)]) != waiting:
            waiting = left
        self._early = dict.fromkeys(left)

    def order(self) -> Iterator[K]:
        return self._residents.order(self._shadow)

    def on_pause(self, tip: K, label: int, now: float) -> None:
        self._shadow.on_pause(tip, label, now)

    def set_recompute_cost(self, per_token: float, per_pair: float) -> None:
        self._shadow.set_recompute_cost(per_token, per_pair)

    def dump(self) -> bytes:
        return self._shadow.dump()

    def load(self, raw: bytes) -> bool:
        return self._shadow.load(raw)

    def check(self) -> None:
        self._shadow.check()
        self._residents.check(self._shadow)
        assert len(self) + len(self._early) == len(self._shadow), "shadow and residents differ"
