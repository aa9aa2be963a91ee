"""Shadows and rosters in native arenas: the same answers as the Python ones, for a million blocks."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Generic

from ctxreuse import _native
from ctxreuse.errors import ConfigError
from ctxreuse.store.policy.base import Facts, K, prefill_line
from ctxreuse.store.policy.hazard import CLASSES
from ctxreuse.store.policy.hazard_table import AGES, pack_counts, unpack_counts
from ctxreuse.store.policy.shadow import Served
from ctxreuse.store.policy.trials import Trials

__all__ = ["NATIVE", "NativeRoster", "NativeShadow", "counts_of", "ids_of"]

#: Policies with a native twin, in the order of the native core.
NATIVE: Final = ("lru", "lfu", "s3fifo", "arc", "gdsf", "hazard")

_ID, _KEY, _MOST = 8, 32, (1 << 32) - 1
#: A class and its counts by age.
_COUNTS = f"={1 + 2 * AGES}d"
#: Keys of an order that are listed at first; then eight times as many, and so on.
_CHUNK = 64


def ids_of(path: Sequence[Any]) -> tuple[bytes, int]:
    """Keys as one buffer and their distance in bytes: 8 for numbers below 2**64, 32 for the store's."""
    if len(path) and isinstance(path[0], bytes):
        return b"".join(path), _KEY
    return array("Q", path).tobytes(), _ID


def _one(key: Any) -> tuple[bytes, int]:
    if isinstance(key, bytes):
        return key, _KEY
    return int(key).to_bytes(_ID, "little"), _ID


def counts_of(values: Sequence[int] | int, n: int) -> array[int]:
    """One number for each of ``n`` blocks, as the native core takes them; beyond 4 Gi they count as that."""
    if isinstance(values, array):
        return values
    if isinstance(values, int):
        return array("I", [min(values, _MOST)]) * n
    try:
        return array("I", values)
    except OverflowError:
        return array("I", [min(value, _MOST) for value in values])


class NativeShadow(Generic[K]):
    """See `Shadow`. Keys are numbers below 2**64, or 32 bytes, of which 8 tell them apart here: a mix-up, which
    takes keys made up for it, costs a wrong guess. ``Served.evicted`` is then a view of ids, not of keys.
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
    ) -> None:
        """``alpha`` is for ``gdsf``, found by trials if None; ``ghosts`` are the numbers that `Hazard` takes.

        Raises ConfigError for a policy without a native twin, ValueError for ghosts of one that is not hazard.
        """
        if name not in NATIVE:
            raise ConfigError(f"no native policy {name!r}", fix=f"Choose one of: {', '.join(NATIVE)}")
        self.name, self.capacity = name, capacity
        self._line, self._alpha = (per_token, per_pair), alpha or 0.0
        self.arena = _native.shadow_new(NATIVE.index(name), capacity, per_token, per_pair, self._alpha)
        self._trials: Trials[K] | None = None
        if ghosts is not None:
            _native.shadow_remember(self.arena, *ghosts)
        if name == "gdsf" and alpha is None:
            self._trials = Trials(self._trial, self._seconds)

    def _trial(self, alpha: float, capacity: int) -> NativeShadow[K]:
        per_token, per_pair = self._line
        return NativeShadow("gdsf", capacity, per_token=per_token, per_pair=per_pair, alpha=alpha)

    def _seconds(self, start: int, tokens: int) -> float:
        return prefill_line(*self._line)(start, tokens)

    @property
    def alpha(self) -> float:
        """The weight of efficiency under ``gdsf``."""
        return self._alpha

    @property
    def tuned(self) -> bool:
        """False while trials for ``alpha`` are still to come or running."""
        return self._trials is None

    def __len__(self) -> int:
        return _native.shadow_figures(self.arena)[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that it stands for."""
        return _native.shadow_figures(self.arena)[1]

    @property
    def memory(self) -> int:
        """Bytes that it takes itself."""
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
        trials = self._trials
        if trials is not None:
            alpha = trials.request(path, size, count, now)
            if alpha is not None:
                self._alpha, self._trials, trials = alpha, None, None
                _native.shadow_tune(self.arena, *self._line, alpha)
        if not len(path):
            return Served(0, 0, path, memoryview(b"").cast("Q"))
        before = len(self), self.nbytes
        blocks, gone = _native.shadow_request(self.arena, *ids_of(path), size, count, now)
        if gone and trials is not None:
            trials.full(lambda: before[1] + sum(size[blocks:]), before[0] + len(path) - blocks)
        return Served(blocks, sum(count[:blocks]), path[blocks:], memoryview(gone).cast("Q"))

    def fill(self, facts: Sequence[Facts[K]], uses: Sequence[Sequence[K]], now: float) -> Sequence[Any]:
        """See `Shadow.fill`."""
        for one in facts:
            key, stride = _one(one.key)
            parent = None if one.parent is None else _one(one.parent)[0]
            _native.shadow_hold(self.arena, key, stride, parent, one.nbytes, one.start, one.tokens)
        for path in uses:
            _native.shadow_use(self.arena, *ids_of(path), now)
        return memoryview(_native.shadow_fit(self.arena)).cast("Q")

    def remove(self, key: K, now: float) -> None:
        """Forget one leaf. Raises KeyError if it is not held, or no leaf."""
        if not _native.shadow_drop(self.arena, *_one(key)):
            raise KeyError(key)

    def price(self, per_token: float, per_pair: float) -> None:
        """See `Shadow.price`."""
        self._line = per_token, per_pair
        _native.shadow_tune(self.arena, per_token, per_pair, self._alpha)

    def mark(self, tip: K, label: int, now: float) -> None:
        """See `Policy.mark`; only ``hazard`` minds why a context paused."""
        _native.shadow_mark(self.arena, *_one(tip), label & 0xFF)

    def batches(self) -> Iterator[bytes]:
        """The order of eviction as ids, 8 bytes each, in ever larger pieces."""
        done, limit = 0, _CHUNK
        while True:
            ids = _native.shadow_order(self.arena, limit)
            yield ids[done * _ID :]
            if len(ids) < limit * _ID:
                return
            done, limit = limit, limit * 8

    def order(self) -> Iterator[Any]:
        """What is held as ids, first to go first. Valid until the next change."""
        for ids in self.batches():
            yield from memoryview(ids).cast("Q")

    def beyond(self, other: Any) -> int:
        """See `Shadow.beyond`; where the other's policy has no native twin, as if all blocks were alike."""
        if other.arena is not None:
            return _native.shadow_beyond(self.arena, other.arena)
        return sum(id not in other for id in self.order()) * self.nbytes // max(len(self), 1)

    def dump(self) -> bytes:
        """See `Shadow.dump`: only ``hazard`` learns, and the bytes are those of its Python class."""
        if self.name != "hazard":
            return b""
        rows = struct.iter_unpack(_COUNTS, _native.shadow_learnt(self.arena))
        return pack_counts((int(row[0]), row[1 : 1 + AGES], row[1 + AGES :]) for row in rows)

    def load(self, raw: bytes) -> bool:
        """See `Learner.load`; False for a policy that learns nothing."""
        rows = unpack_counts(raw, CLASSES) if self.name == "hazard" else None
        if rows is None:
            return False
        taught, none = array("d"), [0.0] * AGES
        for which, used, seen in rows:
            taught.extend((which, *(*used, *none)[:AGES], *(*seen, *none)[:AGES]))
        if taught:
            _native.shadow_teach(self.arena, taught)
        return True

    def check(self) -> None:
        """Raises AssertionError where the arena is wrong. O(blocks)."""
        wrong = _native.shadow_check(self.arena)
        assert wrong is None, wrong
        ids = list(self.order())
        assert len(ids) == len(set(ids)) == len(self), "the policy orders other blocks"


