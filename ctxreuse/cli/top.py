"""The command ``top`` of the daemons: what their page shows, in a terminal, from the same feed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ctxreuse.cli.common import print_json
from ctxreuse.units import rounded_bytes, rounded_duration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from ctxreuse.daemon.client import Client
    from ctxreuse.daemon.page.follow import FeedState

__all__ = ["follow_top"]

# Seconds until a daemon that does not answer is tried again.
_AGAIN = 2.0
_COLOURS = {"device": "yellow", "host": "bright_cyan", "disk": "blue", "edge": "magenta", "cloud": "green"}
_ROWS = 8


def follow_top(client: Client, *, once: bool, json: bool) -> None:
    """Show the daemon until Ctrl-C; it may be restarted meanwhile.

    ``once``: print what there is now and end. ``json``: as JSON, for programs.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from ctxreuse.daemon.page.follow import FeedState
    from ctxreuse.errors import LinkDownError

    state = FeedState()
    if once or json:
        with client.events("/api/events") as events:
            state.take(next(events))
        if json:
            print_json(state.merged())
        else:
            Console(highlight=False).print(_screen(state, {}))
        return
    console = Console(highlight=False)
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as shown:
        started = False
        while True:
            before: dict[str, Any] = {}
            try:
                with client.events("/api/events") as events:
                    for message in events:
                        state.take(message)
                        started = True
                        shown.update(_screen(state, before), refresh=True)
                        before = _totals(state)
            except LinkDownError as error:
                if not started:
                    raise
                shown.update(Text(f"{_plain(str(error))}\ntrying again …", style="red"), refresh=True)
                time.sleep(_AGAIN)


def _plain(text: object) -> str:
    """A text of others without what a terminal would obey."""
    return "".join(one if one.isprintable() else "\ufffd" for one in str(text))


def _totals(state: FeedState) -> dict[str, Any]:
    tokens = state.values.get("tokens", {})
    return {"at": time.monotonic(), "tokens": dict(tokens.get("sources", {})), "generated": tokens.get("generated", 0)}


def _screen(state: FeedState, before: dict[str, Any]) -> RenderableType:
    from rich.columns import Columns
    from rich.console import Group

    parts: list[RenderableType] = [_head(state), _reuse(state, before), _running(state)]
    tables = (_requests(state), _sessions(state), _contexts(state), _links(state), _removals(state))
    return Group(*parts, Columns([one for one in tables if one is not None], padding=(1, 3)))


def _head(state: FeedState) -> RenderableType:
    from rich.text import Text

    daemon = state.values["daemon"]
    models = ", ".join(_plain(name) for name, *_ in daemon["models"]) or "no model"
    up = rounded_duration(max(time.time() - daemon["since"], 0))
    text = Text.assemble((f"ctxreuse-{daemon['kind']}", "bold"), f"  {models}  up {up}  process {daemon['pid']}")
    if daemon["failing"]:
        text.append(f"  {_plain(daemon['failing'])}", "bold red")
    return text


