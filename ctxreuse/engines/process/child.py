"""A child process with a socket to it: started, its last words kept, ended; and the pauses before it is restarted."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

__all__ = ["Backoff", "ChildProcess"]

# Lines of standard error that are kept, of which an error may quote the last.
_LINES = 200
# What faulthandler says when a library aborts, or a signal arrives that ends the process.
_FATAL = "Fatal Python error: "


class Backoff:
    """Pauses before restarts: none after a life of use, then doubled with each that was of none.

    Args:
        rng: spreads the pauses, so that several processes do not start at once.
        first, longest: seconds.
    """

    def __init__(self, rng: random.Random, *, first: float = 0.5, longest: float = 30.0) -> None:
        self._rng, self._first, self._longest = rng, first, longest
        #: Deaths in a row without use.
        self.deaths = 0

    def died(self, *, useful: bool) -> float:
        """Note a death; return the seconds to wait. ``useful``: it did something in its life."""
        self.deaths = 0 if useful else self.deaths + 1
        if useful:
            return 0.0
        pause = min(self._longest, self._first * 2.0 ** (self.deaths - 1))
        return pause * self._rng.uniform(0.5, 1.0)


class ChildProcess:
    """One child, started as ``python -m MODULE FD``, where FD is its end of a socket pair.

    It has a process group of its own: signals of a terminal are for this process, which decides when the child ends.
    The child must end when its socket closes, which happens however this process ends; PR_SET_PDEATHSIG would not do,
    as it fires when the *thread* ends that started the child.
    """

    def __init__(self, module: str, *, fds: Sequence[int] = (), on_line: Callable[[str], None] | None = None) -> None:
        """Start it. ``fds``: further descriptors that it inherits; ``on_line``: gets each line of its standard error
        (None: it is written to this process's). Raises OSError."""
        self.socket, there = socket.socketpair()
        with there:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(there.fileno())],
                    pass_fds=[there.fileno(), *fds],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    process_group=0,
                )
            except OSError:
                self.socket.close()
                raise
        self.pid = self._process.pid
        self._last: deque[str] = deque(maxlen=_LINES)
        self._on_line = on_line or _to_stderr
        self._listener = threading.Thread(target=self._listen, name=f"child-{self.pid}-stderr", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for raw in lines:
                line = raw.decode("utf-8", "replace").rstrip()
                self._last.append(line)
                self._on_line(line)

    def end(self, grace: float) -> str:
        """Wait until it has ended, after ``grace`` seconds by killing it; return how it ended and its last words."""
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(grace)  # a grandchild may hold the pipe open
        words = [line for line in self._last if line.strip()]
        stacks = next((i for i, line in enumerate(words) if line.startswith(_FATAL)), len(words))
        words = words[:stacks][-3:]
        return _how(self._process.returncode) + (f"; its last words: {' | '.join(words)}" if words else "")


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _how(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"killed by {name}"
