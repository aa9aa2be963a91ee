"""Answers that this node decodes for peers who draft them: the interface that computes them, and one peer's job."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from ctxreuse.bus.protocol.messages import Verdict, Verify
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace

__all__ = ["Answering", "DraftVerifier", "VerdictSink", "VerifyJob"]

#: Drafts that are passed on between two verdicts: a peer that sends more cannot fill the engine's memory.
_DRAFTS = 64


class VerdictSink(Protocol):
    """Where the verdicts on an answer go. Any thread may call; calls for one answer are sequential."""

    def verdict(self, verdict: Verdict) -> None:
        """Take the next one."""

    def end(self, reason: str = "") -> None:
        """End the answer, as the last call: "" if it is whole, else why not."""


class Answering(Protocol):
    """An answer that is being decoded. Any thread may call; nothing blocks."""

    def draft(self, start: int, tokens: Tokens) -> None:
        """Take what may follow its first ``start`` tokens."""

    def cancel(self) -> None:
        """Give it up; the sink may still be called. Idempotent."""


class DraftVerifier(Protocol):
    """Engines that decode answers for peers. Any thread may call; nothing blocks."""

    def verifies(self) -> Sequence[ModelSpace]:
        """Return the model spaces in which it does so now."""

    def verify(self, salt: bytes, request: Verify, audited: int, sink: VerdictSink) -> Answering | None:
        """Begin an answer; None if no engine can.

        ``salt``: of the keys; ``audited``: so many leading blocks of the prompt may be read from the store.
        """


class VerifyJob:
    """One answer for one peer: a `VerdictSink` for the engines, a `VerifySource` for the link."""

    def __init__(self, wake: Callable[[], None], done: Callable[[], None]) -> None:
        """``wake`` is called when something has come, ``done`` once, when the peer has left."""
        self._wake, self._done = wake, done
        self._verdicts: deque[Verdict] = deque()
        self._lock = threading.Lock()
        self._closed, self._drafts = False, 0
        self.ended: str | None = None
        self.answering: Answering | None = None

    def verdict(self, verdict: Verdict) -> None:
        """See `VerdictSink.verdict`."""
        with self._lock:
            self._verdicts.append(verdict)
            self._drafts = 0
        self._wake()

    def end(self, reason: str = "") -> None:
        """See `VerdictSink.end`."""
        with self._lock:
            if self.ended is None:
                self.ended = reason
        self._wake()

    def draft(self, start: int, tokens: Tokens) -> None:
        """See `VerifySource.draft`; what exceeds 64 drafts since the last verdict counts for nothing."""
        with self._lock:
            self._drafts += 1
            if self._drafts > _DRAFTS:
                return
        if self.answering is not None:
            self.answering.draft(start, tokens)

    def verdicts(self) -> Sequence[Verdict]:
        """See `VerifySource.verdicts`."""
        with self._lock:
            found = list(self._verdicts)
            self._verdicts.clear()
        return found

    def close(self) -> None:
        """See `VerifySource.close`."""
        if not self._closed:
            self._closed = True
            if self.answering is not None and self.ended is None:
                self.answering.cancel()
            self._done()
