"""An answer while it is generated: its text piece by piece, its usage, and its turn."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from ctxreuse.engines.text import ToolCall
from ctxreuse.errors import GrammarError
from ctxreuse.runtime import Completion, Usage
from ctxreuse.store import Turn
from ctxreuse.toolcalls import Family, parse_calls
from ctxreuse.why import Why
from ctxreuse_agents.tools import AnswerType
from ctxreuse_agents.turn_lock import TurnLock

__all__ = ["Answer"]

_log = logging.getLogger(__name__)

# Seconds that garbage collection waits for an answer to be stored: one token and one commit. The limit matters only
# when the collector runs inside the call that must end first.
_FORGOTTEN_SECONDS = 5.0


class Answer:
    """The answer to a question; iterate it for the text as it is generated.

    Generation starts at the first use and runs in the calling thread. The session takes no other turn until the answer
    has ended: read to the end, closed (also by a ``with`` block), failed, or garbage collected. Then it is durable as a
    turn; if it stopped early, with the meta entry ``finish`` = ``cancelled`` or ``error``, and not at all without text.
    Iterating again repeats the text. Thread-safe: ``close()`` takes effect after the current token.
    """

    _ended = True  # until __init__ has run

    def __init__(
        self,
        completion: Completion,
        keep: Callable[[Completion, str], Turn],
        lock: TurnLock,
        family: Family | None = None,
        form: AnswerType | None = None,
        *,
        session: str = "",
        others: Sequence[Answer] = (),
    ) -> None:
        """``family``: how tools are called, if there are any; ``form``: the type of the answer; ``session``: whose turn
        it becomes; ``others``: the further answers to its question."""
        self._completion, self._keep, self._turn_lock = completion, keep, lock
        self._family, self._form = family, form
        self._session, self._others = session, tuple(others)
        self._lock = threading.Lock()
        self._stop = False
        self._ended = False
        self._pieces: list[str] = []
        self._turn: Turn | None = None

    def __iter__(self) -> Iterator[str]:
        """Iterate over the pieces of text from the first one. Raises EngineError or StoreError from generation."""
        n = 0
        while (piece := self.piece(n)) is not None:
            yield piece
            n += 1

    def piece(self, n: int) -> str | None:
        """Return the n-th piece, generating it if necessary; None if the answer has ended before it."""
        while len(self._pieces) <= n and not self._ended:
            with self._lock:
                if len(self._pieces) <= n and not self._ended:
                    self._step()
        return self._pieces[n] if n < len(self._pieces) else None

    @property
    def text(self) -> str:
        """The whole text; generates to the end."""
        for _ in self:
            pass
        return "".join(self._pieces)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls of tools; generates to the end. A call that was cut has the beginning of its arguments."""
        return parse_calls(self._family, self.text)[1] if self._family is not None else []

    @property
    def content(self) -> str:
        """The text besides calls of tools; generates to the end."""
        return parse_calls(self._family, self.text)[0] if self._family is not None else self.text

    @property
    def value(self) -> Any:
        """The answer as a value of the type given as ``schema``; generates to the end.

        Raises GrammarError without a ``schema``, and for an answer that was cut.
        """
        if self._form is None:
            raise GrammarError("this answer has no type", fix="Ask with schema=, a type or a JSON schema")
        return self._form.value(self.content)

    @property
    def tokens(self) -> list[int]:
        """The ids sampled so far, end marker included."""
        return list(self._completion.tokens)

    @property
    def turn(self) -> Turn | None:
        """The turn that the answer became; generates to the end. None if it stopped before any text."""
        for _ in self:
            pass
        return self._turn

    @property
    def session_id(self) -> str:
        """The id of the session whose turn it becomes: the one that was asked, or a fork of it (see `others`)."""
        return self._session

    @property
    def others(self) -> tuple[Answer, ...]:
        """The further answers to its question, with ``n`` > 1: each is a turn of a fork of its own, which
        ``memory.session(other.session_id)`` opens. The prompt was computed once, and is in the first one's usage."""
        return self._others

    @property
    def usage(self) -> Usage:
        """Its cost so far: prompt tokens, reused ones by source, generated tokens. Computes the prompt if necessary."""
        self.piece(0)
        return self._completion.usage

    def why(self, *, others: bool = False) -> Why:
        """Explain what its prompt reused and what it missed; computes the prompt if necessary.

        ``others``: the explanation may reveal that another tenant has computed the same.
        """
        self.piece(0)
        return self._completion.why(others=others)

    @property
    def finish(self) -> str | None:
        """``stop``, ``length``, ``stop_string``, ``cancelled`` or ``error``; None while it has not ended."""
        return self._completion.finish if self._ended else None

    def close(self) -> None:
        """Stop and store what there is. Idempotent. Raises StoreError."""
        self._stop = True
        with self._lock:
            if not self._ended:
                self._end("cancelled")

    def cancel(self) -> None:
        """Request the end after the current token without waiting for it; ``close()`` must follow."""
        self._stop = True

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self.finish or ("under way" if self._pieces else "not begun")
        return f"Answer({''.join(self._pieces)[:40]!r}, {state})"

    def __del__(self) -> None:
        # At interpreter shutdown no thread can start; open memories have been closed just before.
        if self._ended or sys.is_finalizing():
            return
        self._turn_lock.disown()
        # The collector may run inside a call that holds a lock of the ledger; another thread can wait for it.
        closing = threading.Thread(
            target=_close_forgotten, args=(self._completion, self._keep, self._turn_lock), daemon=True
        )
        closing.start()
        closing.join(_FORGOTTEN_SECONDS)

    def _step(self) -> None:
        if self._stop:
            self._end("cancelled")
            return
        try:
            piece = next(self._completion, None)
        except BaseException:
            self._end("error")
            raise
        if piece is not None and piece.text:
            self._pieces.append(piece.text)
        if piece is None or self._completion.finish is not None:
            self._end(self._completion.finish or "stop")

    def _end(self, finish: str) -> None:
        self._ended = True
        self._turn = _settle(self._completion, self._keep, self._turn_lock, finish)


def _settle(
    completion: Completion, keep: Callable[[Completion, str], Turn], lock: TurnLock, finish: str
) -> Turn | None:
    """Store what there is; in any case release the turn lock."""
    turn = None
    try:
        try:
            completion.close(finish)
        finally:
            if completion.text or finish not in ("cancelled", "error"):
                turn = keep(completion, finish)
    finally:
        lock.leave()
    return turn


def _close_forgotten(completion: Completion, keep: Callable[[Completion, str], Turn], lock: TurnLock) -> None:
    try:
        _settle(completion, keep, lock, "cancelled")
    except Exception:
        _log.warning("a garbage-collected answer could not be stored", exc_info=True)
