"""The state that all sessions of one memory share: ledger, runtime, token segments, turn locks, unfinished answers."""

from __future__ import annotations

import atexit
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from weakref import WeakSet, WeakValueDictionary

from ctxreuse.block.levels import check_limit
from ctxreuse.errors import EngineError, GrammarError, StoreError
from ctxreuse.runtime import RuntimeProtocol
from ctxreuse.store import Ledger
from ctxreuse.store.recall import EmbedderChoice, Recall
from ctxreuse.toolcalls import Family, Tool, bind_tools, family_of, prompt_text
from ctxreuse_agents.answer import Answer
from ctxreuse_agents.retention import KeepLimits, SessionKeeper, Summarise
from ctxreuse_agents.segments import Segments
from ctxreuse_agents.turn_lock import TurnLock

__all__ = ["MemoryState"]

#: Sets of tools whose prompts are remembered.
_TOOL_SETS = 16


class MemoryState:
    """Thread-safe. ``runtime`` is None without an engine; ``max_kl``: limit of sessions without one of their own."""

    def __init__(
        self,
        ledger: Ledger,
        runtime: RuntimeProtocol | None,
        *,
        readonly: bool,
        max_kl: float | None = None,
        embedder: EmbedderChoice = "auto",
        language: str = "en",
    ) -> None:
        self.ledger, self.runtime, self.max_kl = ledger, runtime, max_kl
        self.readonly = readonly
        #: The index of all turns, made or brought up to date by the first search.
        self.recall = Recall(ledger, readonly=readonly, embedder=embedder, language=language)
        self.keeper: SessionKeeper
        self._segments: Segments | None = None
        self._tool_segments: OrderedDict[tuple[str, ...], Segments] = OrderedDict()
        if runtime is not None and runtime.text is not None:
            self._segments = Segments(ledger, runtime.text, runtime.space, readonly=readonly)
        self._lock = threading.Lock()
        self._locks: WeakValueDictionary[str, TurnLock] = WeakValueDictionary()
        self._answers: WeakSet[Answer] = WeakSet()
        #: Closed with the memory, last opened first.
        self.owned = ExitStack()
        _open.add(self)

    def keep(
        self, limits: Mapping[str, KeepLimits], delete: Callable[[str], object], summarise: Summarise | None
    ) -> None:
        """Have sessions kept within limits. Raises ConfigError."""
        self.keeper = SessionKeeper(self.ledger, self.recall, limits, delete, summarise)

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

    def tool_segments(self, tools: Sequence[Tool]) -> tuple[Segments, Family]:
        """Return token segments of prompts that show these tools, and how the model calls them.

        Raises what `engine` raises, and GrammarError for a tool whose text has one of the model's markers.
        """
        runtime, plain = self.engine()
        text = runtime.text
        assert text is not None
        family, texts = family_of(getattr(text, "template", "")), tuple(tool.text for tool in tools)
        marker = next((name for name in text.markers if any(name in shown for shown in texts)), None)
        if marker is not None:
            raise GrammarError(f"a tool's description has {marker!r}, which acts as a marker of the model")
        if not texts:
            return plain, family
        with self._lock:
            found = self._tool_segments.get(texts)
            if found is None:
                bound = bind_tools(prompt_text(text, family), texts)
                variant = hashlib.sha256("\0".join((family.name, *texts)).encode()).digest()
                found = Segments(self.ledger, bound, runtime.space, readonly=self.readonly, variant=variant)
                self._tool_segments[texts] = found
                while len(self._tool_segments) > _TOOL_SETS:
                    self._tool_segments.popitem(last=False)
        return found, family

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
        self.recall.close()
        self.owned.close()


_open: WeakSet[MemoryState] = WeakSet()


@atexit.register
def _close_at_exit() -> None:
    # A script that ends without closing still stores its unfinished answers, and no thread blocks the exit.
    for state in list(_open):
        with suppress(StoreError):  # the others must still be closed
            state.close()
