"""An answer being made: pieces of text as they come, the whole text, what it cost, and the turn it became."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from ctxreuse.runtime import Completion, Usage
from ctxreuse.store import Turn
from ctxreuse.why import Why
from ctxreuse_agents.gate import Gate

__all__ = ["Answer"]

_log = logging.getLogger(__name__)

# How long the collection of a forgotten answer waits until it is stored. It waits for one token and one commit; the
# limit matters only when the collector ran inside the very call that this needs to end.
_FORGOTTEN_SECONDS = 5.0


class Answer:
    """The answer to a question of a session; iterate it for the text as it is generated.

    Generation starts at the first use and runs in the thread that uses it. The session takes no other turn until the
    answer ended: by reading to the end, by ``close()`` (or the end of a ``with`` block), by an error, or when the last
    reference to it goes. Then it is durable as a turn; one that stopped early has the meta entry ``finish`` =
    ``cancelled`` or ``error``, and none is stored if there was no text yet. Iterating again repeats the text.

    Any thread may call, also ``close()`` while another one iterates: it takes effect after the token in the making.
    """

    def __init__(self, completion: Completion, keep: Callable[[Completion, str], Turn], gate: Gate) -> None:
        self._completion, self._keep, self._gate = completion, keep, gate
        self._lock = threading.Lock()
        self._stop = False
        self._ended = False
        self._pieces: list[str] = []
        self._turn: Turn | None = None

    def __iter__(self) -> Iterator[str]:
        """The pieces of text, from the first one on; raises what generation raises (EngineError, StoreError)."""
        n = 0
        while (piece := self.piece(n)) is not None:
            yield piece
            n += 1

    def piece(self, n: int) -> str | None:
        """The n-th piece, generated now if need be; None if the answer ended before it."""
        while len(self._pieces) <= n and not self._ended:
            with self._lock:
                if len(self._pieces) <= n and not self._ended:
                    self._step()
        return self._pieces[n] if n < len(self._pieces) else None

    @property
    def text(self) -> str:
        """The whole text; generates to the end first."""
        for _ in self:
            pass
        return "".join(self._pieces)

    @property
    def tokens(self) -> list[int]:
        """The ids sampled so far, end marker included."""
        return list(self._completion.tokens)

    @property
    def turn(self) -> Turn | None:
        """The turn that the answer became; generates to the end first. None if it stopped before any text."""
        for _ in self:
            pass
        return self._turn

    @property
    def usage(self) -> Usage:
        """What it cost so far: tokens of the prompt, how many were reused and from where, tokens generated.

        Computes the prompt first if that has not been done; does not generate to the end.
        """
        self.piece(0)
        return self._completion.usage

    def why(self, *, others: bool = False) -> Why:
        """Why its prompt reused what it did and no more; computes the prompt first if that has not been done.

        ``others``: the asker may know that another tenant has computed the same. See `ctxreuse.why.Why`.
        """
        self.piece(0)
        return self._completion.why(others=others)

    @property
    def finish(self) -> str | None:
        """Why it ended: ``stop``, ``length``, ``stop_string``, ``cancelled`` or ``error``; None while it may go on."""
        return self._completion.finish if self._ended else None

    def close(self) -> None:
        """Stop here and store what there is; nothing if it has ended. Raises StoreError if that cannot be stored."""
        self._stop = True
        with self._lock:
            if not self._ended:
                self._end("cancelled")

    def cancel(self) -> None:
        """Ask for the end after the token in the making, without waiting for it; ``close()`` must follow."""
        self._stop = True

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self.finish or ("under way" if self._pieces else "not begun")
        return f"Answer({''.join(self._pieces)[:40]!r}, {state})"

    def __del__(self) -> None:
        # While the interpreter is torn down no thread can start any more; open memories were closed just before.
        if getattr(self, "_ended", True) or sys.is_finalizing():
            return
        self._gate.disown()
        # The collector may run inside a call that holds a lock of the ledger; a thread of its own can wait for it.
        closing = threading.Thread(
            target=_close_forgotten, args=(self._completion, self._keep, self._gate), daemon=True
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
        self._turn = _settle(self._completion, self._keep, self._gate, finish)


def _settle(completion: Completion, keep: Callable[[Completion, str], Turn], gate: Gate, finish: str) -> Turn | None:
    """Store what there is, then let the session's next turn in, whatever happens."""
    turn = None
    try:
        try:
            completion.close(finish)
        finally:
            if completion.text or finish not in ("cancelled", "error"):
                turn = keep(completion, finish)
    finally:
        gate.leave()
    return turn


def _close_forgotten(completion: Completion, keep: Callable[[Completion, str], Turn], gate: Gate) -> None:
    try:
        _settle(completion, keep, gate, "cancelled")
    except Exception:
        # Nobody is left to raise it to: whoever wanted the answer has let go of it.
        _log.warning("an answer that was let go of could not be stored", exc_info=True)
