"""The commands ``ctxreuse store ls|stat|verify|gc|compact|migrate|backup|restore|rescue``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ctxreuse.cli.common import Json, ProgressBars, daemon_client, load_settings, print_json, print_rows

if TYPE_CHECKING:
    from ctxreuse.config import StoreConfig
    from ctxreuse.store import Backup

__all__ = ["app"]

_EXAMPLES = """[bold]Examples[/bold]

ctxreuse store ls                     sessions, newest first

ctxreuse store ls --prefix crawl-     those whose names start so

ctxreuse store stat --json            figures for a monitor

ctxreuse store verify                 read everything and check all checksums

ctxreuse store gc                     drop what is corrupt or unreachable

ctxreuse store compact                rewrite the files: what was deleted is in none of them

ctxreuse store migrate                rewrite a store of an earlier version as this one does

ctxreuse store backup ~/backups/today copy all text, while it is written

ctxreuse store restore ~/backups/today --replace   bring it back

ctxreuse store rescue ~/rescued        save what can be read of a damaged ledger

Reading and backup are safe while another process owns the store, compact asks a daemon that does; gc,
migrate, restore and rescue need it closed.
"""

app = typer.Typer(help="The store of contexts on this machine.", no_args_is_help=True, epilog=_EXAMPLES)

_Path = Annotated[str | None, typer.Option("--path", metavar="DIR", help="The store's folder (store.path).")]


def _store(ctx: typer.Context, path: str | None) -> StoreConfig:
    from ctxreuse.errors import StoreError

    found = load_settings(ctx, {"store.path": path}).store
    if not found.folder().is_dir():
        fix = "It is created when something is stored; name another folder with --path"
        raise StoreError("there is no store here", where=str(found.folder()), fix=fix)
    return found


@app.command("ls", epilog=_EXAMPLES)
def list_sessions(
    ctx: typer.Context,
    path: _Path = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many, newest first.")] = 50,
    offset: Annotated[int, typer.Option("--offset", min=0, help="How many to skip before them.")] = 0,
    prefix: Annotated[str, typer.Option("--prefix", help="Only names that start so, in the order of names.")] = "",
    json: Json = False,
) -> None:
    """List sessions: name, length, and what each was forked from."""
    from datetime import datetime

    from ctxreuse.store import Ledger

    with Ledger.open(_store(ctx, path).folder(), readonly=True) as ledger:
        sessions, total = ledger.sessions(limit, offset, prefix=prefix), ledger.count()
        depths = {s.id: ledger.turn(s.head).depth if s.head else 0 for s in sessions}
        names = {s.id: s.name for s in sessions}
    if json:
        print_json({"sessions": [{"session": s, "turns": depths[s.id]} for s in sessions], "total": total})
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
    if len(sessions) == limit and (prefix or total > offset + limit):
        left = "there may be more" if prefix else f"{total - offset - limit:,} more"
        console.print(f"[dim]{left}; --offset {offset + limit} shows the next[/dim]")


@app.command("stat")
def stat(ctx: typer.Context, path: _Path = None, json: Json = False) -> None:
    """Show how much is stored, and at which levels: KV blocks, states and tokens; sessions and turns of text."""
    from ctxreuse.inspection import summarize_cache
    from ctxreuse.store import Ledger
    from ctxreuse.units import rounded_bytes

    settings = _store(ctx, path)
    folder = settings.folder()
    rows: list[tuple[str, str]] = [("folder", str(folder))]
    body: dict[str, Any] = {"path": str(folder)}
    if (folder / "blocks" / "data.mdb").exists():
        cache = summarize_cache(folder)
        body |= {"blocks": cache, "capacity": settings.capacity}
        rows += [
            ("KV", f"{cache.tokens:,} tokens in {cache.blocks:,} blocks, {cache.states:,} states"),
            ("size", f"{rounded_bytes(cache.nbytes)} of {rounded_bytes(settings.capacity)}"),
            ("chunks", f"{cache.chunks:,} are known by content"),
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
        print_json(body)
        return
    print_rows(rows, 12)


@app.command("verify", epilog=_EXAMPLES)
def verify(ctx: typer.Context, path: _Path = None, json: Json = False) -> None:
    """Read everything and check all checksums and links; changes nothing. Exits with 1 if anything is wrong."""
    from ctxreuse.store import verify as read_all

    folder = _store(ctx, path).folder()
    with ProgressBars() as bars:
        verdict = read_all(folder, partial(bars.advance, "verifying"))
    if json:
        bad = [{"key": key.hex(), "why": why} for key, why in verdict.bad]
        print_json({"clean": verdict.clean, **msgspec.structs.asdict(verdict), "bad": bad})
    else:
        for key, why in verdict.bad:
            typer.echo(f"{key.hex()[:16]}  {why}")
        for why in verdict.problems:
            typer.echo(why)
        for part in verdict.not_begun:
            typer.echo(f"the {part} were not begun" if part == "blocks" else f"the {part} was not begun")
        if verdict.unchecked:
            typer.echo(f"{verdict.unchecked:,} turns of an earlier version have no checksum")
        found = "No errors" if verdict.clean else "Damaged"
        found = "`ctxreuse store gc` drops what is corrupt" if verdict.bad else found
        typer.echo(
            f"{found}: {verdict.blocks:,} blocks, {verdict.states:,} states, {verdict.sessions:,} sessions, "
            f"{verdict.turns:,} turns read."
        )
    if not verdict.clean:
        raise typer.Exit(1)


@app.command("gc", epilog=_EXAMPLES)
def gc(ctx: typer.Context, path: _Path = None, json: Json = False) -> None:
    """Remove turns that no session reaches, and corrupt cache entries."""
    from ctxreuse.store import gc as collect

    folder = _store(ctx, path).folder()
    with ProgressBars() as bars:
        removed = collect(folder, partial(bars.advance, "collecting"))
    if json:
        print_json(removed)
    else:
        typer.echo(
            f"{removed.turns:,} turns and {removed.entries:,} corrupt entries removed; their pages will be reused."
        )


@app.command("compact", epilog=_EXAMPLES)
def compact(ctx: typer.Context, path: _Path = None, json: Json = False) -> None:
    """Rewrite the store's files, so that nothing that was deleted is in them; a running daemon is asked to do it."""
    from ctxreuse.daemon.lifecycle import read_address
    from ctxreuse.runtime.compaction import compact_folder
    from ctxreuse.store.lmdb.owner import attended
    from ctxreuse.units import rounded_bytes

    settings = _store(ctx, path)
    address = settings.folder() / "edge.json"
    if attended(settings.folder()) and read_address(address) is not None:
        edge = load_settings(ctx).edge
        done = daemon_client("", address, (edge.host, edge.port), edge.api_key_file).call("POST", "/api/compact", {})
        if json:
            print_json(done)
        else:
            typer.echo("The daemon rewrote its files." if done["compacted"] else "Nothing was deleted since.")
        return
    with ProgressBars() as bars:
        made = compact_folder(settings, partial(bars.advance, "compacting"))
    if json:
        print_json(made)
        return
    sizes = f"{rounded_bytes(made.bytes_before)} before, {rounded_bytes(made.bytes_after)} now"
    typer.echo(f"Rewritten without {made.turns:,} turns that no session reaches: {sizes}.")
    for file in made.kept:
        typer.echo(f"`restore --replace` kept {file}: delete it if nothing of it is to stay.")


