"""Tables for notebooks: values in, HTML out, all of it escaped."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["shortened", "table", "when"]

#: Rows of a table at most, and characters of a cell.
_ROWS, _CELL = 50, 300


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Return a table, the first 50 of its rows, with the number of those that are left out."""
    shown, left = list[str](), 0
    for row in rows:
        if len(shown) < _ROWS:
            shown.append("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>")
        else:
            left += 1
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    more = f'<tr><td colspan="{len(heads)}">{left:,} more</td></tr>' if left else ""
    title = f"<caption>{escape(shortened(caption))}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{''.join(shown)}{more}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return escape(shortened("" if value is None else str(value)))


def shortened(text: str, most: int = _CELL) -> str:
    """Return the beginning of a text; control characters in it become spaces."""
    cut = text if len(text) <= most else f"{text[:most]}…"
    return "".join(sign if sign.isprintable() or sign == "\n" else " " for sign in cut)


def when(seconds: float | None) -> str:
    """Return a time, in seconds since 1970, as date and time in UTC; "" for None."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
