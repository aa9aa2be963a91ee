"""Fetches the calibration profiles that clouds encode with, to read their lossy blocks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ctxreuse.bus.protocol.base import Link
from ctxreuse.codec import ProfileStore, model_digest, read_profile
from ctxreuse.errors import CtxReuseError, FormatError, LinkError
from ctxreuse.identity.model import ModelSpace

__all__ = ["ProfileFetcher", "ProfileSource"]

log = logging.getLogger(__name__)

#: Seconds between checks of the links, for one profile to arrive (68 MB of a small model with joint levels, over a link
#: of 200 kbit/s), and until a missing profile is requested again.
_LOOK, _WAIT, _AGAIN = 0.5, 3600.0, 60.0


class ProfileSource(Link, Protocol):
    """A link that can fetch profiles, such as `ctxreuse.bus.transport.BusClient`."""

    def fetch_profile(self, space: bytes, digest: bytes, timeout: float) -> bytes:
        """Return the bytes of a profile. Raises LinkError, FormatError."""


class ProfileFetcher:
    """Adds every profile that a link names for ``space`` to ``profiles``, in a background thread. Close it. Any thread
    may call.

    Args:
        links: Where profiles come from.
        space: The model space.
        profiles: Where they go.
        on_forged: Called as ``on_forged(name, reason)`` for a link whose bytes are not those that it named.
        on_profile: Called when a profile was added.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        links: Sequence[ProfileSource],
        space: ModelSpace,
        profiles: ProfileStore,
        *,
        on_forged: Callable[[str, str], None],
        on_profile: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._links, self._space, self._profiles = tuple(links), space, profiles
        self._on_forged, self._on_profile, self._clock = on_forged, on_profile, clock
        self._later: dict[tuple[str, bytes], float] = {}
        self._forged: set[tuple[str, bytes]] = set()
        self._whole: set[bytes] = set()
        #: Profiles added, profiles refused, and bytes of the former.
        self.taken = self.refused = self.nbytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ctxreuse-cards", daemon=True)
        self._thread.start()

    def fetch_missing(self) -> int:
        """Fetch missing profiles now; returns how many were added."""
        before = self.taken
        for link in self._links:
            welcome = link.welcome
            if link.state != "up" or welcome is None:
                continue
            for space, digest in welcome.cards:
                if space == self._space.digest and not self._stop.is_set():
                    self._get(link, digest)
        return self.taken - before

    def _get(self, link: ProfileSource, digest: bytes) -> None:
        name = link.name, digest
        if name in self._forged or self._later.get(name, 0.0) > self._clock() or self._stored(digest):
            return
        try:
            data = link.fetch_profile(self._space.digest, digest, _WAIT)
            if read_profile(data).model != model_digest(self._space):
                raise FormatError("the profile is for another model", where=digest.hex()[:16])
            self._profiles.add(data)
        except LinkError as error:
            self._later[name] = self._clock() + _AGAIN
            log.info("a calibration profile of %s did not arrive: %s", link.name, error)
        except FormatError as error:
            self._forged.add(name)
            self.refused += 1
            log.warning("a calibration profile of %s is refused: %s", link.name, error)
            self._on_forged(link.name, "card")
        except (CtxReuseError, OSError) as error:
            self._later[name] = self._clock() + _AGAIN
            log.warning("a calibration profile cannot be stored: %s", error)
        else:
            self.taken += 1
            self.nbytes += len(data)
            log.info("calibration profile %s of %s was added", digest.hex()[:16], link.name)
            self._on_profile()

    def _stored(self, digest: bytes) -> bool:
        if digest in self._whole and self._profiles.holds(self._space, digest.hex()[:16]):
            return True  # it was read and compared, which takes a while
        try:
            found = self._profiles.find(self._space, digest.hex()[:16]) is not None
        except (CtxReuseError, OSError):
            found = False  # damaged: a good one takes its place
        if found:
            self._whole.add(digest)
        return found

    def _run(self) -> None:
        while not self._stop.wait(_LOOK):
            try:
                self.fetch_missing()
            except Exception:
                log.exception("fetching calibration profiles failed")

    def close(self) -> None:
        """End the thread, after the running fetch (which ends when its link is closed). Idempotent."""
        self._stop.set()
        self._thread.join()
