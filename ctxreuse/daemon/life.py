"""The life of a daemon: bind, open, ready, drain, close; every step short, in order, and seen from outside.

::

    bind ──> starting ──────> ready ──────────> draining ───────────────> stopped
             /healthz 200     /readyz 200       /readyz 503               resources closed, last
             /readyz  503     address file      no new connections,       opened first; address
             resources open   READY=1           answers end, or are       file gone; exit code
                                                cancelled at the deadline

The server is uvicorn's; signals, deadlines and exit code are ours. The first SIGTERM or SIGINT drains, a second one
cancels what is under way, and five seconds later the process ends wherever it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal

import msgspec
import uvicorn

from ctxreuse.daemon.notify import notify, watchdog_seconds
from ctxreuse.errors import ConfigError

__all__ = ["Address", "Daemon", "State", "read_address"]

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "draining", "stopped"]

# Seconds that a forced stop leaves for closing the store.
_FORCED = 5.0
# A terminal or a wrapper such as timeout(1) may signal the process and its group: that is one wish, not two.
_ECHO = 0.5
# What cancelled answers may take to keep what they have.
_CANCELLED = 10.0


class Address(msgspec.Struct, frozen=True):
    """Where a running daemon can be reached, as its address file says."""

    url: str
    pid: int
    name: str
    since: float


def read_address(file: Path) -> Address | None:
    """What the address file says; None if there is none or it is not one. The daemon may have died since."""
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(file.read_bytes(), type=Address)
    return None


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Daemon:
    """One HTTP server with resources around it. ``stop`` and the properties may be used from any thread.

    ``drain``: seconds that answers under way may take after the first signal. ``linger``: seconds between saying that
    it is not ready and refusing connections, for balancers that look at ``/readyz``. ``address_file`` is written when
    the daemon is ready and removed when it stops.
    """

    def __init__(
        self,
        name: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        drain: float = 30.0,
        linger: float = 0.0,
        address_file: Path | None = None,
    ) -> None:
        self.name, self.drain, self.linger, self.address_file = name, drain, linger, address_file
        self._host, self._port = host, port
        self._socket: socket.socket | None = None
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _Server | None = None
        self._lock = threading.Lock()
        self._stops = 0
        self._signal = 0
        self._told = 0.0
        self._killer: threading.Timer | None = None
        self._owns_process = False
        self.state: State = "starting"
        self.url = ""

    def not_ready(self) -> str:
        """Why requests should go elsewhere; "" while this daemon is ready."""
        return "" if self.state == "ready" else self.state

    def bind(self) -> str:
        """Take the address, so that a port in use is an error before anything is opened; returns the URL.

        Raises ConfigError.
        """
        try:
            family, kind, proto, _, where = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._socket = socket.socket(family, kind, proto)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(where)
            self._socket.listen(2048)
        except OSError as error:
            self._unbind()
            raise ConfigError(
                f"cannot listen: {error.strerror or error}",
                where=f"{self._host}:{self._port}",
                fix="Another program may use that port: choose one with --port, or 0 for any free one",
            ) from None
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return self.url

    def run(self, app: Any, resources: Callable[[], AbstractAsyncContextManager[object]]) -> int:
        """Serve the ASGI ``app`` until told to stop; returns the exit code (0: stopped in order, 128 + signal: forced).

        ``resources`` is entered while the server already answers probes and left when the last answer has ended. What
        entering raises is raised here.
        """
        try:
            return asyncio.run(self.serve(app, resources))
        finally:
            self._unbind()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Drain; a second call cancels what is under way. Any thread."""
        with self._lock:
            if self._loop is None:
                self._stop(number)
                return
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._stop, number)

    async def serve(self, app: Any, resources: Callable[[], AbstractAsyncContextManager[object]]) -> int:
        """`run` for those who have a loop; signals are taken only in the main thread."""
        if self._socket is None:
            self.bind()
        assert self._socket is not None
        with self._lock:
            self._loop = asyncio.get_running_loop()
        server = self._server = _Server(self._settings(app))
        serving = asyncio.create_task(server.serve(sockets=[self._socket]))
        with self._signals():
            log.info("listening", extra={"daemon": self.name, "url": self.url})
            try:
                async with resources():
                    if not self._stops:
                        self._ready()
                    await self._until_stopped(serving)
                    self.state = "draining"
                    notify("STOPPING=1")
                    log.info("draining", extra={"seconds": self.drain})
                    await asyncio.sleep(self.linger)
                    await self._shut(serving)
            finally:
                # Also where opening failed: the server must not outlive the resources that it serves.
                await self._shut(serving)
                self._remove_address()
                self.state = "stopped"
        if self._killer is not None:
            self._killer.cancel()
        log.info("stopped", extra={"daemon": self.name})
        return 128 + self._signal if self._stops > 1 else 0

    def _settings(self, app: Any) -> uvicorn.Config:
        return uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_keep_alive=30,
            timeout_graceful_shutdown=math.ceil(self.drain),
        )

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        taken = (signal.SIGTERM, signal.SIGINT)
        for number in taken:
            loop.add_signal_handler(number, self._stop, number)
        self._owns_process = True
        try:
            yield
        finally:
            for number in taken:
                loop.remove_signal_handler(number)

    def _stop(self, number: int) -> None:
        now = time.monotonic()
        if self._stops and now - self._told < _ECHO:
            return
        self._told = now
        self._stops += 1
        self._signal = number
        self._stopping.set()
        if self._stops == 2:
            log.warning("forced to stop: answers under way are cancelled")
            if self._server is not None:
                self._server.force_exit = True
            if self._owns_process:
                self._killer = threading.Timer(_FORCED, os._exit, (128 + number,))
                self._killer.daemon = True
                self._killer.start()

    def _ready(self) -> None:
        if self._owns_process:
            # What is there now stays: looking through it again and again would stop all answers for 10 to 100 ms.
            gc.collect()
            gc.freeze()
        self.state = "ready"
        self._write_address()
        notify("READY=1", f"STATUS=Serving on {self.url}")
        log.info("ready", extra={"daemon": self.name, "url": self.url})

    async def _until_stopped(self, serving: asyncio.Task[None]) -> None:
        beat = watchdog_seconds() / 2
        told = asyncio.create_task(self._stopping.wait())
        try:
            while not (told.done() or serving.done()):
                if beat:
                    notify("WATCHDOG=1")
                await asyncio.wait({told, serving}, timeout=beat or None, return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()

    async def _shut(self, serving: asyncio.Task[None]) -> None:
        server = self._server
        if server is None:
            return
        server.should_exit = True
        await asyncio.wait([serving])
        if server.force_exit:
            for task in list(server.server_state.tasks):
                task.cancel()
        if server.server_state.tasks:
            await asyncio.wait(server.server_state.tasks, timeout=_CANCELLED)
        self._server = None
        serving.result()

    def _write_address(self) -> None:
        if self.address_file is None:
            return
        body = msgspec.json.encode(Address(self.url, os.getpid(), self.name, time.time()))
        fresh = self.address_file.with_name(self.address_file.name + ".new")
        fresh.write_bytes(body)
        fresh.replace(self.address_file)

    def _remove_address(self) -> None:
        file = self.address_file
        if file is not None and (found := read_address(file)) is not None and found.url == self.url:
            file.unlink(missing_ok=True)

    def _unbind(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
