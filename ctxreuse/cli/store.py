"""The commands ``ctxreuse store ls|stat|verify|gc``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ctxreuse.config import StoreConfig

__all__ = ["app"]

_EXAMPLES = """[bold]Examples[/bold]

ctxreuse store ls                     sessions, newest first

ctxreuse store stat --json            figures for a monitor

ctxreuse store verify                 read everything, compare all checksums

ctxreuse store gc                     drop what is corrupt or out of reach

Reading is safe while another process owns the store; gc needs it closed.
"""

app = typer.Typer(help="The store of contexts on this machine.", no_args_is_help=True, epilog=_EXAMPLES)

_Path = Annotated[str | None, typer.Option("--path", metavar="DIR", help="The store's folder (store.path).")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def _store(ctx: typer.Context, path: str | None) -> StoreConfig:
    from ctxreuse.cli.config import loaded
    from ctxreuse.errors import StoreError

    found = loaded(ctx, store__path=path).settings.store
    if not found.folder().is_dir():
        fix = "It is made when something is stored; or name another with --path"
        raise StoreError("there is no store here", where=str(found.folder()), fix=fix)
    return found


def _json(body: Any) -> None:
    import msgspec

    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(body)) + b"\n")


@app.command("ls", epilog=_EXAMPLES)
def list_sessions(
    ctx: typer.Context,
    path: _Path = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many, newest first.")] = 50,
    json: _Json = False,
) -> None:
    """List sessions: their names, how long they are, and what they were forked from."""
    from datetime import datetime

    from ctxreuse.store import Ledger

    with Ledger.open(_store(ctx, path).folder(), readonly=True) as ledger:
        sessions, total = ledger.sessions(limit=limit), ledger.count()
        depths = {s.id: ledger.turn(s.head).depth if s.head else 0 for s in sessions}
        names = {s.id: s.name for s in sessions}
    if json:
        _json({"sessions": [{"session": s, "turns": depths[s.id]} for s in sessions], "total": total})
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("session", "id", box=None, header_style="bold", pad_edge=False)
    table.add_column("turns", justify="right")
    table.add_column("changed", no_wrap=True)
    table.add_column("forked from")
    for s in sessions:
        changed = datetime.fromtimestamp(s.updated).strftime("%Y-%m-%d %H:%M")
        origin = names.get(s.origin, s.origin[:8]) if s.origin else ""
        table.add_row(escape(s.name), s.id[:8], str(depths[s.id]), changed, escape(origin))
    console = Console()
    console.print(table)
    if total > len(sessions):
        console.print(f"[dim]{total - len(sessions)} more; --limit shows them[/dim]")


@app.command("stat")
def stat(ctx: typer.Context, path: _Path = None, json: _Json = False) -> None:
    """Show how much is kept, and at which levels: blocks, states and tokens of KV, sessions and turns of text."""
    from ctxreuse.inspection import held
    from ctxreuse.store import Ledger
    from ctxreuse.units import rounded_bytes

    settings = _store(ctx, path)
    folder = settings.folder()
    rows: list[tuple[str, str]] = [("folder", str(folder))]
    body: dict[str, Any] = {"path": str(folder)}
    if (folder / "blocks" / "data.mdb").exists():
        cache = held(folder)
        body |= {"blocks": cache, "capacity": settings.capacity}
        rows += [
            ("KV", f"{cache.tokens:,} tokens in {cache.blocks:,} blocks, {cache.states:,} states"),
            ("size", f"{rounded_bytes(cache.nbytes)} of {rounded_bytes(settings.capacity)}"),
            ("chunks", f"{cache.chunks:,} are known to other prompts"),
            ("file", rounded_bytes(cache.file_bytes)),
        ]
        rows += [
            (level, f"{tokens:,} tokens in {blocks:,} blocks, {rounded_bytes(nbytes)}")
            for level, (blocks, tokens, nbytes) in cache.levels.items()
        ]
    if (folder / "ledger" / "data.mdb").exists():
        with Ledger.open(folder, readonly=True) as ledger:
            texts = ledger.stats()
        body["ledger"] = texts
        rows += [("text", f"{texts.sessions:,} sessions, {texts.turns:,} turns, {rounded_bytes(texts.file_bytes)}")]
    if json:
        _json(body)
        return
    for name, value in rows:
        typer.echo(f"{name:<12}{value}")


@app.command("verify", epilog=_EXAMPLES)
def verify(ctx: typer.Context, path: _Path = None, json: _Json = False) -> None:
    """Read everything and compare all checksums and links; exits with 1 if anything is wrong. Changes nothing."""
    from ctxreuse.store import verify as read_all

    folder = _store(ctx, path).folder()
    with _progress("verifying") as advance:
        verdict = read_all(folder, advance)
    if json:
        bad = [{"key": key.hex(), "why": why} for key, why in verdict.bad]
        counts = {name: getattr(verdict, name) for name in ("blocks", "states", "sessions", "turns")}
        _json({"clean": verdict.clean, **counts, "bad": bad, "problems": verdict.problems})
    else:
        for key, why in verdict.bad:
            typer.echo(f"{key.hex()[:16]}  {why}")
        for why in verdict.problems:
            typer.echo(why)
        found = "Everything is as it was written" if verdict.clean else "`ctxreuse store gc` drops what is corrupt"
        typer.echo(
            f"{found}: {verdict.blocks:,} blocks, {verdict.states:,} states, {verdict.sessions:,} sessions, "
            f"{verdict.turns:,} turns read."
        )
    if not verdict.clean:
        raise typer.Exit(1)


@app.command("gc", epilog=_EXAMPLES)
def gc(ctx: typer.Context, path: _Path = None, json: _Json = False) -> None:
    """Remove turns that no session reaches and cached entries that are corrupt."""
    from ctxreuse.store import gc as collect

    folder = _store(ctx, path).folder()
    with _progress("collecting") as advance:
        gone = collect(folder, advance)
    if json:
        _json(gone)
    else:
        typer.echo(f"{gone.turns:,} turns and {gone.entries:,} corrupt entries removed; their pages are used again.")


class _progress:
    """A progress bar on standard error, called as ``advance(done, total)``; nothing where that is no terminal."""

    def __init__(self, text: str) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(text, total=None)

    def __enter__(self) -> Any:
        self._bar.start()
        return lambda done, total: self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
