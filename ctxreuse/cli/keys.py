"""The commands ``ctxreuse keys add|ls|allow|revoke``."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxreuse.cli.common import Json, old_name, print_json

if TYPE_CHECKING:
    from ctxreuse.bus.auth.allowlist import AllowList

__all__ = ["app"]

_EXAMPLES = """[bold]Examples[/bold]

ctxreuse keys add laptop                      on a device: make its key pair

ctxreuse keys allow laptop.pub --tenant me    in the cloud: let it in

ctxreuse keys ls                              keys here, and who may connect

ctxreuse keys revoke laptop                   cut it off, at once

The .key file is secret; give others the .pub file or its text. Devices of one tenant share contexts. A running cloud
follows the list without a restart.
"""

app = typer.Typer(help="Keys of this node, and who may connect to it.", no_args_is_help=True, epilog=_EXAMPLES)

_Dir = Annotated[
    str | None, typer.Option("--dir", metavar="DIR", help="Folder of keys; else the one in the user's config folder.")
]


def _folder(named: str | None) -> Path:
    from ctxreuse.bus.auth.allowlist import keys_folder

    return Path(named).expanduser() if named else keys_folder()


def _list(named: str | None) -> AllowList:
    from ctxreuse.bus.auth.allowlist import ALLOW_FILE, AllowList

    return AllowList(_folder(named) / ALLOW_FILE)


def _now() -> datetime:
    from ctxreuse.clock import SYSTEM_CLOCK

    return datetime.fromtimestamp(int(SYSTEM_CLOCK.now()), UTC)


@old_name(app, "new", "keys add")
@app.command("add", epilog=_EXAMPLES)
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the key is called, such as the device's name.")],
    dir: _Dir = None,
    json: Json = False,
) -> None:
    """Make a key pair: NAME.key (secret) and NAME.pub; prints the public key."""
    from ctxreuse.bus.auth.allowlist import NAME
    from ctxreuse.bus.auth.curve import KeyPair
    from ctxreuse.errors import ConfigError

    if not NAME.fullmatch(name):
        fix = "Use letters, digits and . _ @ -, at most 64, a letter or digit first"
        raise ConfigError(f"{name!r} cannot be the name of a key", fix=fix)
    folder = _folder(dir)
    secret, public = folder / f"{name}.key", folder / f"{name}.pub"
    if public.exists():
        raise ConfigError("a public key of this name exists already", where=str(public), fix="Choose another name")
    pair = KeyPair.new()
    pair.write(secret)
    pair.write_public(public)
    if json:
        print_json({"name": name, "public": pair.public.hex(), "key_file": str(secret), "public_file": str(public)})
        return
    typer.echo(pair.public.hex())
    typer.echo(f"secret in {secret}", err=True)
    typer.echo(f"to let it in elsewhere: ctxreuse keys allow {pair.public.hex()} --name {name} --tenant T", err=True)


@app.command("allow", epilog=_EXAMPLES)
def allow(
    key: Annotated[
        str, typer.Argument(metavar="KEY|FILE|NAME", help="A public key, its .pub file, or the name of a key here.")
    ],
    tenant: Annotated[str, typer.Option("--tenant", "-t", metavar="T", help="Whose contexts it may read and write.")],
    name: Annotated[
        str | None, typer.Option("--name", "-n", metavar="N", help="Its name in the list; else the file's.")
    ] = None,
    dir: _Dir = None,
) -> None:
    """Let a key connect to this node, as one of a tenant's devices."""
    from ctxreuse.bus.auth.allowlist import Allowed, key_place
    from ctxreuse.bus.auth.curve import public_key
    from ctxreuse.errors import ConfigError

    public = public_key(key)
    if name is None:
        place = key_place(key, ".pub")
        if not place.is_file():
            raise ConfigError("this key needs a name", fix="Give it one with --name")
        name = place.stem
    entries = _list(dir)
    entries.allow(Allowed(name, public, tenant, _now()))
    typer.echo(f"{name} may connect as a device of {tenant}; the list is {entries.path}")


@app.command("revoke", epilog=_EXAMPLES)
def revoke(
    key: Annotated[str, typer.Argument(metavar="NAME|PUBLICKEY", help="As `ctxreuse keys ls` shows it.")],
    dir: _Dir = None,
) -> None:
    """Refuse a key from now on; a running server disconnects it within seconds."""
    from ctxreuse.bus.auth.allowlist import CURVE_BYTES

    which: str | bytes = key
    if len(key) == 2 * CURVE_BYTES:
        try:
            which = bytes.fromhex(key)
        except ValueError:
            which = key
    entry = _list(dir).revoke(which, _now())
    typer.echo(f"{entry.name} can no longer connect")


@old_name(app, "list", "keys ls")
@app.command("ls", epilog=_EXAMPLES)
def list_keys(dir: _Dir = None, json: Json = False) -> None:
    """List the keys of this node and who may connect to it."""
    from ctxreuse.bus.auth.curve import public_key

    folder, entries = _folder(dir), _list(dir).entries
    # The public halves only: nothing here needs to open a secret.
    own = [(file.stem, public_key(str(file)).hex()) for file in sorted(folder.glob("*.pub"))]
    if json:
        allowed = [
            {"name": e.name, "public": e.public.hex(), "tenant": e.tenant, "added": e.added, "revoked": e.revoked}
            for e in entries
        ]
        print_json({"dir": str(folder), "keys": [{"name": n, "public": p} for n, p in own], "allowed": allowed})
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not own and not entries:
        console.print(f"no keys in {folder}; [bold]ctxreuse keys add NAME[/bold] makes one", highlight=False)
        return
    if own:
        table = Table("key of this node", "public key", box=None, header_style="bold", pad_edge=False)
        for stem, public in own:
            table.add_row(stem, public)
        console.print(table)
    if entries:
        table = Table("may connect", "tenant", "since", "public key", box=None, header_style="bold", pad_edge=False)
        for entry in sorted(entries, key=lambda e: (e.revoked is not None, e.name)):
            revoked = entry.revoked is not None
            since = f"revoked {entry.revoked:%Y-%m-%d}" if entry.revoked else f"{entry.added:%Y-%m-%d}"
            row = (entry.name, entry.tenant, since, entry.public.hex())
            table.add_row(*row, style="dim" if revoked else "")
        console.print(table)
