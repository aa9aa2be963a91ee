"""What the peer has announced: key prefixes, kept in step by sequence numbers and versions."""

from __future__ import annotations

from collections.abc import Sequence

from ctxreuse.bus.wire import PREFIX_BYTES, Announce, split

__all__ = ["Known"]


class Known:
    """The announced set of one cloud, at most ``limit`` prefixes. One thread applies; `leading` is for any.

    A set that grows beyond the limit is forgotten until the next snapshot: then matching takes a round trip.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.epoch = 0
        self.version = 0  # 0: nothing is known
        self._seq = self._part = 0
        self._asked = False  # for a snapshot that has not begun
        self._prefixes: set[bytes] = set()

    def begin(self, epoch: int) -> None:
        """A connection begins; another epoch makes void what is known, as does an announcement that was cut off."""
        if epoch != self.epoch or self._part:
            self._forget()
        self.epoch, self._seq, self._asked = epoch, 0, False

    def apply(self, message: Announce) -> bool:
        """Take one announcement; False if a snapshot must be asked for (once, until it begins)."""
        follows, self._seq = message.seq == self._seq + 1, message.seq
        starts = message.part == 0 and message.base == 0
        if starts:
            self._forget()
            self._asked = False
        elif self._asked:
            return True
        elif not follows or message.part != self._part or (message.part == 0 and message.base != self.version):
            self._forget()
            self._asked = True
            return False
        prefixes = self._prefixes
        prefixes.difference_update(split(message.removed, PREFIX_BYTES))
        prefixes.update(split(message.added, PREFIX_BYTES))
        last = message.part == message.parts - 1
        self._part = 0 if last else message.part + 1
        self.version = message.version if last else 0
        if len(prefixes) > self.limit:
            self._forget()
            self._asked = True  # whatever follows on it means nothing; the next snapshot may be smaller
        return True

    def _forget(self) -> None:
        self.version = self._part = 0
        self._prefixes = set()

    def leading(self, keys: Sequence[bytes]) -> int | None:
        """How many leading keys are announced; None if nothing is known."""
        prefixes = self._prefixes
        if not self.version:
            return None
        return next((i for i, key in enumerate(keys) if key[:PREFIX_BYTES] not in prefixes), len(keys))

    def count(self) -> int | None:
        """How many keys are announced; None if nothing is known."""
        return len(self._prefixes) if self.version else None

    def check(self) -> None:
        """Raise AssertionError if more is kept than allowed."""
        assert len(self._prefixes) <= self.limit
        assert self.version or self._part or not self._prefixes
