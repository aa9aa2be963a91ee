"""Routes for monitoring: ``/healthz``, ``/health``, ``/readyz`` and ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

__all__ = ["PROBES", "probes"]

#: Their paths.
PROBES = ("/healthz", "/health", "/readyz", "/metrics")


def probes(not_ready: Callable[[], str], render: Callable[[str], tuple[bytes, str]]) -> list[Route]:
    """Return the routes. ``not_ready``: why requests should go elsewhere, "": ready; ``render``: metrics and their type
    for an ``Accept`` header.

    /healthz answers 200 as long as the process can: restarting a draining one would not help.
    """

    async def alive(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        why = not_ready()
        return JSONResponse({"status": why or "ready"}, 503 if why else 200)

    def metrics(request: Request) -> Response:  # not async: rendering, which takes milliseconds, runs in a thread
        body, media = render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": media})

    return [Route("/healthz", alive), Route("/health", alive), Route("/readyz", ready), Route("/metrics", metrics)]
