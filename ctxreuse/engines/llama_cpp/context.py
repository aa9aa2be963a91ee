"""One context of the llama.cpp engine: where its rows are, its windows."""

from __future__ import annotations

from collections.abc import Callable

from ctxreuse.engines.llama_cpp.state import LlamaState
from ctxreuse.engines.resident import ResidentContext

__all__ = ["LlamaContext"]


class LlamaContext(ResidentContext):
    """See `ResidentContext`; its changes go through engine and pool."""

    #: Newest snapshots kept, and how many of those that runs shorter than a block leave.
    KEEP_STATES, KEEP_PASSING = 12, 2

    def __init__(self, nbytes: Callable[[LlamaContext], int], room: int) -> None:
        """``nbytes`` measures a context; ``room``: tokens that it will probably have."""
        super().__init__()
        self.cropped = False  # and nothing has been computed since
        self.draft_start: int | None = None  # where the last pass began, if it checked a draft
        self.room = room
        #: The pool's: the slot in its cells, or -1 and the rows, which are None while there are no tokens.
        self.slot = -1
        self.rows: LlamaState | None = None
        #: The sliding windows at some positions, and their levels.
        self.snapshots: dict[int, tuple[LlamaState, str]] = {}
        self._passing: set[int] = set()
        self.run_start: int | None = None  # where a run began of which some tokens are still to come
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of K and V and snapshots, and of room in the cells if it is there."""
        return self._nbytes(self) + sum(windows.data.nbytes for windows, _ in self.snapshots.values())

    @property
    def states(self) -> tuple[int, ...]:
        """Positions of the snapshots, ascending."""
        return tuple(sorted(self.snapshots))

    def __repr__(self) -> str:
        return f"LlamaContext(n={self.n}, slot={self.slot})"

    def keep_snapshot(self, windows: LlamaState, level: str, *, passing: bool = False) -> None:
        """Keep windows, and of all only the newest few; ``passing``: they were not requested there."""
        self.snapshots[windows.cells] = windows, level
        self._passing.discard(windows.cells)
        if passing:
            self._passing.add(windows.cells)
        self._passing &= self.snapshots.keys()
        for old in sorted(self._passing)[: -self.KEEP_PASSING]:
            del self.snapshots[old]
        for old in sorted(self.snapshots)[: -self.KEEP_STATES]:
            del self.snapshots[old]
