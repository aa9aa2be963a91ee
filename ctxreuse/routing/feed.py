"""The events of one engine in their order: what was lost on the way is asked for again, else known to be lost.

Batches are numbered from 0. One that comes too early waits while those before it are replayed; if the engine cannot say
them any more, all is forgotten and what comes next is only part of what the engine has. What is known is *whole* again
when the engine starts again or says that it has nothing.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from ctxreuse.errors import FormatError
from ctxreuse.routing.events import BlocksStored, Cleared, parse_batch
from ctxreuse.routing.reported import PromptTokens, ReportedBlocks

__all__ = ["EventFeed", "Reported", "Source"]

#: Early batches that wait for a replay.
_WAITING = 1024
#: Media whose blocks outlive the engine, which says nothing of those from before its start.
_FORGETFUL = ("GPU", "CPU", "CPU_PINNED")

#: Where it is known from what a node has: its events, events and what it was sent, or only what it was sent.
Source: TypeAlias = Literal["events", "both", "text"]


class Reported(NamedTuple):
    """Leading tokens of a prompt that an engine has; ``whole``: and no more of them."""

    tokens: int
    whole: bool


class EventFeed:
    """What one engine has, by its events. Not thread-safe.

    A caller passes on what comes (`receive`), asks for a replay when it is due, passes on its batches (`replay`) and
    says when it has ended, or could not be had (`replayed`).
    """

    def __init__(self, blocks: ReportedBlocks | None = None) -> None:
        self.blocks = blocks if blocks is not None else ReportedBlocks()
        #: Batches that are known to be lost, or were none.
        self.lost = 0
        self._next: int | None = None
        self._time = float("-inf")
        self._whole = False
        self._outlives = False
        self._waiting: dict[int, bytes] = {}

    @property
    def source(self) -> Source:
        """What `match` goes by."""
        if self._next is None:
            return "text"
        return "events" if self._whole and self.blocks.complete and not self._outlives else "both"

    def match(self, prompt: PromptTokens) -> Reported | None:
        """Return what the engine has of a prompt; None: nothing is known."""
        source = self.source
        return None if source == "text" else Reported(self.blocks.match(prompt), source == "events")

    def receive(self, number: int, data: bytes) -> int | None:
        """Take a batch; return the number from which batches should be replayed, if any are missing."""
        if self._next is not None and number < self._next:
            if not self._restarted(data):
                return None  # a second time
            self.disconnected()
        if number == (self._next or 0):
            self._take(number, data)
            self._drain(gaps=False)
            return None
        self._waiting[number] = data
        while len(self._waiting) > _WAITING:
            del self._waiting[min(self._waiting)]
        return self._next or 0

    def _restarted(self, data: bytes) -> bool:
        try:
            return parse_batch(data).time > self._time
        except FormatError:
            return False

    def replay(self, number: int, data: bytes) -> None:
        """Take a batch of a replay, whose batches come in order."""
        self._take(number, data)

    def replayed(self) -> None:
        """Go on with what came meanwhile: no further batch comes from before."""
        self._drain(gaps=True)

    def _drain(self, *, gaps: bool) -> None:
        for number in sorted(self._waiting):
            if not gaps and self._next is not None and number > self._next:
                return
            self._take(number, self._waiting.pop(number))

    def _take(self, number: int, data: bytes) -> None:
        """Apply a batch, after all that came before it or with what is between forgotten."""
        if self._next is None:
            self._whole = number == 0
            self.lost += number > 0
        elif number < self._next:
            return
        elif number > self._next:
            self._forget(number - self._next)
        self._next = number + 1
        try:
            batch = parse_batch(data)
        except FormatError:
            self._forget(1)
            return
        self._time = max(self._time, batch.time)
        for event in batch.events:
            self.blocks.apply(event)
            if isinstance(event, Cleared):
                self._whole = True
            elif isinstance(event, BlocksStored):
                self._outlives |= not event.place.startswith(_FORGETFUL)

    def _forget(self, lost: int) -> None:
        self.lost += lost
        self.blocks.clear()
        self._whole = False

    def disconnected(self) -> None:
        """Forget all: batches may be lost, or the engine has started again."""
        self.blocks.clear()
        self._waiting.clear()
        self._next, self._whole, self._outlives = None, False, False

    def check(self) -> None:
        """Raise AssertionError if a bound or a count is wrong."""
        self.blocks.check()
        assert len(self._waiting) <= _WAITING, "too many batches wait"
        assert self._next is None or all(number > self._next for number in self._waiting), "a batch waits for nothing"
