"""The description of the HTTP API: complete, whole, and a page that loads nothing."""

from __future__ import annotations

import json
import re
from typing import Any

from ctxreuse_edge.api import routes
from ctxreuse_edge.api.openapi import description


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if "$ref" in value else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_every_route_is_described_and_nothing_else(edge: Any) -> None:
    served = {
        (re.sub(r":path}", "}", route.path), method)
        for route in routes(edge.node)
        for method in (route.methods or ())
        if method != "HEAD"
    }
    served.remove(("/api/contexts/{name}/{verb}", "POST"))
    served |= {(f"/api/contexts/{{name}}/{verb}", "POST") for verb in ("pin", "unpin")}
    served.add(("/api/events", "GET"))  # of the page, which both daemons have
    described = edge.http.get("/openapi.json").json()
    assert {(path, method.upper()) for path, methods in described["paths"].items() for method in methods} == served
    assert described == json.loads(json.dumps(description()))
    schemas = described["components"]["schemas"]
    assert {ref.rsplit("/", 1)[1] for ref in references(described)} <= schemas.keys()
    assert "n" in schemas["EdgeChatRequest"]["properties"]


def test_the_page_names_every_path_and_loads_nothing(edge: Any) -> None:
    page = edge.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert all(path in page.text for path in description()["paths"])
    assert not re.search("<script|https?://|src=|@import", page.text)
    assert "default-src 'none'" in page.headers["content-security-policy"]