@app.command("migrate", epilog=_EXAMPLES)
def migrate(ctx: typer.Context, path: _Path = None, json: Json = False) -> None:
    """Rewrite a store of any earlier version as this one writes it; stores of those open without it, too."""
    from ctxreuse.runtime.compaction import migrate_folder
    from ctxreuse.units import rounded_bytes

    settings = _store(ctx, path)
    with ProgressBars() as bars:
        made = migrate_folder(settings, partial(bars.advance, "rewriting"))
    if json:
        print_json(made)
        return
    sizes = f"{rounded_bytes(made.bytes_before)} before, {rounded_bytes(made.bytes_after)} now"
    typer.echo(f"{made.turns:,} turns rewritten, {made.dropped:,} entries of the cache dropped: {sizes}.")


@app.command("backup", epilog=_EXAMPLES)
def backup(
    ctx: typer.Context,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="A new folder; it is a store of its own.")],
    path: _Path = None,
    json: Json = False,
) -> None:
    """Copy all sessions, turns and token ids to a new folder, and check the copy; also while a daemon writes."""
    from ctxreuse.store import backup as copy

    folder = _store(ctx, path).folder()
    with ProgressBars() as bars:
        made = copy(folder, dest, partial(bars.advance, "copying"))
    _say_backup(made, "Backed up", json)


@app.command("restore", epilog=_EXAMPLES)
def restore(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A folder that backup or rescue made.")],
    path: _Path = None,
    replace: Annotated[bool, typer.Option("--replace", help="Also over a ledger; its file is kept.")] = False,
    json: Json = False,
) -> None:
    """Check a backup and bring it back. The store must be closed; a ledger is only replaced with --replace."""
    from ctxreuse.store import restore as bring_back

    folder = load_settings(ctx, {"store.path": path}).store.folder()
    with ProgressBars() as bars:
        made = bring_back(source, folder, partial(bars.advance, "checking"), replace=replace)
    _say_backup(made, "Restored", json)


def _say_backup(made: Backup, did: str, json: bool) -> None:
    from ctxreuse.units import rounded_bytes

    if json:
        print_json(made)
        return
    size = rounded_bytes(made.bytes)
    typer.echo(f"{did}: {made.sessions:,} sessions, {made.turns:,} turns, {size} in {made.path}, checked.")
    if made.replaced:
        typer.echo(f"What was there is kept in {made.replaced}.")


@app.command("rescue", epilog=_EXAMPLES)
def rescue(
    ctx: typer.Context,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="A new folder; it is a store of its own.")],
    path: _Path = None,
    json: Json = False,
) -> None:
    """Save what can be read of a damaged ledger into a new folder, and say what was lost; the ledger stays as it is."""
    from ctxreuse.store import rescue as save

    folder = _store(ctx, path).folder()
    with ProgressBars() as bars:
        saved = save(folder, dest, partial(bars.advance, "reading"))
    if json:
        print_json(saved)
        return
    for line in saved.lost:
        typer.echo(f"lost: {line}")
    lost = f"{saved.lost_turns:,} turns are lost"
    typer.echo(f"Saved in {dest}: {saved.sessions:,} sessions, {saved.turns:,} turns; {lost}.")
    typer.echo(f"`ctxreuse store restore {dest} --replace` puts them in the place of the damaged ledger.")
