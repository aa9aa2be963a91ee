"""MemoryNode: a served node without sockets, whose messages are those that would be on the wire."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ctxreuse.block.format import Buffer
from ctxreuse.bus.protocol.base import MatchResult, PutRequest, PutResult, Service
from ctxreuse.bus.protocol.client import ClientSession
from ctxreuse.bus.protocol.messages import Welcome
from ctxreuse.bus.protocol.server import ServerSession
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transfer.receive import FetchBuffer
from ctxreuse.bus.transfer.send import SendScheduler
from ctxreuse.errors import LinkError

__all__ = ["MemoryLink", "MemoryNode"]


class MemoryLink:
    """A `Link` over two sessions and no transport; a thread of its own carries the messages."""

    def __init__(
        self, service: Service, scheduler: SendScheduler, user: str, spaces: Sequence[bytes], shared: threading.RLock
    ) -> None:
        self.name = f"memory-{user}"
        self._lock = threading.RLock()
        self._client = ClientSession(node=user.encode().ljust(16)[:16], spaces=spaces)
        self._server = ServerSession(service, user, scheduler, node=b"cloud".ljust(16), epoch=1)
        self._shared = shared
        self._there: deque[list[bytes]] = deque()
        self._back: deque[list[bytes]] = deque()
        self._connected = self._closed = False
        #: Seconds from message to message.
        self.pace = 0.0
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            if not self._pump() or self.pace:
                time.sleep(self.pace or 0.001)

    def _pump(self) -> bool:
        now = time.monotonic()
        with self._lock, self._shared:
            if not self._connected:
                self._server.opened(now)
                self._client.opened(now)
                self._connected = True
            moved = False
            for session, out in ((self._client, self._there), (self._server, self._back)):
                session.tick(now)
                while len(out) < (1 if self.pace else 4) and (frames := session.next(now)) is not None:
                    out.append([bytes(frame) for frame in frames])
            for queue, session in ((self._there, self._server), (self._back, self._client)):
                while queue:
                    session.receive(queue.popleft(), now)
                    moved = True
            self._client.check()
            self._server.check()
            return moved

    def cut(self) -> None:
        """Lose the connection and all that is on its way; it comes back by itself."""
        now = time.monotonic()
        with self._lock, self._shared:
            self._there.clear()
            self._back.clear()
            self._client.lost(now)
            self._server.lost(now)
            self._connected = False

    def close(self) -> None:
        """End the thread and all requests."""
        self._closed = True
        self._thread.join()
        self._client.close()
        self._server.lost(time.monotonic())

    @property
    def state(self) -> str:
        """See `Link.state`."""
        return "up" if self._client.up else "refused" if self._client.refused is not None else "down"

    @property
    def welcome(self) -> Welcome | None:
        """See `Link.welcome`."""
        return self._client.welcome

    @property
    def resumes(self) -> int:
        """Fetches that were opened again."""
        return self._client.counts["resumes"]

    def match(self, space: bytes, keys: Sequence[bytes], timeout: float) -> MatchResult | None:
        """See `Link.match`."""
        with self._lock:
            request = self._client.match(space, keys)
        try:
            return request.wait(timeout)
        except LinkError:
            return None

    @property
    def withdrawn(self) -> frozenset[bytes]:
        """See `Link.withdrawn`."""
        return self._client.withdrawn()

    def announced(self, keys: Sequence[bytes]) -> int | None:
        """See `Link.announced`."""
        return self._client.announced(keys)

    def fetch(
        self,
        request: FetchRequest,
        keys: Sequence[bytes],
        *,
        payload: int = 0,
        window: int = 8,
        compute: bool = False,
        on_done: Callable[[float, float], None] | None = None,
    ) -> FetchBuffer:
        """See `Link.fetch`."""
        buffer = FetchBuffer(request, keys, on_done=on_done)
        with self._lock:
            self._client.fetch(buffer, payload=payload, window=window, compute=compute)
        return buffer

    def put(self, request: PutRequest, read: Callable[[int], Buffer], *, timeout: float = 60.0) -> PutResult:
        """See `Link.put`."""
        with self._lock:
            result = self._client.put(request, read)
        return result.wait(timeout)


class MemoryNode:
    """A `Node` in memory: no sockets, all messages as they would be on the wire."""

    def __init__(self, service: Service) -> None:
        self._service, self._scheduler, self._lock = service, SendScheduler(), threading.RLock()
        self._links: list[MemoryLink] = []

    def link(self, user: str, spaces: Sequence[bytes]) -> MemoryLink:
        """See `Node.link`."""
        link = MemoryLink(self._service, self._scheduler, user, spaces, self._lock)
        self._links.append(link)
        return link

    def close(self) -> None:
        """Close all links."""
        for link in self._links:
            link.close()
