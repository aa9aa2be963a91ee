"""Fetches the cards that clouds encode with, so that lossy blocks of theirs can be read here."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ctxreuse.bus.base import Greeting
from ctxreuse.codec import Shelf, model_digest, read_card
from ctxreuse.errors import CtxReuseError, FormatError, LinkError
from ctxreuse.model import ModelSpace

__all__ = ["Cards", "Lender"]

log = logging.getLogger(__name__)

#: Seconds between looks at the links, for one card on its way, and until a card that did not come is asked for again.
_LOOK, _WAIT, _AGAIN = 0.5, 300.0, 60.0


class Lender(Protocol):
    """A link as `ctxreuse.bus.zmqio.BusClient` offers it."""

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def welcome(self) -> Greeting | None: ...

    def card(self, space: bytes, digest: bytes, timeout: float) -> bytes:
        """The bytes of a card. Raises LinkError, FormatError."""
        ...


class Cards:
    """Puts every card that a link names for ``space``, and that ``shelf`` lacks, on the shelf: in a thread of its own,
    behind whatever requests are under way. Close it.

    ``on_lie(name, reason)`` is called for a link that sent something else than it had named, ``on_card()`` after a card
    has come. Any thread may call.
    """

    def __init__(
        self,
        links: Sequence[Lender],
        space: ModelSpace,
        shelf: Shelf,
        *,
        on_lie: Callable[[str, str], None],
        on_card: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._links, self._space, self._shelf, self._on_lie, self._clock = tuple(links), space, shelf, on_lie, clock
        self._on_card = on_card
        self._later: dict[tuple[str, bytes], float] = {}
        self._lied: set[tuple[str, bytes]] = set()
        #: Cards that came, that were refused, and bytes of those that came.
        self.taken = self.refused = self.nbytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ctxreuse-cards", daemon=True)
        self._thread.start()

    def look(self) -> int:
        """Fetch what lacks now; how many cards came."""
        before = self.taken
        for link in self._links:
            greeting = link.welcome
            if link.state != "up" or greeting is None:
                continue
            for space, digest in greeting.cards:
                if space == self._space.digest and not self._stop.is_set():
                    self._get(link, digest)
        return self.taken - before

    def _get(self, link: Lender, digest: bytes) -> None:
        name = link.name, digest
        if name in self._lied or self._later.get(name, 0.0) > self._clock() or self._held(digest):
            return
        try:
            data = link.card(self._space.digest, digest, _WAIT)
            if read_card(data).model != model_digest(self._space):
                raise FormatError("the card is for another model", where=digest.hex()[:16])
            self._shelf.add(data)
        except LinkError as error:
            self._later[name] = self._clock() + _AGAIN
            log.info("a card of %s did not come: %s", link.name, error)
        except FormatError as error:
            self._lied.add(name)
            self.refused += 1
            log.warning("a card of %s is refused: %s", link.name, error)
            self._on_lie(link.name, "card")
        except (CtxReuseError, OSError) as error:
            self._later[name] = self._clock() + _AGAIN
            log.warning("a card cannot be kept: %s", error)
        else:
            self.taken += 1
            self.nbytes += len(data)
            log.info("card %s of %s is here", digest.hex()[:16], link.name)
            self._on_card()

    def _held(self, digest: bytes) -> bool:
        try:
            return self._shelf.find(self._space, digest.hex()[:16]) is not None
        except (CtxReuseError, OSError):
            return False  # it is damaged: a good one takes its place

    def _run(self) -> None:
        while not self._stop.wait(_LOOK):
            try:
                self.look()
            except Exception:
                log.exception("looking for cards failed")

    def close(self) -> None:
        """End the thread, after the card that is on its way (which ends when its link is closed). Idempotent."""
        self._stop.set()
        self._thread.join()
