"""What a page shows, as messages of what has changed since the last one; nothing is computed unwatched.

A message is JSON: ``{"full": true, "set": {panel: value}, "rows": {panel: {"put": {id: row}, "drop": [id]}}}``. With
``full`` it stands for all there is, else for what has changed since the message before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from ctxreuse.bus.log_limit import LimitedLog
from ctxreuse.daemon.openai import ApiError

__all__ = ["Feed", "Panels", "Rows"]

log = logging.getLogger(__name__)


class Rows(dict[str, Any]):
    """A panel of rows by id, of which only those that change are sent; the same object again: none has changed."""


#: Makes the values of one panel each. Called in a thread, one at a time.
Panels: TypeAlias = Mapping[str, Callable[[], Any]]

#: Seconds without a change after which a comment shows that the feed is alive.
_SILENCE = 10.0
#: Rows that have gone of which each panel knows: who saw an earlier state gets all again.
_DROPPED = 4096
#: Share of a core that one panel may take: the next round of one that took long comes later.
_SHARE = 0.004


class _Value:
    """A panel that is one value; ``version``: of the round in which it changed last."""

    def __init__(self) -> None:
        self.version, self.raw = 0, b""

    def take(self, found: Any, version: int) -> None:
        """Note what the panel is in this round."""
        raw = msgspec.json.encode(found)
        if raw != self.raw:
            self.version, self.raw = version, raw


class _Table:
    """A panel of rows."""

    def __init__(self) -> None:
        self.version = self._known = 0
        self._from: Rows | None = None
        self._rows: dict[str, tuple[int, bytes]] = {}
        self._dropped: deque[tuple[int, str]] = deque(maxlen=_DROPPED)

    def take(self, found: Rows, version: int) -> None:
        """Note what the panel is in this round."""
        if found is self._from:
            return
        self._from = found
        for name in [name for name in self._rows if name not in found]:
            del self._rows[name]
            if len(self._dropped) == _DROPPED:
                self._known = self._dropped[0][0]
            self._dropped.append((version, name))
            self.version = version
        for name, row in found.items():
            raw = msgspec.json.encode(row)
            if (before := self._rows.get(name)) is None or before[1] != raw:
                self._rows[name] = version, raw
                self.version = version

    def since(self, version: int) -> dict[str, Any]:
        """The rows that changed after a version, or all of them."""
        whole = version < self._known or not version
        put = {name: msgspec.Raw(raw) for name, (at, raw) in self._rows.items() if whole or at > version}
        if whole:
            return {"all": True, "put": put, "drop": []}
        return {"put": put, "drop": [name for at, name in self._dropped if at > version and name not in self._rows]}


class Feed:
    """The panels of one daemon for all who watch; owned by one event loop.

    Args:
        panels: what makes each panel; one that fails is left as it was, and logged.
        idle: called when the last reader has left.
        ended: true when feeds are to end, so that a daemon that drains does not wait for pages.
        interval: seconds between two rounds.
        most: feeds at a time.
    """

    def __init__(
        self,
        panels: Panels,
        *,
        idle: Callable[[], None] = lambda: None,
        ended: Callable[[], bool] = lambda: False,
        interval: float = 1.0,
        most: int = 16,
    ) -> None:
        self._idle = idle
        self._panels, self._ended, self._interval, self._most = panels, ended, interval, most
        self._changed = asyncio.Condition()
        self._version, self._watching = 0, 0
        self._values: dict[str, _Value] = {}
        self._tables: dict[str, _Table] = {}
        self._due: dict[str, float] = {}
        self._messages: dict[int, bytes] = {}
        self._task: asyncio.Task[None] | None = None
        self._failures = LimitedLog(log)
        #: Rounds so far.
        self.rounds = 0

    def events(self) -> AsyncIterator[bytes]:
        """Return server-sent events until the reader leaves. Raises ApiError (429) where too many watch already."""
        if self._watching >= self._most:
            text = f"{self._most} pages watch this daemon already"
            raise ApiError(429, text, type="rate_limit_error", code="too_many_requests", retry_after=10)
        return self._events()

    async def _events(self) -> AsyncIterator[bytes]:
        self._watching += 1
        try:
            if self._task is None:
                self._task = asyncio.create_task(self._work())
            seen = 0
            while not self._ended():
                try:
                    async with asyncio.timeout(_SILENCE), self._changed:
                        while self._version <= seen and not self._ended():
                            await self._changed.wait()
                except TimeoutError:
                    yield b":\n\n"
                    continue
                if self._version > seen:
                    message, seen = self._message(seen), self._version
                    yield b"data: " + message + b"\n\n"
        finally:
            self._watching -= 1

    def _message(self, seen: int) -> bytes:
        """The changes since a version; made once for all who saw that."""
        found = self._messages.get(seen)
        if found is None:
            values = {name: msgspec.Raw(one.raw) for name, one in self._values.items() if one.version > seen}
            rows = {name: one.since(seen) for name, one in self._tables.items() if one.version > seen or not seen}
            message: dict[str, Any] = {"full": True} if not seen else {}
            found = self._messages[seen] = msgspec.json.encode(message | {"set": values, "rows": rows})
        return found

    async def _work(self) -> None:
        try:
            while self._watching and not self._ended():
                found = await asyncio.to_thread(self._round)
                async with self._changed:
                    self._take(found)
                    self._changed.notify_all()
                await asyncio.sleep(self._interval)
        finally:
            # The next reader starts from nothing, and until then nothing is kept.
            self._values, self._tables, self._messages, self._due = {}, {}, {}, {}
            self._version, self._task = 0, None
            self._idle()
            async with self._changed:
                self._changed.notify_all()

    def _round(self) -> dict[str, Any]:
        """The values of all panels that are due."""
        found: dict[str, Any] = {}
        now = time.monotonic()
        for name, make in self._panels.items():
            if self._due.get(name, 0.0) > now:
                continue
            began = time.thread_time()
            try:
                found[name] = make()
            except Exception as error:  # a failing store must not hide what would show it
                self._failures.write("", logging.WARNING, "the page's panel %s is not up to date: %s", name, error)
            self._due[name] = now + (time.thread_time() - began) / _SHARE
        return found

    def _take(self, found: Mapping[str, Any]) -> None:
        version = self._version + 1
        for name, value in found.items():
            if isinstance(value, Rows):
                self._tables.setdefault(name, _Table()).take(value, version)
            else:
                self._values.setdefault(name, _Value()).take(value, version)
        panels: list[_Value | _Table] = [*self._values.values(), *self._tables.values()]
        if any(one.version == version for one in panels):
            self._version = version
            self._messages.clear()
        self.rounds += 1
