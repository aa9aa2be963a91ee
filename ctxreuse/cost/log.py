"""What was decided, what it was predicted to take, and what it took."""

from __future__ import annotations

import logging
import statistics
import threading
from collections import deque

import msgspec

__all__ = ["DecisionLog", "DecisionRecord"]

_logger = logging.getLogger("ctxreuse.cost")


class DecisionRecord(msgspec.Struct, frozen=True):
    """One decision: ``way`` as decided and ``took`` as it went (they differ after a switch on the way).

    ``tokens``: prompt tokens missing in the engine's memory. Seconds until the logits; ``predicted`` is None where
    nothing was known yet. ``peer`` is "" where no other node took part.
    """

    way: str
    took: str
    tokens: int
    predicted: float | None
    real: float
    peer: str = ""

    @property
    def error(self) -> float | None:
        """|predicted - real| / real."""
        return None if self.predicted is None or self.real <= 0 else abs(self.predicted - self.real) / self.real


class DecisionLog:
    """The last ``capacity`` decisions. Any thread may call."""

    def __init__(self, capacity: int = 256) -> None:
        self._lock = threading.Lock()
        self._records: deque[DecisionRecord] = deque(maxlen=capacity)
        self._added = 0

    def add(self, record: DecisionRecord) -> None:
        """Keep a decision that has been carried out; also a line of the logger ``ctxreuse.cost`` at level debug."""
        with self._lock:
            self._records.append(record)
            self._added += 1
        _logger.debug(
            "%s (%s) of %d tokens: predicted %s s, took %.4f s%s",
            record.way,
            record.took,
            record.tokens,
            "?" if record.predicted is None else f"{record.predicted:.4f}",
            record.real,
            f", peer {record.peer}" if record.peer else "",
        )

    def records(self) -> tuple[DecisionRecord, ...]:
        """Return all records kept, oldest first."""
        with self._lock:
            return tuple(self._records)

    def numbered(self) -> list[tuple[int, DecisionRecord]]:
        """Return all records kept with their numbers, which count from 0, oldest first."""
        with self._lock:
            return list(enumerate(self._records, self._added - len(self._records)))

    def error(self) -> float | None:
        """Median relative error of the kept predictions; None without any."""
        errors = [e for record in self.records() if (e := record.error) is not None]
        return statistics.median(errors) if errors else None
