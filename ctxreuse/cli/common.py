"""What the commands of ``ctxreuse``, ``ctxreuse-edge`` and ``ctxreuse-cloud`` share: options, output, old names."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.progress import TaskID

    from ctxreuse.config import Settings
    from ctxreuse.daemon.client import Client

__all__ = [
    "Json",
    "Once",
    "ProgressBars",
    "Url",
    "app_of",
    "daemon_client",
    "load_settings",
    "old_name",
    "print_json",
    "print_rows",
]

F = TypeVar("F", bound=Callable[..., Any])

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Once = Annotated[bool, typer.Option("--once", help="Print what there is now, and end.")]
Url = Annotated[str, typer.Option("--url", metavar="URL", help="Address of the daemon; default: found by its store.")]


def app_of(name: str, about: str, examples: str) -> typer.Typer:
    """Return the root of a command line, with the options ``--config`` and ``--version``."""
    app = typer.Typer(
        name=name,
        help=about,
        epilog=examples,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        ctx: typer.Context,
        config: Annotated[
            str | None,
            typer.Option("--config", metavar="FILE", help="Read settings from FILE instead of the default one."),
        ] = None,
        version: Annotated[
            bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        ctx.obj = config

    return app


def _show_version(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        import ctxreuse

        typer.echo(f"{ctx.info_name} {ctxreuse.__version__}")
        raise typer.Exit


def old_name(app: typer.Typer, old: str, new: str) -> Callable[[F], F]:
    """Keep a command under its ``old`` name, hidden and with a warning that names the ``new`` one."""

    def register(command: F) -> F:
        @functools.wraps(command)
        def renamed(*args: Any, **options: Any) -> Any:
            typer.echo(f"warning: `{old}` is called `{new}` now; the old name will be removed", err=True)
            return command(*args, **options)

        app.command(old, hidden=True)(renamed)
        return command

    return register


def load_settings(ctx: typer.Context, flags: Mapping[str, Any] | None = None) -> Settings:
    """Load the settings under the global ``--config``; ``flags`` by dotted name, None: not given."""
    from ctxreuse.config import load

    return load(ctx.find_root().obj, flags=flags).settings


def daemon_client(
    url: str,
    address_file: Path,
    default: tuple[str, int],
    key_files: Sequence[str] = (),
    *,
    program: str = "ctxreuse-edge",
    timeout: float = 600.0,
) -> Client:
    """Return a client of the daemon at ``url``, else at the address in ``address_file``, else at host and port.

    It has the first key in the first of ``key_files`` that has keys, not hashes; else it stands in the URL.
    """
    from ctxreuse.daemon.client import Client
    from ctxreuse.daemon.key_file import is_json, read_keys
    from ctxreuse.daemon.lifecycle import read_address

    certificate = ""
    if not url:
        found = read_address(address_file)
        url = found.url if found is not None else "http://{}:{}".format(*default)
        certificate = found.certificate if found is not None else ""
    plain = [file for file in key_files if file and not is_json(Path(file).expanduser())]
    key = read_keys(plain[0])[0] if plain else ""
    return Client(url, key=key, timeout=timeout, program=program, certificate=certificate)


def print_json(body: Any) -> None:
    """Print a value as indented JSON on standard output."""
    import msgspec

    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(body)) + b"\n")


def print_rows(rows: Iterable[tuple[str, str]], width: int = 9) -> None:
    """Print names and values in two columns."""
    for name, value in rows:
        typer.echo(f"{name:<{width}}{value}")


class ProgressBars:
    """Progress of the stages of a command on standard error: a bar each; no output unless it is a terminal.

    ``lines``: where it is no terminal, print a line for each stage.
    """

    def __init__(self, *, quiet: bool = False, lines: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True)
        terminal = self._console.is_terminal
        columns = (TextColumn("{task.description:<14}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, transient=not lines, disable=quiet or not terminal)
        self._lines = lines and not quiet and not terminal
        self._began = time.monotonic()
        self._task: TaskID | None = None
        self._stage, self._done = "", 0

    def __enter__(self) -> ProgressBars:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def advance(self, stage: str, done: int, total: int | None, text: str = "") -> None:
        """Report progress of a stage; total 0 or None: unknown. ``text`` is shown in place of the stage's name."""
        if stage != self._stage or done < self._done:
            self._task = self._bar.add_task(text or stage, total=total or None)
            if self._lines:
                self._console.print(f"{time.monotonic() - self._began:5.0f} s  {stage}", highlight=False)
        self._stage, self._done = stage, done
        if self._task is not None:
            self._bar.update(self._task, completed=done, description=text or stage)
