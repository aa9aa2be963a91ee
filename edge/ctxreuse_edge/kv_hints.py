"""KV hints of callers on contexts: what each one asks for is done by the runtime and by pins of prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ctxreuse.daemon.middleware import CALLER
from ctxreuse.pauses.envelope import HintOrder, hint_outcomes

if TYPE_CHECKING:
    from ctxreuse.identity.keys import Tokens
    from ctxreuse.runtime import Runtime
    from ctxreuse_edge.node import EdgeNode

__all__ = ["take_hints"]

#: Seconds for which a prefix is pinned where the hint says no time.
_UNENDED = 3600.0


def take_hints(node: EdgeNode, runtime: Runtime, orders: Sequence[HintOrder | str], ids: Tokens) -> None:
    """Do what the actions of an envelope ask for on a context, answer included, and count them; for a thread that may
    wait. ``orders``: see `read_hints`.

    A pause is reported with its length; what is retained is worth more and its stored blocks are pinned, in the share
    of its caller; what is demoted is unpinned and the first to be evicted; what is prefetched is worth more in memory.
    """
    keys, caller = runtime.keys(ids), f"{CALLER.get()} kv_hints"  # beside the caller's pins by cache_control
    for outcome in hint_outcomes(orders):
        node.metrics.add("ctxreuse_kv_hints_total", 1, outcome)
    for order in orders:
        if isinstance(order, str):
            continue
        if order.name == "pause":
            runtime.pause(ids, order.kind, expect=order.seconds)
            continue
        runtime.hint(ids, order.name, until=order.seconds)
        if order.name == "demote":
            node.pins.release(keys, caller)
        elif order.name != "prefetch":
            end = len(ids) if order.tokens is None else order.tokens
            node.pins.keep(keys[: end // runtime.space.block_tokens], order.seconds or _UNENDED, caller)
