"""A daemon without an engine, as a process: it streams ticks, and says on standard output what happens to it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, Router

from ctxreuse.daemon import logs
from ctxreuse.daemon.lifecycle import Daemon
from ctxreuse.daemon.middleware import ApiMiddleware
from ctxreuse.daemon.probes import probes
from ctxreuse.errors import StoreError
from ctxreuse.metrics import Metrics


def main(drain: str, linger: str, address: str, opening: str, closing: str) -> int:
    """``opening``: seconds, or ``broken``; ``closing``: seconds."""
    daemon = Daemon("toy", drain=float(drain), linger=float(linger), address_file=Path(address))
    metrics = Metrics()

    @contextlib.asynccontextmanager
    async def resources() -> AsyncIterator[None]:
        if opening == "broken":
            raise StoreError("it does not open")
        await asyncio.sleep(float(opening))
        try:
            yield
        finally:
            await asyncio.sleep(float(closing))
            print("closed", flush=True)

    async def ticks(request: Request) -> Response:
        async def every() -> AsyncIterator[bytes]:
            try:
                for n in range(int(request.query_params["n"])):
                    yield f"{n}\n".encode()
                    await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                print("cancelled", flush=True)
                raise

        return StreamingResponse(every())

    async def broken(_: Request) -> Response:
        raise RuntimeError("a slip in code")

    routes = [*probes(daemon.not_ready, metrics.exposition), Route("/ticks", ticks), Route("/broken", broken)]
    app = ApiMiddleware(Router(routes), metrics=metrics, route=str, not_ready=daemon.not_ready)
    logs.setup("json")
    print(daemon.bind(), flush=True)
    return daemon.run(app, resources)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
