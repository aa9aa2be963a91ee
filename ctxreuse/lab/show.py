"""Outcomes of a replay for people: a table, and what it comes to in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ctxreuse.lab.replay import BOUNDS, Outcome
from ctxreuse.lab.routing import BOUND, Routed
from ctxreuse.units import rounded_bytes, rounded_duration

if TYPE_CHECKING:
    from rich.table import Table

    from ctxreuse.lab.study import About

__all__ = ["caption", "routed", "sentence", "table"]


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with a section per capacity; the best policy of each is bold, bounds are dim.

    Hits in shares of prompt tokens and blocks; seconds of prefill saved, and their share; bytes that hits read and
    misses wrote; and memory used without a later hit.
    """
    from rich.markup import escape
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("capacity", "policy"):
        made.add_column(column, no_wrap=True)
    for column in ("tokens", "blocks", "saved", "of all", "read", "written", "waste GB·s"):
        made.add_column(column, justify="right", no_wrap=True)
    best = {o.capacity: o.policy for o in sorted(_policies(outcomes), key=lambda o: o.token_hit)}
    before = -1
    for o in outcomes:
        style = "dim" if o.policy in BOUNDS else "bold" if best.get(o.capacity) == o.policy else ""
        made.add_row(
            "" if o.capacity == before else rounded_bytes(o.capacity) if o.capacity else "no end",
            escape(o.policy),
            f"{o.token_hit:.1%}",
            f"{o.block_hit:.1%}",
            rounded_duration(o.seconds_saved),
            f"{o.seconds_saved / o.seconds:.1%}" if o.seconds else "",
            rounded_bytes(o.bytes_read),
            "" if o.bytes_written is None else rounded_bytes(o.bytes_written),
            "" if o.waste_gbs is None else f"{o.waste_gbs:,.0f}",
            style=style,
        )
        before = o.capacity
    return made


def routed(outcomes: Sequence[Routed]) -> Table:
    """Return a table of what rules of choosing nodes come to; the best is bold, the bound dim."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("router", no_wrap=True)
    for column in ("mean first token", "median", "95th percentile", "reused"):
        made.add_column(column, justify="right", no_wrap=True)
    best = min((one.mean for one in outcomes if one.rule != BOUND), default=0.0)
    for one in outcomes:
        made.add_row(
            one.rule,
            *map(rounded_duration, (one.mean, one.median, one.ninety_fifth)),
            f"{one.reused:.1%}",
            style="dim" if one.rule == BOUND else "bold" if one.mean == best else "",
        )
    return made


def caption(about: About, first: int, last: int) -> str:
    """Return a line on the counted requests and the prices."""
    counted = "" if (first, last) == (0, about.requests) else f", counted from request {first + 1:,} to {last:,}"
    return (
        f"Simulation: {about.requests:,} requests of {about.trace} over {rounded_duration(about.seconds)}{counted}; "
        f"blocks of {about.block_tokens} tokens and {rounded_bytes(about.block_bytes)}; prefill at "
        f"{rounded_duration(about.token_seconds)} a token and {rounded_duration(about.pair_seconds)} a pair of tokens."
    )


def sentence(outcomes: Sequence[Outcome]) -> str:
    """Return the answer at the largest capacity: the best policy, and how far from it any policy could be."""
    found = _policies(outcomes)
    if not found:
        return ""
    most = max(o.capacity for o in found)
    best = max((o for o in found if o.capacity == most), key=lambda o: o.seconds_saved)
    bound = next(o for o in outcomes if o.policy == "belady" and o.capacity == most)
    text = (
        f"With {rounded_bytes(most)}, {best.policy} saves {rounded_duration(best.seconds_saved)} of "
        f"{rounded_duration(best.seconds)} of prefill"
    )
    plain = next((o for o in found if o.capacity == most and o.policy == "lru" and o is not best), None)
    if plain is not None:
        text += f", lru {rounded_duration(plain.seconds_saved)}"
    return f"{text}; with the future known it would be {rounded_duration(bound.seconds_saved)}.{_enough(outcomes)}"


def _enough(outcomes: Sequence[Outcome]) -> str:
    """The capacity from which on all policies save as much as an endless store, in a sentence; "" if there is none."""
    endless = next((o.seconds_saved for o in outcomes if o.policy == "infinite"), 0.0)
    found = _policies(outcomes)
    short = max((o.capacity for o in found if o.seconds_saved < 0.999 * endless), default=-1)
    enough = min((o.capacity for o in found if o.capacity > short), default=None)
    if enough is None or not endless:
        return ""
    return f" From {rounded_bytes(enough)} on capacity is not the limit: an endless store would save no more."


def _policies(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [o for o in outcomes if o.policy not in BOUNDS]
