"""A contender without a native twin, among contenders that have one: it sees blocks as the numbers that they use."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Generic

from ctxreuse.store.policy.base import Facts, K, Policy
from ctxreuse.store.policy.native import ids_of
from ctxreuse.store.policy.shadow import Served, Shadow

__all__ = ["NumberedShadow"]

_KEY, _ID, _BATCH = 32, 8, 256


def _numbers(path: Sequence[Any]) -> Sequence[int]:
    raw, stride = ids_of(path)
    if stride == _ID:
        return path
    return memoryview(raw).cast("Q")[:: stride // _ID].tolist()


class NumberedShadow(Generic[K]):
    """A `Shadow` of any policy, with ids in the place of keys: in a duel it can take the place of a `NativeShadow`."""

    arena = None

    def __init__(self, policy: Policy[int], capacity: int) -> None:
        self._shadow = Shadow(policy, capacity)

    @property
    def name(self) -> str:
        """The policy's."""
        return self._shadow.name

    def __len__(self) -> int:
        return len(self._shadow)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that it stands for."""
        return self._shadow.nbytes

    def __contains__(self, key: Any) -> bool:
        return _numbers((key,))[0] in self._shadow

    def request(self, path: Sequence[K], sizes: Sequence[int], tokens: Sequence[int], now: float) -> Served[Any]:
        """See `Shadow.request`; what came and went are ids."""
        return self._shadow.request(_numbers(path), sizes, tokens, now)

    def fill(self, facts: Sequence[Facts[K]], uses: Sequence[Sequence[K]], now: float) -> Sequence[Any]:
        """See `Shadow.fill`."""
        told: Iterable[Facts[int]] = (
            Facts(_numbers((one.key,))[0], None if one.parent is None else _numbers((one.parent,))[0], *one[2:])
            for one in facts
        )
        return self._shadow.fill(list(told), [_numbers(path) for path in uses], now)

    def mark(self, tip: K, label: int, now: float) -> None:
        """See `Policy.mark`."""
        self._shadow.mark(_numbers((tip,))[0], label, now)

    def price(self, per_token: float, per_pair: float) -> None:
        """See `Shadow.price`."""
        self._shadow.price(per_token, per_pair)

    def order(self) -> Iterator[Any]:
        """What is held as ids, first to go first."""
        return self._shadow.order()

    def batches(self) -> Iterator[bytes]:
        """See `NativeShadow.batches`."""
        ids = self._shadow.order()
        while batch := list(islice(ids, _BATCH)):
            yield array("Q", batch).tobytes()

    def beyond(self, other: Any) -> int:
        """See `NativeShadow.beyond`."""
        return self._shadow.beyond(other)

    def dump(self) -> bytes:
        """See `Shadow.dump`."""
        return self._shadow.dump()

    def load(self, raw: bytes) -> bool:
        """See `Shadow.load`."""
        return self._shadow.load(raw)

    def check(self) -> None:
        """See `Shadow.check`."""
        self._shadow.check()
