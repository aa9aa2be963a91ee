"""What a follower of a feed knows: the panels, kept up to date message by message."""

from __future__ import annotations

from typing import Any

__all__ = ["FeedState"]


class FeedState:
    """The panels of a feed: ``values`` by name, and ``rows`` by name and id. See `ctxreuse.daemon.page.feed`."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.rows: dict[str, dict[str, list[Any]]] = {}

    def take(self, message: dict[str, Any]) -> None:
        """Bring the panels up to date."""
        if message.get("full"):
            self.values, self.rows = {}, {}
        self.values |= message["set"]
        for name, change in message["rows"].items():
            rows = {} if change.get("all") else self.rows.get(name, {})
            for one in change["drop"]:
                rows.pop(one, None)
            self.rows[name] = rows | change["put"]

    def merged(self) -> dict[str, Any]:
        """Return all panels as one dict, for JSON."""
        return self.values | self.rows
