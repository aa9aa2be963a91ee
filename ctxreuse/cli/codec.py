"""The commands ``ctxreuse codec ls|show``: cards on this machine, and what their levels cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ctxreuse.codec import Card

__all__ = ["app", "show_card"]

app = typer.Typer(help="Levels at which blocks are kept and sent.", no_args_is_help=True)


@app.command("ls")
def list_cards() -> None:
    """Show all cards, by model, newest first; lossy levels use a model's newest."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in ("card", "model", "level", "bits a value", "KL", "top-1", "size"):
        table.add_column(column, no_wrap=column in ("card", "level", "size"))
    for digest, card, size in _cards():
        for number, level in enumerate(card.levels):
            info = level.info
            first = number == 0
            table.add_row(
                digest[:16] if first else "",
                card.notes.get("model", card.model.hex()[:16]) if first else "",
                info.name,
                f"{info.bits:.2f}",
                f"{info.kl:.4f}",
                f"{info.top1:.1%}",
                f"{size / 1e6:.1f} MB" if first else "",
            )
    Console().print(table)


@app.command("show")
def show(
    card: Annotated[str, typer.Argument(help="The first digits of a card's name, from `ctxreuse codec ls`.")],
) -> None:
    """Show one card: its levels with all figures, and what it was made from."""
    from rich.console import Console

    from ctxreuse.errors import ConfigError

    found = [(digest, value) for digest, value, _ in _cards() if digest.startswith(card.lower())]
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} cards have a name that begins with {card!r}", fix="Look at `ctxreuse codec ls`"
        )
    show_card(found[0][1], found[0][0], Console())


def _cards() -> Iterator[tuple[str, Card, int]]:
    """(digest, card, bytes) of every card on the user's shelf, newest first; damaged files are left out."""
    from ctxreuse.codec import Shelf, card_digest, read_card
    from ctxreuse.errors import FormatError

    paths = Shelf().folder.glob("*/*.card")
    for path in sorted(paths, key=lambda path: (-path.stat().st_mtime_ns, path.name)):
        data = path.read_bytes()
        try:
            yield card_digest(data).hex(), read_card(data), len(data)
        except FormatError:
            continue


def show_card(card: Card, digest: str, console: Console) -> None:
    """Print a card's levels and notes."""
    from rich.table import Table

    table = Table(title=f"card {digest[:16]}", title_justify="left")
    for column in ("level", "bits a value", "KL", "top-1", "ΔNLL", "components", "refines"):
        table.add_column(column, justify="left" if column in ("level", "refines") else "right")
    for level in card.levels:
        info = level.info
        coded = sum(len(coding.table) for coding in level.codings)
        held = sum(len(group.mean) for plane in card.planes for group in plane.groups)
        figures = (f"{info.bits:.2f}", f"{info.kl:.4f}", f"{info.top1:.1%}", f"{info.dnll:+.4f}")
        table.add_row(info.name, *figures, f"{coded / max(held, 1):.0%}", info.base)
    console.print(table)
    for name, value in card.notes.items():
        console.print(f"[dim]{name}: {value}[/dim]", highlight=False, markup=True)
