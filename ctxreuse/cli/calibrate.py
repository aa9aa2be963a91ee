"""The command ``ctxreuse calibrate``: makes the card that lossy levels need, or the one that moved chunks need."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from ctxreuse.reuse.card import ChunkCard

__all__ = ["EXAMPLES", "calibrate", "show_chunk_card"]

EXAMPLES = """[bold]Examples[/bold]

ctxreuse calibrate smollm2                       minutes; texts that every Python brings along

ctxreuse calibrate smollm2 --text notes.txt --text chats.txt   on what you really feed it

ctxreuse calibrate ./my-model --levels 0.03,0.01+0.0015 --plot rate.svg

ctxreuse calibrate smollm2 --chunks              how good documents are that are reused at other positions

ctxreuse calibrate gemma3-270m --chunks --whole  a model of sliding windows, all tokens kept

A level kl-0.01 moves the distribution of the next token by at most 0.01 nats, as measured on text set aside for it; the
table is of other text again. 0.01+0.0015 is a level with a refinement, which can be fetched later. With --chunks the
card says by which repair, and how far, reused chunks move that distribution; requests get what they allow.
"""


def calibrate(
    model: Annotated[str, typer.Argument(help="A name from `ctxreuse model ls`, or a Hugging Face folder.")],
    text: Annotated[
        list[Path] | None, typer.Option("--text", metavar="FILE", help="Text to calibrate on; may be repeated.")
    ] = None,
    levels: Annotated[
        str | None, typer.Option("--levels", metavar="KL,KL+KL", help="Divergences to promise, in nats a token.")
    ] = None,
    windows: Annotated[
        int, typer.Option("--windows", min=2, max=512, help="Windows of text to learn from; a third more to measure.")
    ] = 24,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Threads of the engine.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw rate against divergence.")] = None,
    chunks: Annotated[
        bool, typer.Option("--chunks", help="Measure reuse at other positions: the card that the gate asks.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Of --chunks: less text and fewer repairs.")] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="Of --chunks: keep all tokens of layers with sliding windows.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the card to FILE.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress; print only the card's file.")] = False,
) -> None:
    """Measure how a model's K and V can be coded, and keep it as a card beside the others of the model."""
    if chunks:
        _chunks(model, text or [], threads, plot, out, quick=quick, whole=whole, quiet=quiet)
        return
    from rich.console import Console

    from ctxreuse import calibrate as work
    from ctxreuse.cli.codec import show_card
    from ctxreuse.codec import Shelf, card_digest, write_card
    from ctxreuse.engines.gauge import open_gauge

    console, began = Console(stderr=True), time.monotonic()
    targets = work.Target.parse(levels) if levels else work.DEFAULT_TARGETS
    given = work.read_texts(text) if text else None
    gauge, tokenizer = open_gauge(model, threads=threads)
    settings = work.settings_for(
        gauge, calibration=windows, validation=max(1, windows // 4), held_out=max(1, windows // 3)
    )._replace(targets=targets)
    source = ", ".join(path.name for path in text) if text else "Python's reference and library"
    counts = "/".join(str(n) for n in settings.windows.values())
    notes = {
        "model": Path(model).name,
        "text": source,
        "windows": f"{counts} of {settings.prefix}+{settings.scored} tokens",
    }
    with _Bars(console, quiet) as bars:
        card = work.calibrate(gauge, tokenizer, given or work.default_texts(), settings, bars.advance, notes)
    data = write_card(card)
    path = Shelf().add(data)
    if out is not None:
        out.write_bytes(data)
    if plot is not None:
        from ctxreuse.calibrate.plot import draw

        draw({notes["model"]: [(lv.info.bits, lv.info.kl) for lv in card.levels]}, f"Levels of {notes['model']}", plot)
    if not quiet:
        show_card(card, card_digest(data).hex(), Console(stderr=True))
        console.print(f"[dim]{time.monotonic() - began:.0f} s[/dim]")
    typer.echo(path)


def _chunks(
    model: str,
    text: list[Path],
    threads: int | None,
    plot: Path | None,
    out: Path | None,
    *,
    quick: bool,
    whole: bool,
    quiet: bool,
) -> None:
    """Measure chunks at other positions and keep the card."""
    from rich.console import Console

    from ctxreuse import calibrate as work
    from ctxreuse.calibrate.chunks import calibrate_chunks, chunk_settings
    from ctxreuse.engines import open_engine
    from ctxreuse.reuse import ChunkShelf, write_chunk_card

    console, began = Console(stderr=True), time.monotonic()
    given = work.read_texts(text) if text else None
    engine = open_engine(model, dtype="float32", threads=threads, **({"whole": True} if whole else {}))
    settings = chunk_settings(engine, quick=quick)
    notes = {
        "model": Path(model).name,
        "text": ", ".join(path.name for path in text) if text else "Python's reference and library",
        "scenes": ", ".join(f"{count} of {shape.name}, next {shape.following}" for shape, count in settings.shapes),
    }
    with _Bars(console, quiet) as bars:
        card = calibrate_chunks(engine, given or work.default_texts(), settings, bars.advance, notes)
    path = ChunkShelf().add(card)
    if out is not None:
        out.write_bytes(write_chunk_card(card))
    if plot is not None:
        from ctxreuse.calibrate.plot import draw_repairs

        draw_repairs(card.measured, f"Chunks of {notes['model']} at other positions", plot)
    if not quiet:
        show_chunk_card(card, console)
        console.print(f"[dim]{time.monotonic() - began:.0f} s[/dim]")
    typer.echo(path)


def show_chunk_card(card: ChunkCard, console: Console) -> None:
    """Print what was measured of repairs, and what it was measured on."""
    from rich.table import Table

    table = Table(title="chunks at other positions", title_justify="left")
    for column in ("chunks", "stood", "repair", "KL", "at most", "top-1", "ΔNLL", "recomputed"):
        words = column in ("chunks", "stood", "repair")
        table.add_column(column, justify="left" if words else "right", overflow="fold")
    for one in sorted(card.measured, key=lambda one: (one.chunks * one.tokens, one.kind, one.recomputed)):
        figures = (f"{one.kl:.4f}", f"{one.kl_high:.4f}", f"{one.top1:.1%}", f"{one.dnll:+.4f}")
        table.add_row(f"{one.chunks} x {one.tokens}", one.kind, one.repair, *figures, f"{one.recomputed:.1%}")
    console.print(table)
    if card.reads:
        table = Table(title="runs read where they are held", title_justify="left")
        for column in ("held", "read", "KL", "at most", "top-1", "ΔNLL"):
            table.add_column(column, justify="right" if column not in ("held", "read") else "left", overflow="fold")
        for read in card.reads:
            figures = (f"{read.kl:.4f}", f"{read.kl_high:.4f}", f"{read.top1:.1%}", f"{read.dnll:+.4f}")
            table.add_row(f"{read.tokens}", read.words, *figures)
        console.print(table)
    for name, value in card.notes.items():
        console.print(f"[dim]{name}: {value}[/dim]", highlight=False, markup=True)


class _Bars:
    """Progress of the stages on standard error: a bar each, or a line each where that is no terminal."""

    def __init__(self, console: Console, quiet: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar: Progress = Progress(*columns, console=console, disable=quiet or not console.is_terminal)
        self._lines = None if quiet or console.is_terminal else console
        self._began = time.monotonic()
        self._task: TaskID | None = None
        self._what, self._done = "", 0

    def __enter__(self) -> _Bars:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def advance(self, what: str, done: int, total: int) -> None:
        """See `ctxreuse.calibrate.gather.Progress`; a total of 0 is one that nobody knows."""
        if what != self._what or done < self._done:
            self._task = self._bar.add_task(what, total=total or None)
            if self._lines is not None:
                self._lines.print(f"{time.monotonic() - self._began:5.0f} s  {what}", highlight=False)
        self._what, self._done = what, done
        if self._task is not None:
            self._bar.update(self._task, completed=done)
