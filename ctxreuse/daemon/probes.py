"""Routes for those who watch a daemon: ``/healthz``, ``/health``, ``/readyz`` and ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

__all__ = ["probes"]

_METRICS = "text/plain; version=0.0.4; charset=utf-8"


def probes(not_ready: Callable[[], str], render: Callable[[], bytes]) -> list[Route]:
    """``not_ready`` says why requests should go elsewhere ("": they need not); ``render`` gives the metrics' text.

    /healthz is 200 as long as the process can answer at all; restarting it would not help a draining one.
    """

    async def alive(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        why = not_ready()
        return JSONResponse({"status": why or "ready"}, 503 if why else 200)

    def metrics(_: Request) -> Response:  # not async: rendering takes milliseconds and gets a thread
        return Response(render(), media_type=_METRICS)

    return [Route("/healthz", alive), Route("/health", alive), Route("/readyz", ready), Route("/metrics", metrics)]
