"""What a trace is: requests in the order of their arrival, each a path of block ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["END_OF_TURN", "TOOL_CALL", "UNKNOWN", "Path", "Request", "Trace", "label_of"]

#: Block ids, root first: int64 [blocks].
Path: TypeAlias = npt.NDArray[np.int64]

#: Why a turn stopped, as the policies' labels. Traces tell no more than these.
UNKNOWN: Final = 0
TOOL_CALL: Final = 1
END_OF_TURN: Final = 2

_LABELS = {"tool_use": TOOL_CALL, "tool_calls": TOOL_CALL, "end_turn": END_OF_TURN, "stop": END_OF_TURN}


def label_of(stop: str) -> int:
    """The label of a stop reason as APIs write it; UNKNOWN for what traces do not say."""
    return _LABELS.get(stop, UNKNOWN)


class Request(NamedTuple):
    """One prompt.

    ``t``: seconds since the trace began. ``path``: its blocks; an id stands for everything from the prompt's beginning
    to the end of that block, so equal ids mean equal prefixes. ``tokens``: of the prompt; the last block may be filled
    in part, and tokens behind the last block belong to none. ``session``: the conversation, -1 where unknown.
    ``label``: why the session's turn before this one stopped; ``stop``: why this one did. ``output``: tokens answered;
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


class Trace:
    """Requests that can be read again and again: each ``iter`` reads the source anew, a few at a time.

    ``block_tokens``: tokens of one whole block. ``rows``: how many requests there are, None where only reading tells.
    Iterating raises FormatError for a source that is not what it says, naming the line.
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
        """The requests that ``keep`` is true of, at their own times."""
        return Trace(f"{self.name} {name}", self.block_tokens, lambda: (r for r in self if keep(r)), format=self.format)