class NativeRoster(Generic[K]):
    """See `Roster`: keys in full, 8 or 32 bytes; the contenders are `NativeShadow` or `NumberedShadow`."""

    def __init__(self) -> None:
        self._arena = _native.roster_new()
        self._numbers = False

    def __len__(self) -> int:
        return _native.roster_figures(self._arena)[0]

    @property
    def tokens(self) -> int:
        """Tokens of what is held."""
        return _native.roster_figures(self._arena)[1]

    @property
    def memory(self) -> int:
        """Bytes that it takes itself."""
        return _native.roster_figures(self._arena)[3]

    def __contains__(self, key: K) -> bool:
        return self.match((key,)) > 0

    def hold(self, facts: Facts[K], followed: bool) -> None:
        """See `Roster.hold`."""
        key, stride = _one(facts.key)
        self._numbers = stride == _ID
        _native.roster_hold(self._arena, key, stride, facts.nbytes, facts.tokens, followed)

    def drop(self, key: K) -> None:
        """See `Roster.drop`."""
        if not _native.roster_drop(self._arena, *_one(key)):
            raise KeyError(key)

    def sizes(self, path: Sequence[K]) -> tuple[Sequence[int], Sequence[int]]:
        """See `Roster.sizes`."""
        held, sizes, tokens = _native.roster_match(self._arena, *ids_of(path))
        if held < len(path):
            raise KeyError(path[held])
        return memoryview(sizes).cast("I"), memoryview(tokens).cast("I")

    def match(self, path: Sequence[K]) -> int:
        """See `Roster.match`."""
        return _native.roster_match(self._arena, *ids_of(path))[0]

    def came(self, keys: Iterable[Any]) -> None:
        """See `Roster.came`; keys or ids."""
        _native.roster_moved(self._arena, *ids_of(list(keys)), False)

    def left(self, keys: Iterable[Any]) -> None:
        """See `Roster.left`; keys or ids."""
        _native.roster_moved(self._arena, *ids_of(list(keys)), True)

    def follow(self, old: Any, new: Any) -> None:
        """See `Roster.follow`."""
        if old.arena is not None and new.arena is not None:
            _native.roster_follow(self._arena, old.arena, new.arena)
            return
        strays = _native.roster_strays(self._arena, len(self))
        self.came(id for id in memoryview(b"".join(key[:_ID] for key in strays)).cast("Q") if id in new)
        for ids in old.batches():
            self.left(id for id in memoryview(ids).cast("Q") if id not in new)

    def order(self, followed: Any) -> Iterator[Any]:
        """See `Roster.order`."""
        done, limit = 0, _CHUNK
        while True:
            strays = _native.roster_strays(self._arena, limit)
            yield from self._keys(strays[done:])
            if len(strays) < limit:
                break
            done, limit = limit, limit * 8
        for ids in followed.batches():
            yield from self._keys(_native.roster_keys(self._arena, ids, _ID))

    def _keys(self, raw: list[bytes]) -> Iterable[Any]:
        return (int.from_bytes(key[:_ID], "little") for key in raw) if self._numbers else raw

    def check(self, followed: Any) -> None:
        """See `Roster.check`."""
        held, _, strays, _ = _native.roster_figures(self._arena)
        named = list(self.order(followed))
        assert len(named) == len(set(named)) == held, "the order names other keys"
        assert all(key not in followed for key in named[:strays]), "a stray is held by the contender"
