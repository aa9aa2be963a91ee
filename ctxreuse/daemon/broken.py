"""The last piece of a stream that ends early: an error that clients of its API read as one."""

from __future__ import annotations

import msgspec

from ctxreuse.daemon.anthropic.answers import error_body
from ctxreuse.daemon.openai import ApiError

__all__ = ["last_piece"]


def last_piece(error: ApiError, path: str, media: str, request: str) -> bytes | None:
    """Return the last piece of a stream, of events or of JSON lines, that ``error`` ends; None for other bodies, which
    can only be cut. ``path``, ``request``: of the request, and its id; ``media``: the stream's content type."""
    kind = media.partition(";")[0].strip().lower()
    if kind in ("application/x-ndjson", "application/jsonl"):
        return msgspec.json.encode({"error": error.message}) + b"\n"
    if kind != "text/event-stream":
        return None
    if path.startswith("/v1/messages"):
        return b"event: error\ndata: " + error_body(error, request) + b"\n\n"
    if path.startswith("/v1/responses"):
        typed = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        body = msgspec.json.encode(typed | msgspec.json.decode(error.body()))
        return b"event: error\ndata: " + body + b"\n\n"
    return b"data: " + error.body() + b"\n\n"
