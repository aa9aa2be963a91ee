"""Commands for the file of a daemon's API keys, shared by ``ctxreuse-edge keys`` and ``ctxreuse-cloud tenants``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from ctxreuse.cli.common import Json, old_name, print_json

if TYPE_CHECKING:
    from ctxreuse.daemon.key_file import ApiKey, KeyFile

__all__ = ["key_commands"]

_SCOPES = ("answers", "status", "metrics", "admin")


def key_commands(
    about: str, setting: str, path: Callable[[typer.Context], str], default: str, *, old_names: bool = False
) -> typer.Typer:
    """Return the commands ``add``, ``ls`` and ``rm``.

    Args:
        about: what they are for.
        setting: name of the setting that names the file.
        path: the setting's value.
        default: name of the file beside the config file, where the setting is empty.
        old_names: they are also called ``list`` and ``revoke``, as in version 0.1.0.
    """
    app = typer.Typer(help=about, no_args_is_help=True)

    def key_file(ctx: typer.Context) -> KeyFile:
        from pathlib import Path

        from ctxreuse.config import config_path
        from ctxreuse.daemon.key_file import KeyFile

        named = path(ctx)
        return KeyFile(Path(named).expanduser() if named else config_path().with_name(default))

    @app.command()
    def add(
        ctx: typer.Context,
        name: Annotated[str, typer.Argument(help="Whose key it is; the keys of one name share its share.")],
        scope: Annotated[
            list[str] | None,
            typer.Option(help="What it may: answers, status, metrics, admin; repeatable. Default: answers."),
        ] = None,
        expires: Annotated[str, typer.Option(metavar="TIME", help="Time until it expires, such as 30d or 12h.")] = "",
        requests: Annotated[int, typer.Option(min=0, help="Requests a minute at most; 0: unlimited.")] = 0,
        tokens: Annotated[
            int, typer.Option(min=0, help="Tokens a minute at most, computed of prompts and generated; 0: unlimited.")
        ] = 0,
    ) -> None:
        """Create an API key and print it; it cannot be shown again."""
        from ctxreuse.errors import ConfigError
        from ctxreuse.units import parse_duration

        scopes = tuple(dict.fromkeys(scope or ["answers"]))
        for one in scopes:
            if one not in _SCOPES:
                raise ConfigError(f"there is no scope {one!r}", fix=f"Use one of {', '.join(_SCOPES)}")
        file = key_file(ctx)
        lasts = parse_duration(expires) if expires else 0.0
        if expires and not lasts:
            raise ConfigError("a key cannot expire at once", fix="Write a time such as 30d")
        typer.echo(file.add(name, scopes, lasts=lasts, requests=requests, tokens=tokens))  # type: ignore[arg-type]
        typer.echo(f"{file.path} holds its hash; {setting} must name this file", err=True)

    @app.command("ls")
    def list_(ctx: typer.Context, json: Json = False) -> None:
        """List the keys: whose they are, their ids, what they may and how long."""
        keys = key_file(ctx).read().keys
        if json:
            print_json([_row(key) for key in keys])
            return
        for key in keys:
            limits = [f"{n:,} {what}/min" for n, what in ((key.requests, "requests"), (key.tokens, "tokens")) if n]
            until = f"expires {_date(key.expires)}" if key.expires else ""
            more = "  ".join(part for part in (",".join(key.scopes), until, *limits) if part)
            typer.echo(f"{key.tenant:<24} {key.id}  {_date(key.created)}  {more}")

    @app.command("rm")
    def remove(
        ctx: typer.Context, name: Annotated[str, typer.Argument(help="A name (all of its keys) or the id of a key.")]
    ) -> None:
        """Revoke API keys; a running daemon follows within a second, and ends their answers."""
        typer.echo(f"{key_file(ctx).revoke(name)} revoked")

    if old_names:
        old_name(app, "list", "tenants ls")(list_)
        old_name(app, "revoke", "tenants rm")(remove)
    return app


def _row(key: ApiKey) -> dict[str, object]:
    limits = {"requests": key.requests, "tokens": key.tokens}
    return {
        "tenant": key.tenant,
        "id": key.id,
        "scopes": key.scopes,
        "created": key.created,
        "expires": key.expires,
    } | limits


def _date(seconds: float) -> str:
    from datetime import UTC, datetime

    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"
