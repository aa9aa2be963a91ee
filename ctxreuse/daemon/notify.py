"""Notify systemd that the service is ready, stopping or alive: one datagram to ``NOTIFY_SOCKET``, see sd_notify(3)."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

__all__ = ["notify", "watchdog_seconds"]


def notify(*lines: str, env: Mapping[str, str] = os.environ) -> bool:
    """Send lines such as ``READY=1`` or ``STATUS=…``; False without a listener. Raises nothing."""
    address = env.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return False
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
        to.sendto("\n".join(lines).encode(), address.replace("@", "\0", 1))
        return True
    return False


def watchdog_seconds(env: Mapping[str, str] = os.environ, pid: int | None = None) -> float:
    """Return the interval in which systemd expects ``WATCHDOG=1`` from this process; 0: not at all."""
    if env.get("WATCHDOG_PID", "") not in ("", str(os.getpid() if pid is None else pid)):
        return 0.0
    text = env.get("WATCHDOG_USEC", "")
    return int(text) / 1e6 if text.isascii() and text.isdigit() else 0.0
