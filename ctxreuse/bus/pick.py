"""Which level the next block goes out at: the least damage that still arrives in time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ctxreuse.levels import damage

__all__ = ["Candidate", "Picker"]

#: Weight of what the newest block took against what was expected of one.
_NEW = 0.25
#: Sums of times are off by less than this part of them.
_ROUNDED = 1e-12


class Candidate(msgspec.Struct):
    """A level as a header spells it, the expected bytes of a block at it, and the seconds until one is encoded where
    nothing else is (0: it is sent as it is held)."""

    level: str
    nbytes: float
    seconds: float = 0.0


class Picker:
    """Decides for one transfer. One thread calls; ``now`` in seconds of any clock that does not go back.

    ``candidates`` are what the receiver allows and this node can send. ``bandwidth`` bytes/s (0: unknown), ``deadline``
    seconds from now (0: no matter when). The link is taken to carry what was picked at that bandwidth, one block after
    another, beside the encoding of the next: then a block is there after the slower of the two; where all are encoded
    before the first goes (``serial``), after one and the other. A level is good enough if all blocks that are still to
    be picked would be there in time at it; of those that are, the one of least damage is picked (of at least the damage
    ``finest``: the receiver knows that better ones would make it wait), of equal damage the quickest (`exact+rans`
    before `exact` unless the link beats the coder). If none is, the quickest: what is late already shall not be later.
    That holds too while the bandwidth is unknown.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        bandwidth: float,
        deadline: float,
        now: float,
        serial: bool = False,
        finest: float = 0.0,
    ) -> None:
        if not candidates:
            raise ValueError("no level to pick from")
        self.candidates = tuple(sorted(candidates, key=lambda one: damage(one.level)))
        self._bandwidth, self._at, self._serial, self._finest = bandwidth, now, serial, finest
        self._until = now + deadline if deadline > 0 else None
        self._waiting = 0.0  # bytes that were picked and are not through the link yet

    def told(self, bandwidth: float, now: float) -> None:
        """The receiver sees so many bytes a second."""
        self._drain(now)
        if bandwidth > 0:
            self._bandwidth = bandwidth

    def made(self, level: str, nbytes: int, seconds: float) -> None:
        """A block that was picked has so many bytes and took so long to encode.

        What one lossy level takes beyond what was expected of it, all take: else a level would look larger than a finer
        one of which nothing was made yet.
        """
        one = next((one for one in self.candidates if one.level == level), None)
        if one is None:
            return
        more = nbytes - one.nbytes
        self._waiting = max(0.0, self._waiting + more)
        one.seconds += _NEW * (seconds - one.seconds)
        for other in self.candidates:
            if other is one or min(damage(one.level), damage(other.level)) > 0:
                other.nbytes = max(0.0, other.nbytes + _NEW * more)

    def pick(self, left: int, now: float) -> str:
        """The level of the next of ``left`` blocks; of one that nobody counted on (``left`` below 1) the quickest: it
        is wanted only if the receiver is slower than it thought."""
        self._drain(now)
        chosen = self._choose(left, now)
        self._waiting += chosen.nbytes
        return chosen.level

    def _choose(self, left: int, now: float) -> Candidate:
        if self._bandwidth <= 0:
            return min(self.candidates, key=lambda one: one.nbytes)
        each = {one.level: self._each(one.nbytes / self._bandwidth, one.seconds) for one in self.candidates}
        quickest = min(self.candidates, key=lambda one: each[one.level])
        room = float("inf")
        if self._until is not None:
            # A deadline that is kept to the last moment must not be lost to how the sums are rounded.
            room = self._until * (1 + _ROUNDED) - now - self._waiting / self._bandwidth
        good = [
            one
            for one in self.candidates
            if left > 0 and left * each[one.level] <= room and (one is quickest or damage(one.level) >= self._finest)
        ]
        return min(good, key=lambda one: (damage(one.level), each[one.level]), default=quickest)

    def _each(self, sent: float, made: float) -> float:
        return sent + made if self._serial else max(sent, made)

    def _drain(self, now: float) -> None:
        if self._serial:
            return
        self._waiting = max(0.0, self._waiting - max(0.0, now - self._at) * self._bandwidth)
        self._at = max(now, self._at)

    def check(self) -> None:
        """Raise AssertionError if what is expected makes no sense."""
        assert self._waiting >= 0
        assert all(one.nbytes >= 0 <= one.seconds for one in self.candidates)
