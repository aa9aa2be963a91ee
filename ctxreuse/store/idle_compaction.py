"""When a store is compacted by itself: some time after a deletion if the machine is idle, within a day in any case."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ctxreuse.errors import StoreError

__all__ = ["IdleCompaction"]

log = logging.getLogger(__name__)

#: Seconds after the first deletion until idle time is used, until it is done in any case, and after a failure.
_SETTLED, _LATEST, _RETRY = 600.0, 20 * 3600.0, 600.0


class IdleCompaction:
    """Decides when to compact. One thread calls.

    Args:
        since: returns when the first deletion was that is still in the files, seconds since 1970; None: none.
        work: compacts. Raises StoreError.
        busy: returns True while a request is served.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        since: Callable[[], float | None],
        work: Callable[[], object],
        busy: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._since, self._work, self._busy, self._clock = since, work, busy, clock
        self._failed: float | None = None

    def round(self) -> bool:
        """Compact if it is time; returns True if that was done. After a failure it waits ten minutes."""
        now = self._clock()
        if self._failed is not None and 0 <= now - self._failed < _RETRY:
            return False
        since = self._since()
        if since is None:
            return False
        age = now - since
        # A clock that was set back must not put it off for ever.
        if 0 <= age < _SETTLED or (self._busy() and 0 <= age < _LATEST):
            return False
        try:
            self._work()
        except StoreError as error:
            self._failed = now
            log.warning("deleted texts are still in the files: %s", error)
            return False
        log.info("files were rewritten without what was deleted")
        return True
