"""The device's clouds: who is asked for contexts, and who gets those that it lacks.

This is the one place where bus and runtime meet in the daemon; without clouds in the settings nothing of it is loaded.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Links", "NoLinks"]


class Links(Protocol):
    """The clouds of this device. Any thread may call; nothing raises for a cloud that is away."""

    def status(self) -> list[dict[str, Any]]:
        """One entry a cloud: ``name``, ``endpoint``, ``state`` and figures."""
        ...

    def sync(self) -> dict[str, Any]:
        """How far the clouds have what is held here; with this call it goes on at once."""
        ...

    def busy(self, busy: bool) -> None:
        """Requests run (True) or none does (False): contexts are given to clouds in idle time only."""
        ...

    def close(self) -> None:
        """End all links; what was on its way is resumed next time."""
        ...


class NoLinks:
    """A device without clouds."""

    def status(self) -> list[dict[str, Any]]:
        """See `Links.status`."""
        return []

    def sync(self) -> dict[str, Any]:
        """See `Links.sync`."""
        return {"enabled": False, "waiting": 0}

    def busy(self, busy: bool) -> None:
        """See `Links.busy`."""

    def close(self) -> None:
        """See `Links.close`."""
