"""When a request is tried on another backend: only what may be repeated, only so often, only while most succeed."""

from __future__ import annotations

import random
from collections.abc import Mapping

from ctxreuse_cloud.proxy.headers import RawHeaders

__all__ = ["PATIENCE", "Budget", "FailedError", "pause", "repeatable", "retry_after", "retry_status"]

#: Asking these twice costs time only. What a backend may keep (files, batches, stored responses) is sent once.
_PURE = frozenset(
    f"/v1/{name}"
    for name in [
        "chat/completions",
        "completions",
        "embeddings",
        "rerank",
        "score",
        "classify",
        "pooling",
        "tokenize",
        "detokenize",
    ]
)


#: Seconds; a backend that asks for more is not waited for: the caller is told to come back.
PATIENCE = 2.0
_FIRST, _LONGEST = 0.05, 1.0


def pause(tried: int, rng: random.Random) -> float:
    """Seconds to wait before asking the same backends once more: doubled each time, drawn from [half, whole]."""
    return min(_LONGEST, _FIRST * 2.0 ** (tried - 1)) * rng.uniform(0.5, 1.0)


def repeatable(path: str) -> bool:
    """True if a request may be sent again although a backend may have begun with it."""
    return path in _PURE


def retry_status(status: int) -> bool:
    """True for answers after which another backend may do better."""
    return status in (408, 429) or (status >= 500 and status not in (501, 505))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a ``Retry-After`` header asks for; None without one, or with a date."""
    text = headers.get("Retry-After", "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else None


class FailedError(Exception):
    """One attempt that failed before anything was passed on: what the caller gets if it was the last one.

    ``sent``: the backend may have begun with the request. ``wait``: seconds after which to come back, 0 if unknown.
    ``answer``: the backend's own headers and body.
    """

    def __init__(
        self,
        status: int,
        what: str,
        *,
        sent: bool = False,
        wait: float = 0.0,
        answer: tuple[RawHeaders, bytes] | None = None,
    ) -> None:
        super().__init__(what)
        self.status, self.sent, self.wait, self.answer = status, sent, wait, answer


class Budget:
    """Retries are paid from a share of the requests, so that an outage is not met with a multiple of the load.

    Each request pays in ``share``, each retry takes 1; ``most`` is what can be saved up, and the start.
    """

    def __init__(self, share: float = 0.2, most: float = 10.0) -> None:
        self._share, self._most, self._held = share, most, most

    def request(self) -> None:
        """A request came."""
        self._held = min(self._most, self._held + self._share)

    def take(self) -> bool:
        """True if a retry may be made now; it is paid then."""
        if self._held < 1.0:
            return False
        self._held -= 1.0
        return True

    def check(self) -> None:
        """Raises AssertionError if more was taken than paid in."""
        assert 0.0 <= self._held <= self._most
