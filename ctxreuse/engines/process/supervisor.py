"""Keeps an engine's process alive while it is wanted: starts it, notices its death, restarts it, ends it."""

from __future__ import annotations

import logging
import random
import resource
import threading
from pathlib import Path
from typing import Literal

from ctxreuse.engines.process.child import Backoff, ChildProcess
from ctxreuse.engines.process.connection import Connection
from ctxreuse.engines.process.memory import SharedMemory
from ctxreuse.engines.process.pipe import FramePipe
from ctxreuse.engines.process.wire import EngineMessage, EngineOpened, OpenFailed, Opening, engine_pipe
from ctxreuse.errors import CtxReuseError, EngineDiedError, EngineError, ProtocolError

__all__ = ["EngineState", "Supervisor"]

log = logging.getLogger(__name__)

#: ``unloaded``: it is not wanted; ``failing``: it has died many times in a row, and calls fail until it is up again.
EngineState = Literal["unloaded", "starting", "up", "restarting", "failing", "closed"]

#: Deaths in a row, before anything was computed, after which callers are no longer made to wait.
_MANY = 3
# Seconds for a process to end after its socket was closed.
_GRACE = 5.0
_MODULE = "ctxreuse.engines.process"


class Supervisor:
    """One engine's process. Any thread may call.

    Args:
        opening: the engine to open.
        rng: for pauses before restarts.
    """

    def __init__(
        self,
        opening: Opening,
        *,
        rng: random.Random | None = None,
    ) -> None:
        self._opening = opening
        self._change = threading.Condition()
        self._backoff = Backoff(rng or random.Random())
        self._connection: Connection | None = None
        self._pipe: FramePipe[EngineMessage] | None = None
        self._wanted = self._closed = False
        self._refused: tuple[int, CtxReuseError] = 0, EngineError("")
        self._attempt, self._opening_now = 0, False
        self._error = EngineDiedError("the engine's process has not been started")
        self.state: EngineState = "unloaded"
        self.pid = self.restarts = 0
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)
        self._thread.start()

    @property
    def failing(self) -> str:
        """Why calls fail at present; "": they do not."""
        return str(self._error) if self.state == "failing" else ""

    @property
    def memory(self) -> int:
        """Bytes of the process in memory, mapped files included; 0 while it does not run or they cannot be read."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            return pages * resource.getpagesize() if self.pid else 0
        except (OSError, ValueError, IndexError):
            return 0

    def connection(self) -> Connection:
        """The process's connection; starts it, or waits while it is started.

        Raises what opening the engine raises, EngineDiedError if it dies again and again.
        """
        current = self._connection
        if current is not None and current.died is None:
            return current
        with self._change:
            # One that runs already is this call's, too: its refusal must not be waited past.
            attempt = self._attempt - self._opening_now
            self._wanted = True
            self._change.notify_all()
            while True:
                if self._closed:
                    raise EngineDiedError("the engine is closed")
                if self._connection is not None and self._connection.died is None:
                    return self._connection
                if self._refused[0] > attempt:
                    error = self._refused[1]
                    raise type(error)(error.what, where=error.where, fix=error.fix)
                if self.state == "failing":
                    raise self._error.again()
                self._change.wait()

    def start(self) -> None:
        """Start the process if it does not run, and do not wait for it."""
        with self._change:
            self._wanted = True
            self._change.notify_all()

    def unload(self) -> None:
        """End the process until the next call; its contexts are lost. Returns when it has ended."""
        with self._change:
            self._wanted = False
            self._end()
            while self.state not in ("unloaded", "closed"):
                self._change.wait()

    def close(self) -> None:
        """End the process for good. Idempotent."""
        with self._change:
            self._closed = True
            self._end()
        self._thread.join()

    def _end(self) -> None:
        self._change.notify_all()
        if self._pipe is not None:
            self._pipe.shut()

    def _run(self) -> None:
        pause = 0.0
        while True:
            with self._change:
                if pause and self._wanted and not self._closed:
                    self.state = "failing" if self._backoff.deaths >= _MANY else "restarting"
                    self._change.notify_all()
                    self._change.wait_for(lambda: self._closed or not self._wanted, pause)
                while not (self._wanted or self._closed):
                    self.state = "unloaded"
                    self._change.notify_all()
                    self._change.wait()
                if self._closed:
                    self.state = "closed"
                    self._change.notify_all()
                    return
                self._attempt, self._opening_now = self._attempt + 1, True
                if self.state != "failing":
                    self.state = "starting"
            pause = self._run_once()

    def _run_once(self) -> float:
        """Run the process once; return the seconds to wait before it is started again."""
        memory = SharedMemory()
        try:
            child = ChildProcess(_MODULE, fds=[memory.fd], on_line=_log_line)
        except OSError as error:  # out of memory or descriptors: may pass
            memory.close()
            self._error = EngineDiedError(f"the engine's process cannot be started: {error}")
            return self._backoff.died(useful=False)
        pipe, connection = engine_pipe(child.socket), None
        problem = ""
        with self._change:
            self._pipe = pipe
            if self._closed or not self._wanted:
                pipe.shut()
        try:
            pipe.send(Opening(self._opening.opener, self._opening.options, memory.fd))
            received = pipe.receive()
            message = received[0] if received is not None else None
            if isinstance(message, OpenFailed):
                refused = message.error.error()
                self._refuse(refused if isinstance(refused, CtxReuseError) else EngineError(str(refused)))
                return 0.0
            if isinstance(message, EngineOpened):
                connection = Connection(pipe, memory, message)
                self._up(connection, child.pid)
                connection.serve()
        except ProtocolError as caught:
            problem = str(caught)
        except OSError:
            pass  # how it ended says more
        finally:
            pipe.shut()
            how = child.end(_GRACE)
            pause = self._ended(connection, problem or how)
            pipe.close()
            memory.close()
        return pause

    def _up(self, connection: Connection, pid: int) -> None:
        with self._change:
            self._connection, self.pid, self.state, self._opening_now = connection, pid, "up", False
            self._change.notify_all()
        log.info("the engine's process is ready", extra={"pid": pid})

    def _refuse(self, error: CtxReuseError) -> None:
        """The engine cannot be opened: that is for the callers, and trying again is for the next one."""
        with self._change:
            self._refused, self._wanted, self.state = (self._attempt, error), False, "unloaded"
            self._opening_now = False
            self._change.notify_all()

    def _ended(self, connection: Connection | None, how: str) -> float:
        """Note that the process has ended; return the seconds to wait before the next."""
        with self._change:
            crashed, self._opening_now = self._wanted and not self._closed, False
            fix = "What is stored is kept: ask again, it is started again"
            what = f"the engine's process has died: {how}" if crashed else "the engine's process was ended"
            self._error = EngineDiedError(what, where=f"process {self.pid}" if self.pid else "", fix=fix)
            self._connection, self._pipe, self.pid = None, None, 0
            refused = self._refused[0] == self._attempt
        if connection is not None:
            connection.fail(self._error)
        if refused or not crashed:
            return 0.0
        self.restarts += 1
        pause = self._backoff.died(useful=connection is not None and connection.computed > 0)
        log.error("%s", self._error.what, extra={"again_in": round(pause, 2), "deaths": self._backoff.deaths})
        return pause


def _log_line(line: str) -> None:
    log.info("engine: %s", line)
