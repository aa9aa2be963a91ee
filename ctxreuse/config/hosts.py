"""Which hosts are this machine."""

from __future__ import annotations

import ipaddress
from functools import lru_cache

__all__ = ["is_loopback"]


@lru_cache(256)
def is_loopback(host: str) -> bool:
    """Return True for ``localhost`` and loopback addresses, IPv6 ones with or without brackets."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