def _reuse(state: FeedState, before: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    tokens = state.values.get("tokens", {"sources": {}, "generated": 0})
    sources = {name: count for name, count in tokens["sources"].items() if count}
    total = sum(sources.values())
    reused = total - sources.get("compute", 0)
    text = Text(f"\n{reused / total:.0%} of {total:,} prompt tokens reused" if total else "\nno prompt yet")
    if "saved" in tokens:
        net = tokens["saved"] - tokens["lost"]
        text.append(f", {rounded_duration(abs(net)) if net else '0s'} {'saved' if net >= 0 else 'lost'}")
    if before:
        seconds = max(time.monotonic() - before["at"], 0.1)
        rate = (total - sum(before["tokens"].values())) / seconds
        text.append(
            f"; {rate:,.0f} prompt and {(tokens['generated'] - before['generated']) / seconds:,.0f} new tokens/s"
        )
    text.append("\n")
    width = 60
    for name, count in sources.items():
        text.append("█" * round(width * count / total), _COLOURS.get(name, "bright_black"))
    text.append("\n" if total else "")
    for name, count in sources.items():
        text.append("■ ", _COLOURS.get(name, "bright_black"))
        text.append(f"{'computed' if name == 'compute' else name} {count:,}   ")
    return text


def _running(state: FeedState) -> RenderableType:
    from rich.text import Text

    now, store = state.values.get("running", {}), state.values.get("store", {})
    words = [f"{now.get('active', 0) - now.get('queued', 0)} running", f"{now.get('queued', 0)} queued"]
    if passes := now.get("passes"):
        words.append(f"{passes[1] / passes[0] if passes[0] else 0:.1f} contexts a pass")
    if gap := _quantile(state.values.get("tokens", {}).get("gaps", []), 0.5):
        words.append(f"median gap {gap * 1e3:.0f} ms")
    for name, (size, room, _) in store.get("tiers", {}).items():
        words.append(f"{name} {rounded_bytes(size)} of {rounded_bytes(room)}")
    if store.get("failing"):
        words.append("the disk fails")
    return Text("   ".join(words))


def _quantile(buckets: Sequence[Sequence[Any]], share: float) -> float:
    """The least limit of a histogram's buckets that so large a share is below; 0 without observations."""
    total = buckets[-1][1] if buckets else 0
    return next((limit or 0.0 for limit, upto in buckets if total and upto >= share * total), 0.0)


def _table(title: str, columns: Iterable[str], rows: Sequence[Sequence[str]]) -> Table | None:
    """A table; columns whose names end in ``>`` are numbers. None without rows."""
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return None
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False)
    for name in columns:
        table.add_column(name.removesuffix(">"), justify="right" if name.endswith(">") else "left", no_wrap=True)
    for row in rows[:_ROWS]:
        table.add_row(*(Text(_plain(one)[:40]) for one in row))
    return table


def _ago(at: float) -> str:
    seconds = max(round(time.time() - at), 0)
    return f"{seconds}s" if seconds < 60 else rounded_duration(seconds)


def _requests(state: FeedState) -> Table | None:
    rows = sorted(state.rows.get("requests", {}).items(), key=lambda one: -one[1][0])
    cells = [
        (_ago(row[0]), row[1] or name, f"{row[2]:,}", f"{row[3] / row[2] if row[2] else 0:.0%}", row[5])
        for name, row in rows[:_ROWS]
    ]
    return _table("Requests", ("ago>", "who", "prompt>", "reused>", "why not more"), cells)


def _sessions(state: FeedState) -> Table | None:
    rows = sorted(state.rows.get("sessions", {}).values(), key=lambda row: -row[5])
    names = {name: row[0] for name, row in state.rows.get("sessions", {}).items()}
    cells = [
        (row[0], str(row[1]), names.get(row[2], ""), _ago(row[5]), "pinned" if row[6] else "") for row in rows[:_ROWS]
    ]
    return _table("Sessions", ("name", "turns>", "fork of", "changed>", ""), cells)


def _contexts(state: FeedState) -> Table | None:
    names = {name: row[0] for name, row in state.rows.get("sessions", {}).items()}
    rows = sorted(state.rows.get("contexts", {}).values(), key=lambda row: -row[2])
    cells = [
        (names.get(row[10], row[10]), f"{row[1]:,}", f"{row[2]:,}", row[5], row[6], "pinned" if row[7] & 1 else "")
        for row in rows[:_ROWS]
    ]
    return _table("Largest contexts", ("used by", "from>", "tokens>", "lies in", "level", ""), cells)


def _links(state: FeedState) -> Table | None:
    cells = [
        (name, row[0], rounded_bytes(row[4]), rounded_bytes(row[5]), f"{row[8]:,}")
        for name, row in state.rows.get("links", {}).items()
    ]
    cells += [
        (row[0], "peer", rounded_bytes(row[3]), rounded_bytes(row[4]), "")
        for row in state.rows.get("peers", {}).values()
    ]
    cells += [
        (name, row[0], f"{row[2]} now", f"{row[3]:,}", "") for name, row in state.rows.get("backends", {}).items()
    ]
    return _table("Links", ("name", "state", "in>", "out>", "to send>"), cells)


def _removals(state: FeedState) -> Table | None:
    rows = sorted(state.rows.get("removals", {}).values(), key=lambda row: -row[0])
    cells = [(_ago(row[0]), row[1], row[2].replace("_", " "), f"{row[3]:,}") for row in rows[:_ROWS]]
    return _table("Evicted, dropped, refused", ("ago>", "how", "why", "blocks>"), cells)
