"""Bars of what is fetched and converted: on standard error, and in a notebook in the cell's output."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from html import escape
from typing import Any

__all__ = ["Bar", "bars"]

#: Takes what is done so far.
Bar = Callable[[int], None]
#: A notebook's bar moves by a hundredth of the whole: each move is a message to the browser.
_STEPS = 100


@contextlib.contextmanager
def bars(progress: bool, *, bytes_: bool = True) -> Iterator[Callable[[str, int], Bar]]:
    """Yields ``bar(label, total)``, which makes a callback that takes what is done so far; silent without `progress`.

    ``bytes_``: what is counted are bytes.
    """
    if not progress:
        yield lambda label, total: lambda so_far: None
        return
    if _in_notebook():
        yield lambda label, total: _notebook_bar(label, total, bytes_)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    count = DownloadColumn() if bytes_ else MofNCompleteColumn()
    columns = (TextColumn("{task.description:<12}"), BarColumn(), count, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:

        def bar(label: str, total: int) -> Bar:
            task = shown.add_task(label, total=total)
            return lambda so_far: shown.update(task, completed=min(so_far, total))

        yield bar


def _in_notebook() -> bool:
    """Return True in a kernel of Jupyter's, whose shell is none of a terminal's; its standard error draws no bar."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and type(shell).__name__ != "TerminalInteractiveShell"


def _notebook_bar(label: str, total: int, bytes_: bool) -> Bar:
    import IPython.display as ipython

    html: Any = ipython.HTML
    display: Any = ipython.display

    def shown(so_far: int) -> Any:
        count = f"{so_far / 1e6:.1f} of {total / 1e6:.1f} MB" if bytes_ else f"{so_far} of {total}"
        return html(f"{escape(label)} <progress max='{max(total, 1)}' value='{so_far}'></progress> {count}")

    drawn = display(shown(0), display_id=True)
    step = 0

    def bar(so_far: int) -> None:
        nonlocal step
        now = min(so_far, total)
        reached = _STEPS * now // max(total, 1)
        if reached > step:
            step = reached
            drawn.update(shown(now))

    return bar
