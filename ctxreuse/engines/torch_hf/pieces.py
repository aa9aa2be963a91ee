"""Where a run of tokens is cut on its way through the model."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["pieces"]


def pieces(start: int, end: int, chunk: int, boundary: int, step: bool) -> Iterator[tuple[int, int]]:
    """Positions [at, stop) of each forward from ``start`` to ``end``.

    At most 1.5 times ``chunk`` tokens go together; long runs are cut at multiples of it, so that a resumed and a whole
    prefill share most of their cuts, and thereby their rounding. ``boundary`` (if inside) is always a cut. With
    ``step`` what follows a context goes token by token, and what starts one goes together.
    """
    at = start
    while at < end:
        goal = boundary if at < boundary < end else end
        if step:
            stop = goal if at == 0 else at + 1
        elif goal - at <= chunk:
            stop = goal
        else:
            stop = (at // chunk + 1) * chunk
            if stop - at < chunk // 2:
                stop += chunk
            stop = min(stop, goal)
        yield at, stop
        at = stop
