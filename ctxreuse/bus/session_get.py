"""Asking a cloud for blocks: the edge's side of one match, fetch or prefill, and of fetching a card."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ctxreuse.bus import wire
from ctxreuse.bus.base import Matched
from ctxreuse.bus.session import Request
from ctxreuse.bus.transfer import Assembly
from ctxreuse.bus.transfer_card import CardAssembly
from ctxreuse.errors import ProtocolError

__all__ = ["Allow", "Asking", "Getting"]


class Asking(msgspec.Struct, eq=False):
    """A match that waits for its answer."""

    request: Request[Matched]
    message: wire.Match
    asked: bool = False


class Allow(msgspec.Struct, frozen=True):
    """At which levels blocks may come: the ``wish`` as it is told, and ``speed()``, bytes/s that the link brings now
    (0: not known), which go with each credit, and ``heard``, which is told each payload's pace; both are called in the
    link's thread."""

    wish: wire.Wish = wire.Wish()
    speed: Callable[[], float] = lambda: 0.0
    heard: Callable[[wire.Pace], None] = lambda _: None


class Getting:
    """One fetch (``tokens`` None) or prefill (``tokens`` of the whole context), or that of a card, on its way. Owned by
    a `ClientSession`.

    ``idle`` counts connections in a row that brought nothing.
    """

    def __init__(
        self,
        assembly: Assembly | CardAssembly,
        tokens: bytes | None,
        payload: int,
        window: int,
        allow: Allow | None = None,
    ) -> None:
        if window < 1:
            raise ValueError(f"a window of {window} payloads")
        self.assembly, self.payload = assembly, payload
        self._allow = allow or Allow()
        self.number, self.round, self.open = 0, 0, False
        self.got = self.upto = self.idle = 0
        self._tokens, self._wanted, self._window = tokens, window, window
        self._before = 0

    def offer(self, number: int, payload: int, most: int) -> wire.Fetch | wire.Prefill | wire.FetchCard:
        """The message that opens it on this connection; at most ``most`` payloads are granted ahead."""
        assembly = self.assembly
        self.number, self.round, self.open = number, self.round + 1, True
        self._window = min(self._wanted, most)
        self.got, self.upto, self._before = 0, self._window, assembly.received
        if isinstance(assembly, CardAssembly):
            name = assembly.space, assembly.digest
            return wire.FetchCard(number, self.round, *name, payload, assembly.have(), self.upto)
        wish = self._allow.wish
        if wish.levels and self.round > 1 and wish.deadline_ms:
            # What the cut took of the time is not known here: what still lacks is late already.
            wish = msgspec.structs.replace(wish, bandwidth=self._speed(), deadline_ms=1)
        space, have, state = assembly.space.digest, assembly.have(), assembly.wants_state
        if self._tokens is None:
            keys = wire.joined(assembly.keys)
            return wire.Fetch(number, self.round, space, keys, state, assembly.order, payload, have, self.upto, wish)
        ids, first = self._tokens, assembly.first
        return wire.Prefill(number, self.round, space, ids, first, state, payload, have, self.upto, wish)

    def arrived(self, nbytes: int, most: int, pace: wire.Pace = ()) -> None:
        """Another payload is here; ProtocolError if it was not granted or has more than ``most`` bytes."""
        self.got += 1
        self._allow.heard(pace)
        if self.got > self.upto or nbytes > most:
            raise ProtocolError(f"payload {self.got} of {nbytes} bytes with credit for {self.upto}", where="fetch")

    @property
    def owes(self) -> bool:
        """True when half of the credit is used up."""
        return self.upto - self.got <= self._window // 2

    def grant(self) -> wire.Credit:
        """Extend the credit to the full window."""
        self.upto = self.got + self._window
        return wire.Credit(self.number, self.round, self.upto, self._speed())

    def _speed(self) -> int:
        return max(int(self._allow.speed()), 0) if self._allow.wish.levels else 0

    def stop(self) -> None:
        """This connection is over."""
        if self.open:
            self.open = False
            self.idle = self.idle + 1 if self.assembly.received == self._before else 0
