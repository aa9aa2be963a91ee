"""The command ``ctxreuse why``: what a request reused, what it did not, and where it differs from an earlier one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxreuse.cli.common import Json, load_settings, print_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ctxreuse.config import Settings
    from ctxreuse.why import Difference, Why
    from ctxreuse.why.difference import Decode

__all__ = ["EXAMPLES", "show_why", "why"]

EXAMPLES = """[bold]Examples[/bold]

ctxreuse why --last                     the newest request of this machine's store

ctxreuse why chatcmpl-5f0c…             by the "id" of an answer, or its x-request-id

ctxreuse why --last --session notes     the newest of one conversation

ctxreuse why --last --json              for programs

The answer comes from the running daemon, else from its log in the store's folder.
"""

_WIDTH = 28
# Characters of text shown before a difference, and after it.
_BEFORE, _BEHIND = 32, 32


def why(
    ctx: typer.Context,
    request: Annotated[str, typer.Argument(metavar="[REQUEST]", help="Its id, or use --last.")] = "",
    last: Annotated[bool, typer.Option("--last", help="The newest request.")] = False,
    session: Annotated[str, typer.Option("--session", help="With --last: the newest of the session of that id.")] = "",
    url: Annotated[str, typer.Option("--url", help="Address of a daemon, such as http://127.0.0.1:7351.")] = "",
    path: Annotated[str | None, typer.Option("--path", metavar="DIR", help="The store's folder (store.path).")] = None,
    json: Json = False,
) -> None:
    """Explain why a request's tokens were computed and not reused."""
    from ctxreuse.errors import ConfigError

    if bool(request) == last:
        raise ConfigError("name one request, or use --last", fix="Its id is in the answer and its x-request-id header")
    settings = load_settings(ctx, {"store.path": path})
    found = _from_daemon(url, request, session) if url else _from_store(settings, request, session)
    if json:
        print_json(found)
        return
    from rich.console import Console

    show_why(found, Console())


def _from_store(settings: Settings, request: str, session: str) -> Why:
    """Query the daemon that owns the store, if one runs; else read the log in its folder."""
    from ctxreuse.daemon.lifecycle import read_address
    from ctxreuse.errors import LinkDownError
    from ctxreuse.identity.keys import ROOT
    from ctxreuse.store.removals import read_removals
    from ctxreuse.why import explain, read_requests

    folder = settings.store.folder()
    address = read_address(folder / "edge.json")
    if address is not None:
        try:
            return _from_daemon(address.url, request, session)
        except LinkDownError:
            pass  # it died and left its address
    requests, removals = read_requests(folder), read_removals(folder)
    entry = requests.get(request) if request else requests.last(session)
    space = requests.space(entry.space) if entry is not None else None
    decode = _decode(settings, space.tokenizer) if space is not None else None
    # A reader of the folder may see the requests of all tenants.
    return explain(requests, request, session=session, decode=decode, others=True, emptied=removals.removal(ROOT))


def _from_daemon(url: str, request: str, session: str) -> Why:
    from urllib.parse import quote

    import msgspec

    from ctxreuse.daemon.client import Client
    from ctxreuse.errors import LinkDownError
    from ctxreuse.why import Why

    client = Client(url, timeout=30.0)
    path = f"/api/why/{quote(request, safe='')}" if request else f"/api/why?session={quote(session, safe='')}"
    try:
        return msgspec.convert(client.call("GET", path), Why)
    except msgspec.ValidationError:
        raise LinkDownError("the server there is not a daemon of this version", where=client.url) from None


def _decode(settings: Settings, digest: str) -> Decode | None:
    """The tokenizer of a digest, if it is that of the settings' model."""
    from ctxreuse import models
    from ctxreuse.engines.text import HFText, tokenizer_digest
    from ctxreuse.errors import CtxReuseError

    name = settings.engine.model
    try:
        folder = models.path(name) if name in models.CATALOG else Path(name).expanduser()
        text = HFText.open(folder) if folder is not None and tokenizer_digest(folder) == digest else None
    except CtxReuseError:
        return None
    return text.decode if text is not None else None


def show_why(found: Why, console: Console) -> None:
    """Print an explanation: what was reused, each run that was computed, the first difference, advice."""
    from rich.table import Table
    from rich.text import Text

    from ctxreuse.why.reasons import when

    share = found.cached_tokens / found.prompt_tokens if found.prompt_tokens else 0.0
    title = Text.assemble(
        (found.request, "bold"), f"  {when(found.at)}", f"  session {found.session}" * bool(found.session)
    )
    console.print(title)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for span in found.spans:
        style = "green" if not span.reason else "dim" if span.reason == "tail" else "red"
        name = "reused" if not span.reason else "rest" if span.reason == "tail" else span.reason
        source = ", ".join(f"{n:,} from {tier}" for tier, n in found.by_source.items() if n)
        tokens = f"{span.start:,}-{span.end - 1:,}"
        table.add_row(
            tokens, Text(name, style), Text(span.text if span.reason else source, "dim" if style == "dim" else "")
        )
    console.print(table)
    console.print(Text(f"{found.cached_tokens:,} of {found.prompt_tokens:,} prompt tokens reused ({share:.0%})"))
    for field in found.fields:
        console.print(
            Text.assemble(f"{field.name}: ", (field.here, "green"), " here, ", (field.there, "red"), " there")
        )
    if found.difference is not None and any(span.reason == "new" for span in found.spans):
        console.print()
        for line in _differing(found.difference, colored=console.color_system is not None):
            console.print(line, soft_wrap=True)
    if found.advice:
        console.print(Text.assemble(("advice  ", "bold"), (found.advice, "green")))


def _differing(found: Difference, *, colored: bool) -> list[Text]:
    from rich.text import Text

    from ctxreuse.why.reasons import differing

    lines = [Text(line) for line in differing(found) if not line.startswith("  ")]
    if found.here or found.there:
        lines[1:1] = [_side("this", found.before, found.here, found.changed, "green" * colored)]
        if found.kind == "changed":
            other = found.before, found.there, found.other_changed, "red" * colored
            lines[2:2] = [_side(found.request[:_WIDTH], *other)]
    return lines


def _side(name: str, before: str, text: str, changed: int, color: str) -> Text:
    """Return one line of text; the difference is in ``color``, or without one in brackets."""
    from rich.text import Text

    def plain(part: str) -> str:
        return "".join(c if c.isprintable() else "⏎" if c == "\n" else " " for c in part)

    # Whole words are marked, whatever tokens they were made of.
    start = re.search(r"\w*$", before)
    end = re.match(r"\w*", text[changed:])
    before, begun = (before[: start.start()], start[0]) if start is not None else (before, "")
    changed += len(end[0]) if end is not None and (begun or changed) else 0
    mark, rest = plain(begun + text[:changed]) or "∅", plain(text[changed : changed + _BEHIND])
    marked = (mark, f"bold reverse {color}") if color else (f"[{mark}]", "")
    return Text.assemble((f"  {name:<{_WIDTH}}  ", "dim"), "…", plain(before[-_BEFORE:]), marked, rest, "…")
