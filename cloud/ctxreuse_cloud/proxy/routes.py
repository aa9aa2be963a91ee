"""Requests as the router sees them: hashes of the beginnings of what the model reads, and tokens by bytes."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from ctxreuse.routing import PrefixRun, Route, RouteOption

__all__ = ["describe", "earlier_runs", "request_runs"]

#: Bytes of a run, in the first runs of a request and behind them: a megabyte has some 300.
_FINE, _COARSE, _FINE_RUNS = 1 << 10, 1 << 14, 256
#: Bytes of a message that are about a token.
_BYTES = 4
_SEED = (1 << 64) - 1
#: Other backends that a description names.
_OTHERS = 3


def request_runs(tenant: str, model: str, messages: Sequence[tuple[str, bytes]]) -> list[PrefixRun]:
    """Return the runs of a request, see `ProxyRequest.messages`; those of different tenants or models never agree.

    The last run of each message may be short, so that a conversation that goes on begins with the runs it had.
    """
    # Python's own hash of texts is keyed anew in each process; a hash that begins with it is as secret, and fast.
    key = hash((tenant, model))
    found = list[PrefixRun]()
    for name, raw in messages:
        key, at = hash((key, name)) & _SEED, 0
        while at < len(raw):
            piece = raw[at : at + (_FINE if len(found) < _FINE_RUNS else _COARSE)]
            key = xxhash.xxh3_64_intdigest(piece, key)
            found.append(PrefixRun(key, -(-len(piece) // _BYTES)))
            at += len(piece)
    return found


def earlier_runs(tenant: str, model: str, messages: Sequence[tuple[str, bytes]]) -> list[PrefixRun]:
    """Return the runs of the request that a chat made before this one: of what stands before its last answer. None (an
    empty list) for a chat that begins."""
    last = max((at for at, (name, _) in enumerate(messages) if name == "assistant"), default=0)
    return request_runs(tenant, model, messages[:last])


def describe(route: Route) -> str:
    """Return a choice in words: why there, and what others would have taken."""
    chosen, others = route.chosen, route.others
    text = f"It went to {chosen.node}, {_expected(chosen, route.tokens)}"
    if others:
        text += "; " + "; ".join(f"{one.node}: {_expected(one, route.tokens)}" for one in others[:_OTHERS])
    return text + ("." if len(others) <= _OTHERS else f"; and {len(others) - _OTHERS} more.")


def _expected(option: RouteOption, tokens: int) -> str:
    waits = f" after waiting {option.queue:.2f} s" if option.queue >= 0.005 else ""
    known = "tokens there by its KV events" if option.reported else "tokens known there"
    about = "" if option.reported else "about "
    return f"{option.seconds:.2f} s expected{waits}, {about}{option.cached:,} of {tokens:,} {known}"
