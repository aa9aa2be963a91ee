"""Retry policy: which requests may be repeated, how often, and only while most requests succeed."""

from __future__ import annotations

import random
from collections.abc import Mapping

from ctxreuse_cloud.proxy.http import RawHeaders

__all__ = ["PATIENCE", "PURE", "Budget", "FailedError", "pause", "repeatable", "retry_after", "retry_status"]

#: Requests without side effects; files, batches and stored responses are sent once.
PURE = (
    frozenset(["/tokenize", "/detokenize", "/rerank", "/score", "/classify", "/pooling"])
    | frozenset(f"/api/{name}" for name in ("chat", "generate", "embed", "embeddings", "show"))
    | frozenset(
        f"/v1/{name}"
        for name in [
            "chat/completions",
            "completions",
            "embeddings",
            "messages",
            "messages/count_tokens",
            "responses/input_tokens",
            "rerank",
            "score",
            "classify",
            "pooling",
            "tokenize",
            "detokenize",
        ]
    )
)


#: Seconds that a backend may ask us to wait; a longer wait is passed to the caller.
PATIENCE = 2.0
_FIRST, _LONGEST = 0.05, 1.0


def pause(tried: int, rng: random.Random) -> float:
    """Return the seconds to wait before the next attempt: doubled each time, drawn from [half, whole]."""
    return min(_LONGEST, _FIRST * 2.0 ** (tried - 1)) * rng.uniform(0.5, 1.0)


def repeatable(method: str, path: str, *, stores: bool) -> bool:
    """Return True if a request may be sent again although a backend may have begun it.

    ``stores``: a response is stored, unless its request says otherwise.
    """
    return method == "GET" or path in PURE or (path == "/v1/responses" and not stores)


def retry_status(status: int) -> bool:
    """Return True for a status after which another backend may succeed."""
    return status in (408, 429) or (status >= 500 and status not in (501, 505))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a ``Retry-After`` header; None without one, or with a date."""
    text = headers.get("Retry-After", "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else None


class FailedError(Exception):
    """An attempt that failed before anything was passed on.

    ``sent``: the backend may have begun the request. ``wait``: seconds to wait, 0: unknown. ``answer``: the backend's
    headers and body, for the caller if this was the last attempt.
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
    """Limits retries to a share of the requests, so that an outage does not multiply the load.

    Each request adds ``share``, each retry costs 1; ``maximum``: largest and initial balance.
    """

    def __init__(self, share: float = 0.2, maximum: float = 10.0) -> None:
        self._share, self._maximum, self._balance = share, maximum, maximum

    def request(self) -> None:
        """Note a request."""
        self._balance = min(self._maximum, self._balance + self._share)

    def take(self) -> bool:
        """Pay for a retry; False if the balance does not allow it."""
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True

    def check(self) -> None:
        """Raise AssertionError if the balance is out of range."""
        assert 0.0 <= self._balance <= self._maximum
