"""The life cycle of a daemon: bind, open, ready, drain, close; each step can be observed from outside.

::

    bind ──> starting ──────> ready ──────────> draining ───────────────> stopped
             /healthz 200     /readyz 200       /readyz 503               resources closed, last
             /readyz  503     address file      no new connections,       opened first; address
             resources open   READY=1           answers end, or are       file removed; exit
                                                cancelled at the deadline code

The server is uvicorn's; signals, deadlines and exit code are ours. The first SIGTERM or SIGINT drains, a second one
cancels running answers and ends the lingering, and five seconds later the process exits in any case.
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
from typing import Any, Literal, Protocol

import msgspec
import uvicorn

from ctxreuse.daemon.notify import notify, watchdog_seconds
from ctxreuse.daemon.protocol import protocol
from ctxreuse.daemon.tls import ServerCertificate
from ctxreuse.errors import ConfigError
from ctxreuse.kernels.dispatch import native as _native
from ctxreuse.private import write_private

__all__ = ["Daemon", "Reloaded", "RunningDaemon", "State", "read_address"]

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "draining", "stopped"]

# Seconds for closing the store after a forced stop.
_FORCED = 5.0
# Seconds within which a second signal is the same one: terminals and timeout(1) signal the process and its group.
_ECHO = 0.5
# Seconds for cancelled answers to store what they have.
_CANCELLED = 10.0
# Arenas of the C library. Each thread that allocates beside others makes one, whose holes no other thread fills: after
# 68,000 blocks and 5,000 mixed requests an edge held 147 MB with as many as there may be, and 129 MB with two.
_ARENAS = 2
# Seconds between looks at the files that are read again when they change.
_LOOK = 1.0


class Reloaded(Protocol):
    """Something read from files, which are read again when they change."""

    @property
    def name(self) -> str:
        """What it is, for the log."""

    def refresh(self) -> bool:
        """Read the files again if they have changed; returns whether. On ConfigError what was read before stays."""


class RunningDaemon(msgspec.Struct, frozen=True):
    """Address of a running daemon, as its address file has it; ``certificate``: file of its TLS certificate, or ""."""

    url: str
    pid: int
    name: str
    since: float
    certificate: str = ""


def read_address(file: Path) -> RunningDaemon | None:
    """Read an address file; None if there is none, or it is invalid. The daemon may have died since."""
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(file.read_bytes(), type=RunningDaemon)
    return None


def _not_cancelled(record: logging.LogRecord) -> bool:
    """Leave out the traceback that uvicorn logs for each answer that we cancel."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where it is installed (extra ``cloud``: a proxy lives in its event loop), else None."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Daemon:
    """One HTTP server with resources around it. ``stop`` and the properties are thread-safe.

    Args:
        name: its name in logs and the address file.
        host: address to listen on.
        port: port; 0: any free one.
        drain: seconds that running answers may take after the first signal.
        linger: seconds between answering 503 to ``/readyz`` and refusing connections, for load balancers.
        receive: seconds within which the headers of a request must arrive.
        address_file: written when the daemon is ready, removed when it stops.
        certificate: serves HTTPS with it; None: HTTP.
    """

    def __init__(
        self,
        name: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        drain: float = 30.0,
        linger: float = 0.0,
        receive: float = 30.0,
        address_file: Path | None = None,
        certificate: ServerCertificate | None = None,
    ) -> None:
        self._certificate = certificate
        #: Looked at every second while the daemon runs.
        self.reloaded: list[Reloaded] = [certificate] if certificate is not None else []
        self.name, self.drain, self.linger, self.address_file = name, drain, linger, address_file
        self._receive = receive
        self._host, self._port = host, port
        self._socket: socket.socket | None = None
        self._stopping, self._forced = asyncio.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _Server | None = None
        self._lock = threading.Lock()
        self._stops = 0
        self._signal = 0
        self._signalled = 0.0
        self._killer: threading.Timer | None = None
        self._owns_process = False
        self.state: State = "starting"
        self.url = ""

    def not_ready(self) -> str:
        """Return why requests should go elsewhere; "": ready."""
        return "" if self.state == "ready" else self.state

    def bind(self) -> str:
        """Bind the address, before anything is opened; returns the URL. Raises ConfigError."""
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
                fix="The port may be in use: choose another with --port, or 0 for any free one",
            ) from None
        host, port = self._socket.getsockname()[:2]
        scheme = "https" if self._certificate is not None else "http"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        return self.url

    def run(self, app: Any, resources: Callable[[], AbstractAsyncContextManager[object]]) -> int:
        """Serve the ASGI ``app`` until a signal stops it; returns the exit code (0, or 128 + signal if forced).

        ``resources`` is entered while the server already answers probes, and left when the last answer has ended; its
        errors are raised here.
        """
        _native.limit_arenas(_ARENAS)
        try:
            with asyncio.Runner(loop_factory=_fast_loop()) as runner:
                return runner.run(self.serve(app, resources))
        finally:
            self._unbind()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Drain; a second call cancels running answers. Thread-safe."""
        with self._lock:
            if self._loop is None:
                self._stop(number)
                return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop, number)

    async def serve(self, app: Any, resources: Callable[[], AbstractAsyncContextManager[object]]) -> int:
        """`run` for callers with a loop; signals are handled only in the main thread."""
        if self._socket is None:
            self.bind()
        assert self._socket is not None
        with self._lock:
            self._loop = asyncio.get_running_loop()
        server = self._server = _Server(self._settings(app))
        serving = asyncio.create_task(server.serve(sockets=[self._socket]))
        looking = asyncio.create_task(self._look())
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
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._forced.wait(), self.linger)
                    await self._shut(serving)
            finally:
                # Also if opening failed: the server must not outlive the resources.
                await self._shut(serving)
                looking.cancel()
                self._remove_address()
                self.state = "stopped"
        if self._killer is not None:
            self._killer.cancel()
        logging.getLogger("uvicorn.error").removeFilter(_not_cancelled)
        log.info("stopped", extra={"daemon": self.name})
        return 128 + self._signal if self._stops > 1 else 0

    def _settings(self, app: Any) -> uvicorn.Config:
        config = uvicorn.Config(
            app,
            http=protocol(self._receive),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_keep_alive=30,
            timeout_graceful_shutdown=math.ceil(self.drain),
        )
        if self._certificate is not None:
            config.load()
            config.ssl = self._certificate.context
        return config

    async def _look(self) -> None:
        said: dict[str, str] = {}
        while True:
            await asyncio.sleep(_LOOK)
            for one in self.reloaded:
                try:
                    if one.refresh():
                        log.info("%s read again", one.name)
                    said.pop(one.name, None)
                except ConfigError as error:
                    if said.get(one.name) != str(error):
                        said[one.name] = str(error)
                        log.error("%s not read again, the old stays in use: %s", one.name, error)

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
        if self._stops and now - self._signalled < _ECHO:
            return
        self._signalled = now
        self._stops += 1
        self._signal = number
        self._stopping.set()
        if self._stops == 2:
            logging.getLogger("uvicorn.error").addFilter(_not_cancelled)
            self._forced.set()
            log.warning("forced to stop: running answers are cancelled")
            if self._server is not None:
                self._server.force_exit = True
            if self._owns_process:
                self._killer = threading.Timer(_FORCED, os._exit, (128 + number,))
                self._killer.daemon = True
                self._killer.start()

    def _ready(self) -> None:
        if self._owns_process:
            # Collections would scan these objects again and again, for 10 to 100 ms in which all answers stop.
            gc.collect()
            gc.freeze()
        self.state = "ready"
        self._write_address()
        notify("READY=1", f"STATUS=Serving on {self.url}")
        log.info("ready", extra={"daemon": self.name, "url": self.url})

    async def _until_stopped(self, serving: asyncio.Task[None]) -> None:
        beat = watchdog_seconds() / 2
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            while not (stopped.done() or serving.done()):
                if beat:
                    notify("WATCHDOG=1")
                await asyncio.wait({stopped, serving}, timeout=beat or None, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()

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
        certificate = str(self._certificate.file) if self._certificate is not None else ""
        body = msgspec.json.encode(RunningDaemon(self.url, os.getpid(), self.name, time.time(), certificate))
        write_private(self.address_file, body)

    def _remove_address(self) -> None:
        file = self.address_file
        if file is not None and (found := read_address(file)) is not None and found.url == self.url:
            file.unlink(missing_ok=True)

    def _unbind(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
