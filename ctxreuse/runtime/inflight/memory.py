"""Lets prompts in by the memory that is really free: those that do not fit wait, as long as others give some back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctxreuse.runtime.context_cache import ContextCache
    from ctxreuse.runtime.inflight.sharing import PromptInFlight, PromptsInFlight
    from ctxreuse.runtime.steps.order import RequestTurn

__all__ = ["MemoryAdmission"]

#: The share of the free memory that contexts may take.
_SHARE = 0.9
#: Tokens of an answer that room is kept for; most are shorter than what their requests allow.
_ANSWER = 1024
#: Seconds between two looks at the free memory, and the longest that a prompt waits: who has the others may
#: wait for this one.
_LOOK, _PATIENCE = 1.0, 120.0


class MemoryAdmission:
    """Admits the prompts of one runtime. Any thread may call.

    ``available``: bytes that could be allocated now; ``clock``: seconds.
    """

    def __init__(
        self, inflight: PromptsInFlight, cache: ContextCache, available: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self._inflight, self._cache, self._available, self._clock = inflight, cache, available, clock
        self._each = inflight.engine.space.token_nbytes
        self._queue: list[tuple[int, int]] = []

    @property
    def waiting(self) -> int:
        """Prompts that wait for memory."""
        return len(self._queue)

    def enter(self, mine: PromptInFlight, turn: RequestTurn, tokens: int, reserve: int, forks: int = 0) -> None:
        """Wait until a prompt of ``tokens`` tokens and its answer have room, ``forks`` copies of both besides; evicts
        contexts of earlier requests.

        The most urgent one goes first, then who came first. Raises RequestCancelledError.
        """
        room, place = (1 + forks) * (tokens + min(reserve, _ANSWER)), (turn.priority, mine.number)
        end = self._clock() + _PATIENCE
        with self._inflight.change:
            self._queue.append(place)
            try:
                while not self._fits(mine, place, room) and self._clock() < end:
                    turn.check()
                    self._inflight.change.wait(_LOOK)
                mine.room = room
            finally:
                self._queue.remove(place)
                self._inflight.change.notify_all()

    def _fits(self, mine: PromptInFlight, place: tuple[int, int], room: int) -> bool:
        if min(self._queue) != place:
            return False
        others = [prompt.promised for prompt in self._inflight.table.prompts() if prompt is not mine and prompt.room]
        short = (room + sum(others)) * self._each - int(_SHARE * self._available())
        # Where nothing else is in flight, waiting would free nothing.
        return short <= 0 or self._cache.evict(short) >= short or not others
