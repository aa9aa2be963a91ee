"""The names in the JSON of the edge daemon's HTTP API, found by calling every route."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

__all__ = ["api_shape"]

#: Objects whose members are not names of the API: levels, reasons, policies.
_OPEN = (
    "levels",
    "recompressed",
    "demoted",
    "dropped",
    "refused",
    "policy",
    "by_level",
    "by_source",
    "hits",
    "weights",
)
_MESSAGES = [{"role": "user", "content": "press the red button " * 20}]
_IDS = list(range(5, 205))


def paths(value: Any, at: str = "") -> Iterator[str]:
    """The path of each member, ``[]`` for the elements of a list."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield f"{at}.{name}".lstrip(".")
            if name not in _OPEN:
                yield from paths(inner, f"{at}.{name}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from paths(inner, f"{at}[]")


def events(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def api_shape(http: httpx.Client) -> dict[str, list[str]]:
    """Return the paths of the members of each route's answer, sorted."""
    found: dict[str, list[str]] = {}

    def call(method: str, path: str, body: Any = None, name: str = "") -> Any:
        answer = http.request(method, path, json=body)
        stream = answer.headers["content-type"].startswith("text/event-stream")
        value = events(answer.text) if stream else answer.json()
        found[name or f"{method} {path}"] = sorted(set(paths(value)))
        return value

    chat = {"messages": _MESSAGES, "max_tokens": 4, "temperature": 0}
    id = call("POST", "/v1/chat/completions", chat)["id"]
    call("GET", f"/api/why/{id}", name="GET /api/why/ID")
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    call("POST", "/v1/chat/completions", chat | usage, "POST /v1/chat/completions stream")
    text = {"prompt": _IDS, "max_tokens": 4}
    call("POST", "/v1/completions", text)
    call("POST", "/v1/completions", text | usage, "POST /v1/completions stream")
    call("POST", "/v1/completions", {}, "error")
    call("GET", "/v1/models")
    call("POST", "/api/contexts", {"name": "manual", "messages": _MESSAGES, "pin": True})
    call("GET", "/api/contexts")
    for verb in ("pin", "unpin"):
        call("POST", f"/api/contexts/manual/{verb}")
    call("GET", "/api/contexts/manual")
    call("DELETE", "/api/contexts/manual")
    call("GET", "/api/tokens/model")
    prompt = {"tokens": _IDS}
    call("POST", "/api/tokens/complete", prompt | {"sampling": {"max_tokens": 4}})
    call("POST", "/api/tokens/warm", prompt)
    call("POST", "/api/tokens/pause", prompt | {"kind": "tool"})
    call("POST", "/api/tokens/hint", prompt | {"name": "pin"})
    call("POST", "/api/tokens/resume", prompt)
    call("POST", "/api/tokens/supersede", prompt | {"keep": 64})
    call("POST", "/api/tokens/forget", prompt)
    call("POST", "/api/sync")
    call("GET", "/api/status")
    return found
