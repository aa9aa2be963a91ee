"""MemoryNode: a served node without sockets, whose messages are those that would be on the wire."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ctxreuse.bus.base import Greeting, Matched, Service
from ctxreuse.bus.session import Request
from ctxreuse.bus.session_client import ClientSession, Stored
from ctxreuse.bus.session_get import Allow
from ctxreuse.bus.session_server import ServerSession
from ctxreuse.bus.transfer import Assembly, Outlet
from ctxreuse.bus.wire import Wish
from ctxreuse.errors import LinkError
from ctxreuse.keys import ROOT, Tokens
from ctxreuse.model import ModelSpace
from ctxreuse.runtime.remote import Order
from ctxreuse.store.base import Buffer

__all__ = ["MemoryLink", "MemoryNode"]


class MemoryLink:
    """A `Link` over two sessions and no transport; a thread of its own carries the messages."""

    def __init__(
        self, service: Service, outlet: Outlet, user: str, spaces: Sequence[bytes], shared: threading.RLock
    ) -> None:
        self.name = f"memory-{user}"
        self._lock = threading.RLock()
        self._client = ClientSession(node=user.encode().ljust(16)[:16], spaces=spaces)
        self._server = ServerSession(service, user, outlet, node=b"cloud".ljust(16), epoch=1)
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
    def welcome(self) -> Greeting | None:
        """See `Link.welcome`."""
        return self._client.welcome

    @property
    def resumes(self) -> int:
        """Fetches that were opened again."""
        return self._client.counts["resumes"]

    def match(self, space: bytes, keys: Sequence[bytes], timeout: float) -> Matched | None:
        """See `Link.match`."""
        with self._lock:
            request = self._client.match(space, keys)
        try:
            return request.wait(timeout)
        except LinkError:
            return None

    def announced(self, keys: Sequence[bytes]) -> int | None:
        """See `Link.announced`."""
        return self._client.announced(keys)

    def fetch(
        self,
        space: ModelSpace,
        keys: Sequence[bytes],
        tokens: Tokens,
        *,
        first: int = 0,
        order: Order = "layers",
        state: bool = False,
        payload: int = 0,
        window: int = 8,
        wish: Wish | None = None,
    ) -> Assembly:
        """See `Link.fetch`."""
        assembly = Assembly.of_context(space, keys, tokens, first, order=order, state=state, levels=_levels(wish))
        with self._lock:
            self._client.fetch(assembly, payload=payload, window=window, allow=Allow(wish or Wish()))
        return assembly

    def prefill(
        self,
        space: ModelSpace,
        keys: Sequence[bytes],
        tokens: Tokens,
        *,
        first: int = 0,
        state: bool = False,
        payload: int = 0,
        window: int = 8,
        wish: Wish | None = None,
    ) -> Assembly:
        """See `Link.prefill`."""
        assembly = Assembly.of_context(space, keys, tokens, first, order="layers", state=state, levels=_levels(wish))
        ids, allow = tokens[: len(keys) * space.block_tokens], Allow(wish or Wish())
        with self._lock:
            self._client.prefill(assembly, ids, payload=payload, window=window, allow=allow)
        return assembly

    def put(
        self,
        space: bytes,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        read: Callable[[int], Buffer],
        *,
        parent: bytes = ROOT,
        state: bool = False,
        timeout: float = 60.0,
    ) -> Stored:
        """See `Link.put`."""
        with self._lock:
            request: Request[Stored] = self._client.put(space, keys, sizes, read, parent=parent, state=state)
        return request.wait(timeout)


def _levels(wish: Wish | None) -> tuple[str, ...]:
    return wish.levels if wish is not None else ()


class MemoryNode:
    """A `Node` in memory: no sockets, all messages as they would be on the wire."""

    def __init__(self, service: Service) -> None:
        self._service, self._outlet, self._lock = service, Outlet(), threading.RLock()
        self._links: list[MemoryLink] = []

    def link(self, user: str, spaces: Sequence[bytes]) -> MemoryLink:
        """See `Node.link`."""
        link = MemoryLink(self._service, self._outlet, user, spaces, self._lock)
        self._links.append(link)
        return link

    def close(self) -> None:
        """Close all links."""
        for link in self._links:
            link.close()
