"""What all sessions of one memory share: ledger, engine, token streams, turn locks and unfinished answers."""

from __future__ import annotations

import atexit
import threading
from contextlib import ExitStack, suppress
from weakref import WeakSet, WeakValueDictionary

from ctxreuse.errors import EngineError, StoreError
from ctxreuse.levels import EXACT, check_lossy
from ctxreuse.runtime import Runtime
from ctxreuse.store import Ledger
from ctxreuse.store import Session as Record
from ctxreuse_agents.answer import Answer
from ctxreuse_agents.gate import Gate
from ctxreuse_agents.segments import Segments

__all__ = ["Shared"]


class Shared:
    """Any thread may call. ``runtime`` is None without an engine, ``segments`` without an engine that knows text.

    ``lossy``: the worst level of KV for sessions that do not say themselves.
    """

    def __init__(self, ledger: Ledger, runtime: Runtime | None, *, readonly: bool, lossy: str | None = None) -> None:
        self.ledger, self.runtime, self.lossy = ledger, runtime, lossy
        self._segments: Segments | None = None
        if runtime is not None and runtime.text is not None:
            self._segments = Segments(ledger, runtime.text, runtime.engine.space, readonly=readonly)
        self._lock = threading.Lock()
        self._gates: WeakValueDictionary[str, Gate] = WeakValueDictionary()
        self._answers: WeakSet[Answer] = WeakSet()
        #: What to close, last opened first, when the memory closes.
        self.owned = ExitStack()
        _open.add(self)

    def gate(self, session_id: str) -> Gate:
        """The one turn lock of a session, whichever object asks; the caller must keep it while it is held."""
        with self._lock:
            gate = self._gates.get(session_id)
            if gate is None:
                gate = self._gates[session_id] = Gate()
            return gate

    def engine(self) -> tuple[Runtime, Segments]:
        """Runtime and token streams. Raises EngineError, saying what to do, if there is no engine or no tokenizer."""
        if self.runtime is None:
            raise EngineError(
                "no engine is attached to this memory; all text is safe and can be read, searched, forked and exported",
                fix="Attach one: Memory.open(path, engine='smollm2'), a Hugging Face folder, an Engine or a Runtime",
            )
        if self._segments is None:
            raise EngineError(
                "the attached engine has no tokenizer, so text cannot become tokens",
                fix="Give Runtime(engine, text=...) a TextModel and open the memory with that runtime",
            )
        return self.runtime, self._segments

    def permit(self, lossy: str | None) -> None:
        """Raises ConfigError unless a session may be given that permission: None, ``exact``, or a level with a card.

        Without an engine it can be given, as a name: the next one that is attached decides.
        """
        if lossy is None or lossy == EXACT:
            return
        if self.runtime is None:
            check_lossy(lossy)
        else:
            self.runtime.permit(lossy)

    def lossy_of(self, record: Record) -> str | None:
        """The worst level that a session allows now; None: exact KV only."""
        said = self.lossy if record.lossy is None else record.lossy
        return None if said == EXACT else said

    def track(self, answer: Answer) -> None:
        """Remember an answer until it is let go of, so that closing the memory can end it."""
        with self._lock:
            self._answers.add(answer)

    def close(self) -> None:
        """Close every unfinished answer, so that what it has is stored, then all that is owned. Idempotent."""
        with self._lock:
            answers = list(self._answers)
        for answer in answers:
            answer.close()
        self.owned.close()


_open: WeakSet[Shared] = WeakSet()


@atexit.register
def _close_at_exit() -> None:
    # A script that ends without closing keeps its half answers, and leaves no thread behind that stops the exit.
    for shared in list(_open):
        with suppress(StoreError):  # one that cannot close must not keep the others from it
            shared.close()
