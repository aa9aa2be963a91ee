"""An engine's process, started as ``python -m ctxreuse.engines.process FD`` with one end of a socket pair."""

from __future__ import annotations

import faulthandler
import logging
import signal
import socket
import sys

from ctxreuse.engines.process.server import serve
from ctxreuse.engines.process.wire import engine_pipe

if __name__ == "__main__":
    # The parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    serve(engine_pipe(socket.socket(fileno=int(sys.argv[1]))))
