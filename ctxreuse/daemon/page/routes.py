"""Routes of the page: its files, open to all as they say nothing of the daemon, and the feed of what it shows.

::

    GET  /                the page
    GET  /page/NAME       its script, its style and its icon
    GET  /api/events      server-sent events, see `ctxreuse.daemon.page.feed`
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ctxreuse.daemon.page.feed import Feed

__all__ = ["EVENTS", "FILES", "page_routes"]

#: Path of the feed.
EVENTS = "/api/events"
#: Files of the page by path, and their types.
FILES = {
    "/": ("page.html", "text/html"),
    "/page/main.js": ("main.js", "text/javascript"),
    "/page/base.js": ("base.js", "text/javascript"),
    "/page/panels.js": ("panels.js", "text/javascript"),
    "/page/icicle.js": ("icicle.js", "text/javascript"),
    "/page/style.css": ("style.css", "text/css"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
# Nothing from elsewhere, nothing inline, in no frame: what a context is named can at worst look odd.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def page_routes(feed: Feed, check: Callable[[Request], None] = lambda _: None) -> list[Route]:
    """The routes. ``check`` raises ApiError for who may not read the feed."""

    async def events(request: Request) -> Response:
        check(request)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", "x-content-type-options": "nosniff"}
        return StreamingResponse(feed.events(), media_type="text/event-stream", headers=headers)

    return [*(_file(path, *about) for path, about in FILES.items()), Route(EVENTS, events)]


def _file(path: str, name: str, media: str) -> Route:
    body = files("ctxreuse.daemon.page").joinpath(name).read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'

    async def answer(request: Request) -> Response:
        headers = _HEADERS | {"etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=media, headers=headers)

    return Route(path, answer)
