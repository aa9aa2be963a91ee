"""Picks the level of the next block: the least KL that still arrives in time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ctxreuse.block.levels import expected_kl

__all__ = ["Candidate", "Picker"]

#: Weight of what the newest block took against what was expected of one.
_NEW = 0.25
#: Sums of times are off by less than this part of them.
_ROUNDED = 1e-12


class Candidate(msgspec.Struct):
    """A level as a header spells it, the expected bytes of a block at it, and the seconds that encoding one takes (0:
    it is sent as stored)."""

    level: str
    nbytes: float
    seconds: float = 0.0


class Picker:
    """Picks levels for one transfer. One thread calls; ``now`` in seconds of any clock that does not go back.

    The link is taken to carry what was picked at ``bandwidth``, one block after another, while the next is encoded: a
    block takes the slower of the two, or their sum where all are encoded before the first goes (``serial``). A level is
    good enough if all blocks that are left would be there in time at it; of those the one of least damage is picked, of
    equal damage the quickest (`exact+rans` before `exact` unless the link beats the coder). If none is, or while the
    bandwidth is unknown, the quickest: what is late already shall not be later.

    Args:
        candidates: Levels that the receiver allows and this node can send.
        bandwidth: bytes/s (0: unknown).
        deadline: Seconds from now (0: any).
        now: The time.
        serial: All blocks are encoded before the first is sent.
        finest: The least KL worth sending: finer levels would make the receiver wait.
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
        self.candidates = tuple(sorted(candidates, key=lambda one: expected_kl(one.level)))
        self._bandwidth, self._at, self._serial, self._finest = bandwidth, now, serial, finest
        self._until = now + deadline if deadline > 0 else None
        self._waiting = 0.0  # bytes that were picked and are not through the link yet

    def on_bandwidth(self, bandwidth: float, now: float) -> None:
        """Set the bytes/s that the receiver measures."""
        self._drain(now)
        if bandwidth > 0:
            self._bandwidth = bandwidth

    def made(self, level: str, nbytes: int, seconds: float) -> None:
        """Learn the real bytes and seconds of a block that was picked.

        What a lossy level takes beyond expectation, all take: else it would look larger than a finer one that was not
        used yet.
        """
        one = next((one for one in self.candidates if one.level == level), None)
        if one is None:
            return
        more = nbytes - one.nbytes
        self._waiting = max(0.0, self._waiting + more)
        one.seconds += _NEW * (seconds - one.seconds)
        for other in self.candidates:
            if other is one or min(expected_kl(one.level), expected_kl(other.level)) > 0:
                other.nbytes = max(0.0, other.nbytes + _NEW * more)

    def pick(self, left: int, now: float) -> str:
        """Return the level of the next of ``left`` blocks; the quickest for one beyond those expected (``left`` < 1),
        which is wanted only if the receiver is slower than it thought."""
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
            # A deadline that is just kept must not be lost to rounding.
            room = self._until * (1 + _ROUNDED) - now - self._waiting / self._bandwidth
        good = [
            one
            for one in self.candidates
            if left > 0
            and left * each[one.level] <= room
            and (one is quickest or expected_kl(one.level) >= self._finest)
        ]
        return min(good, key=lambda one: (expected_kl(one.level), each[one.level]), default=quickest)

    def _each(self, sent: float, made: float) -> float:
        return sent + made if self._serial else max(sent, made)

    def _drain(self, now: float) -> None:
        if self._serial:
            return
        self._waiting = max(0.0, self._waiting - max(0.0, now - self._at) * self._bandwidth)
        self._at = max(now, self._at)

    def check(self) -> None:
        """Raise AssertionError if expectations are impossible."""
        assert self._waiting >= 0
        assert all(one.nbytes >= 0 <= one.seconds for one in self.candidates)
