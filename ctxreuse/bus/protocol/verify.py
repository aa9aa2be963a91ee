"""An answer that a cloud decodes while this node drafts it, as the edge's side of a link sees it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from ctxreuse.bus.protocol.messages import Verdict, Verify
from ctxreuse.errors import ProtocolError
from ctxreuse.identity.keys import Tokens

__all__ = ["PendingVerify"]


class PendingVerify:
    """One *verify* of a link. Any thread may call; the link's thread fills it.

    Attributes:
        request: the message, whose id the session gives it.
        ended: None while verdicts may come, then "" (the answer is whole) or why it ended early: ``cut``, ``down``,
            ``cancelled``, ``stalled`` or a code of *refused*.
    """

    def __init__(self, request: Verify) -> None:
        self.request = request
        self.ended: str | None = None
        #: Set by the link: hands a draft (start, tokens) over, and gives the answer up.
        self.on_draft: Callable[[int, bytes], None] = lambda *_: None
        self.on_stop: Callable[[], None] = lambda: None
        self._verdicts: deque[Verdict] = deque()
        self._change = threading.Condition()
        self._tokens = 0

    def add(self, verdict: Verdict) -> None:
        """Take a verdict of the cloud. Raises ProtocolError if it does not follow the last one."""
        count = len(verdict.tokens) // 4
        if verdict.start != self._tokens or self._tokens + count > self.request.count:
            what = f"a verdict on {count} tokens from {verdict.start} on, after {self._tokens}"
            raise ProtocolError(what, where="verify")
        with self._change:
            if self._verdicts and self._verdicts[-1].score is None and not self._verdicts[-1].tokens:  # only progress
                self._verdicts.pop()
            self._tokens += count
            self._verdicts.append(verdict)
            self._change.notify_all()

    def end(self, reason: str) -> None:
        """Note that nothing more comes. Idempotent."""
        with self._change:
            if self.ended is None:
                self.ended = reason
            self._change.notify_all()

    @property
    def ready(self) -> bool:
        """True if `take` would not wait."""
        return bool(self._verdicts) or self.ended is not None

    def take(self, timeout: float) -> Verdict | None:
        """Wait for the next verdict; None at the end, see ``ended``, which is ``stalled`` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with self._change:
            while not self._verdicts and self.ended is None:
                if not self._change.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    self.ended = "stalled"
                    self.on_stop()
            return self._verdicts.popleft() if self._verdicts else None

    def draft(self, start: int, tokens: Tokens) -> None:
        """Say what may follow the answer's first ``start`` tokens; returns at once."""
        if self.ended is None:
            self.on_draft(start, np.ascontiguousarray(tokens, "<i4").tobytes())

    def stop(self) -> None:
        """Give it up; `take` returns None at once. Idempotent."""
        with self._change:
            if self.ended is None:
                self.ended = "cancelled"
                self.on_stop()
            self._verdicts.clear()
            self._change.notify_all()
