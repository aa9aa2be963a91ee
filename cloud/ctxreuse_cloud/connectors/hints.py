"""KV hints that another engine hands to its caches with a request."""

from __future__ import annotations

from typing import Any

import msgspec

from ctxreuse.pauses.envelope import HintOrder, KvHints, read_hints

__all__ = ["hint_orders"]


def hint_orders(envelope: Any) -> list[HintOrder]:
    """Return what an engine's envelope asks for; actions that are not understood are left out, as hints may be.

    ``envelope``: a struct, or what JSON has, in the shape of `ctxreuse.pauses.envelope.KvHints`; None: no hints.
    """
    if envelope is None:
        return []
    try:
        hints = msgspec.json.decode(msgspec.json.encode(envelope), type=KvHints)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return []
    return [order for order in read_hints(hints) if isinstance(order, HintOrder)]
