"""An answer being generated: an iterator of pieces that keeps the KV when it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import msgspec

from ctxreuse.runtime.steps.order import RequestCancelledError
from ctxreuse.usage import TokenUsage, Usage

if TYPE_CHECKING:
    from ctxreuse.engines.generate import GeneratedToken
    from ctxreuse.why import Why

__all__ = ["Completion", "PieceSource"]


class PieceSource(Protocol):
    """Makes the pieces of one answer. A `Completion` makes one call at a time."""

    @property
    def usage(self) -> Usage | None:
        """What the prompt cost; None before it was computed."""

    def next(self) -> GeneratedToken | None:
        """Return the next piece, after the prompt was computed if need be; None at the end."""

    def cancel(self) -> None:
        """Let a call of `next` in another thread raise RequestCancelledError soon, if it can; returns at once."""

    def end(self, finish: str, text: str, usage: Usage) -> None:
        """End the answer: keep the KV, unless ``finish`` is ``error``. Called once."""

    def why(self, request: str, *, others: bool) -> Why:
        """See `RuntimeProtocol.why`."""


class Completion:
    """Iterate to get the answer's pieces as they are generated.

    Any thread may call; each piece goes to one caller, and ``cancel`` and ``close`` take effect after the engine's
    present pass. When the iteration ends or is closed, the KV of what was processed is kept.

    Attributes:
        text, tokens: the text and the generated ids so far.
        finish: None while more may come, then ``stop``, ``length``, ``stop_string``, ``cancelled`` or ``error``.
    """

    def __init__(self, source: PieceSource, prompt_tokens: int) -> None:
        self._source, self._prompt_tokens = source, prompt_tokens
        # Re-entrant, as the last piece closes. The context goes to the cache then: no other thread may be inside it.
        self._lock = threading.RLock()
        self._closing = ""
        self.text = ""
        self.tokens: list[int] = []
        self.finish: str | None = None

    @property
    def usage(self) -> Usage:
        """What it cost so far; before the first piece only the prompt's length is known."""
        usage = self._source.usage or Usage(TokenUsage(prompt=self._prompt_tokens))
        tokens = msgspec.structs.replace(usage.tokens, completion=len(self.tokens))
        return msgspec.structs.replace(usage, tokens=tokens)

    def __iter__(self) -> Iterator[GeneratedToken]:
        return self

    def __next__(self) -> GeneratedToken:
        with self._lock:
            if self._closing:
                self.close(self._closing)
            if self.finish is not None:
                raise StopIteration
            try:
                piece = self._source.next()
            except RequestCancelledError:
                self.close(self._closing or "cancelled")
                raise StopIteration from None
            except BaseException:
                self.close("error")
                raise
            if piece is None:  # max_tokens is 0: only the prompt was wanted
                self.close("length")
                raise StopIteration
            self.tokens.append(piece.token)
            self.text += piece.text
            if piece.finish is not None:
                self.close(piece.finish)
            return piece

    def why(self, *, others: bool = False) -> Why:
        """Why it reused what it did and no more: see `RuntimeProtocol.why`. Raises SessionError before its first
        piece."""
        return self._source.why(self.usage.request or "-", others=others)

    def cancel(self, finish: str = "cancelled") -> None:
        """Let the iteration end soon, whichever thread iterates; returns at once. `close` it, or iterate to its end."""
        self._closing = self._closing or finish
        self._source.cancel()

    def close(self, finish: str = "cancelled") -> None:
        """Stop here and keep the KV of what was processed; after an error nothing is kept. Idempotent."""
        # Before waiting for the lock: a consumer in a tight loop would take it again and again.
        self.cancel(finish)
        with self._lock:
            if self.finish is None:
                self.finish = finish
                self._source.end(finish, self.text, self.usage)

    def drain(self) -> str:
        """Generate to the end and return the whole text."""
        for _ in self:
            pass
        return self.text
