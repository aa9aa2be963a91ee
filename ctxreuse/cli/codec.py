"""The commands ``ctxreuse codec ls|show``: calibration profiles on this machine, and their levels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ctxreuse.codec import CodecProfile

__all__ = ["app", "show_profile"]

app = typer.Typer(help="Encodings of blocks in the store and on links.", no_args_is_help=True)


@app.command("ls")
def list_profiles() -> None:
    """List all calibration profiles, newest first; lossy levels use the newest of a model."""
    from rich.console import Console
    from rich.table import Table

    from ctxreuse.codec import ProfileStore

    table = Table()
    for column in ("profile", "model", "level", "bits a value", "KL", "top-1", "size"):
        table.add_column(column, no_wrap=column in ("profile", "level", "size"))
    for digest, profile, size in ProfileStore().everything():
        for number, level in enumerate(profile.levels):
            info = level.info
            first = number == 0
            table.add_row(
                digest[:16] if first else "",
                profile.notes.get("model", profile.model.hex()[:16]) if first else "",
                info.name,
                f"{info.bits:.2f}",
                f"{info.kl:.4f}",
                f"{info.top1:.1%}",
                f"{size / 1e6:.1f} MB" if first else "",
            )
    Console().print(table)


@app.command("show")
def show(
    profile: Annotated[str, typer.Argument(help="First digits of a profile's digest, from `ctxreuse codec ls`.")],
) -> None:
    """Show one profile: its levels with all figures, and the text it was made from."""
    from rich.console import Console

    from ctxreuse.codec import ProfileStore
    from ctxreuse.errors import ConfigError

    found = [(digest, value) for digest, value, _ in ProfileStore().everything() if digest.startswith(profile.lower())]
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} profiles have a digest that begins with {profile!r}", fix="Run `ctxreuse codec ls`"
        )
    show_profile(found[0][1], found[0][0], Console())


def show_profile(profile: CodecProfile, digest: str, console: Console) -> None:
    """Print a profile's levels and notes."""
    from rich.table import Table

    table = Table(title=f"profile {digest[:16]}", title_justify="left")
    for column in ("level", "bits a value", "KL", "worst kind", "top-1", "ΔNLL", "components", "refines"):
        words = column in ("level", "worst kind", "refines")
        table.add_column(column, justify="left" if words else "right", no_wrap=words)
    for level in profile.levels:
        info = level.info
        coded = sum(len(coding.table) for coding in level.codings)
        rows = sum(len(group.mean) for plane in profile.planes for group in plane.groups)
        worst = max(level.kinds, key=lambda kind: level.kinds[kind].kl, default="")
        kind = f"{level.kinds[worst].kl:.4f} {worst}" if worst else ""
        figures = (f"{info.bits:.2f}", f"{info.kl:.4f}", kind, f"{info.top1:.1%}", f"{info.dnll:+.4f}")
        table.add_row(info.name, *figures, f"{coded / max(rows, 1):.0%}", info.base)
    console.print(table)
    for name, value in profile.notes.items():
        console.print(f"[dim]{name}: {value}[/dim]", highlight=False, markup=True)
