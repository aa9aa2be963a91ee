"""Names in the JSON of the HTTP API: what programs written for version 0.1.0 read is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.api_shape import api_shape

KNOWN = Path(__file__).parents[1] / "golden" / "data" / "names" / "edge_api.json"


def test_names_of_the_http_api(serve: Any) -> None:
    edge = serve(**{"bus.clouds": [{"endpoint": "tcp://127.0.0.1:9"}]})
    now = api_shape(edge.http)
    known = json.loads(KNOWN.read_text("utf-8"))
    assert "error" not in now["GET /api/why/ID"]
    missing = {route: sorted(set(names) - set(now[route])) for route, names in known.items()}
    assert not {route: names for route, names in missing.items() if names}
