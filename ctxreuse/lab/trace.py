"""What a trace is: requests in the order of their arrival, each a path of block ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ctxreuse.pauses.kinds import END_OF_TURN, TOOL_CALL, UNKNOWN, PauseKind, infer

__all__ = ["END_OF_TURN", "TOOL_CALL", "UNKNOWN", "Path", "Request", "Trace", "label_of"]

#: Block ids, root first: int64 [blocks].
Path: TypeAlias = npt.NDArray[np.int64]


def label_of(stop: str) -> int:
    """Return the reason (see `ctxreuse.pauses.kinds`) that APIs write so; UNKNOWN for what traces do not say."""
    return infer(stop).reason


class Request(NamedTuple):
    """One prompt.

    ``t``: seconds since the trace began. ``path``: its blocks; an id names everything from the prompt's beginning
    to the end of that block, so equal ids mean equal prefixes. ``tokens``: of the prompt; the last block may be filled
    in part, and tokens behind the last block belong to none. ``session``: the conversation, -1 where unknown.
    ``label``: why the session's turn before this one stopped; ``stop``: why this one did (reasons of
    `ctxreuse.pauses.kinds`). ``output``: tokens answered;
    ``busy``: seconds that the answer took; ``pause``: seconds between the session's last answer and this request.
    ``shape``: what the answer had: 1 for text, 2 for thinking, 4 for calls of tools, added up.
    """

    t: float
    path: Path
    tokens: int
    session: int = -1
    label: int = UNKNOWN
    stop: int = UNKNOWN
    output: int = 0
    busy: float = 0.0
    pause: float = 0.0
    shape: int = 0

    @property
    def kind(self) -> PauseKind:
        """Why this turn stopped and what its answer had, as policies see it."""
        return PauseKind(self.stop, bool(self.shape & 1), bool(self.shape & 2), bool(self.shape & 4))


class Trace:
    """Requests that can be read again and again: each ``iter`` reads the source again, a few at a time.

    ``block_tokens``: tokens of one whole block. ``rows``: how many requests there are, None if unknown before reading.
    Iterating raises FormatError with the line for a malformed source.
    """

    def __init__(
        self,
        name: str,
        block_tokens: int,
        read: Callable[[], Iterable[Request]],
        *,
        format: str,
        rows: int | None = None,
    ) -> None:
        self.name, self.block_tokens, self.format, self.rows = name, block_tokens, format, rows
        self._read = read

    def __iter__(self) -> Iterator[Request]:
        return iter(self._read())

    def select(self, keep: Callable[[Request], bool], name: str) -> Trace:
        """Return the requests that ``keep`` is true of, at their own times."""
        return Trace(f"{self.name} {name}", self.block_tokens, lambda: (r for r in self if keep(r)), format=self.format)
