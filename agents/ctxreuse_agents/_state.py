"""The state that all sessions of one memory share: ledger, runtime, token segments, turn locks, unfinished answers."""

from __future__ import annotations

import atexit
import threading
from contextlib import ExitStack, suppress
from weakref import WeakSet, WeakValueDictionary

from ctxreuse.block.levels import check_limit
from ctxreuse.errors import EngineError, StoreError
from ctxreuse.runtime import RuntimeProtocol
from ctxreuse.store import Ledger
from ctxreuse_agents.answer import Answer
from ctxreuse_agents.segments import Segments
from ctxreuse_agents.turn_lock import TurnLock

__all__ = ["MemoryState"]


class MemoryState:
    """Thread-safe. ``runtime`` is None without an engine; ``max_kl``: limit of sessions without one of their own."""

    def __init__(
        self, ledger: Ledger, runtime: RuntimeProtocol | None, *, readonly: bool, max_kl: float | None = None
    ) -> None:
        self.ledger, self.runtime, self.max_kl = ledger, runtime, max_kl
        self._segments: Segments | None = None
        if runtime is not None and runtime.text is not None:
            self._segments = Segments(ledger, runtime.text, runtime.space, readonly=readonly)
        self._lock = threading.Lock()
        self._locks: WeakValueDictionary[str, TurnLock] = WeakValueDictionary()
        self._answers: WeakSet[Answer] = WeakSet()
        #: Closed with the memory, last opened first.
        self.owned = ExitStack()
        _open.add(self)

    def lock_of(self, session_id: str) -> TurnLock:
        """Return the turn lock of a session, the same for all handles; keep a reference while owning it."""
        with self._lock:
            return self._locks.setdefault(session_id, TurnLock())

    def engine(self) -> tuple[RuntimeProtocol, Segments]:
        """Return runtime and token segments. Raises EngineError if there is no engine, or no tokenizer."""
        if self.runtime is None:
            raise EngineError(
                "no engine is attached to this memory; its text can be read, searched, forked and exported",
                fix="Use Memory.open(path, engine=...) with a model name, a model folder, an Engine or a Runtime",
            )
        if self._segments is None:
            raise EngineError(
                "the engine has no tokenizer",
                fix="Open the memory with a Runtime that has RuntimeOptions(text=...), a TextModel",
            )
        return self.runtime, self._segments

    def check_max_kl(self, max_kl: float | None) -> None:
        """Raise ConfigError if no profile can keep that limit; without an engine it is checked later."""
        if check_limit(max_kl) is not None and self.runtime is not None:
            self.runtime.check_max_kl(max_kl)

    def track(self, answer: Answer) -> None:
        """Remember an answer while it is referenced, so that closing the memory can end it."""
        with self._lock:
            self._answers.add(answer)

    def close(self) -> None:
        """Close unfinished answers, which stores what they have, then everything it owns. Idempotent."""
        with self._lock:
            answers = list(self._answers)
        for answer in answers:
            answer.close()
        self.owned.close()


_open: WeakSet[MemoryState] = WeakSet()


@atexit.register
def _close_at_exit() -> None:
    # A script that ends without closing still stores its unfinished answers, and no thread blocks the exit.
    for state in list(_open):
        with suppress(StoreError):  # the others must still be closed
            state.close()
