"""One context of the llama.cpp engine: its token ids, where its rows are, its load in flight."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ctxreuse.engines.imports import Import
from ctxreuse.engines.llama_cpp.state import LlamaState
from ctxreuse.engines.provenance import LevelRun, Provenance
from ctxreuse.errors import EngineError, FormatError, LinkError
from ctxreuse.identity.keys import Tokens

__all__ = ["LlamaContext"]


class LlamaContext:
    """See `ctxreuse.engines.base.Context`. Made by the engine only; all its changes go through engine and pool."""

    #: Newest snapshots kept, and how many of those that runs shorter than a block leave.
    KEEP_STATES, KEEP_PASSING = 12, 2

    def __init__(self, nbytes: Callable[[LlamaContext], int], room: int) -> None:
        """``nbytes`` measures a context; ``room``: tokens that it will probably have."""
        self.provenance = Provenance()
        self.broken = ""  # why the context cannot be used any more
        self.cropped = False  # and nothing has been computed since
        self.room = room
        #: The pool's: the slot in its cells, or -1 and the rows, which are None while there are no tokens.
        self.slot = -1
        self.rows: LlamaState | None = None
        self.loading: Import | None = None  # what fills ``rows``
        #: The sliding windows at some positions, and their levels.
        self.snapshots: dict[int, tuple[LlamaState, str]] = {}
        self._passing: set[int] = set()
        self.run_start: int | None = None  # where a run began of which some tokens are still to come
        self._nbytes = nbytes
        self._ids: Tokens = np.zeros(0, "<i4")

    @property
    def tokens(self) -> Tokens:
        """Ids processed so far, int32 [n]; read-only."""
        return self._ids

    @property
    def n(self) -> int:
        """Number of tokens processed so far."""
        return len(self._ids)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V and snapshots, and of room in the cells if it is there."""
        return self._nbytes(self) + sum(windows.data.nbytes for windows, _ in self.snapshots.values())

    @property
    def states(self) -> tuple[int, ...]:
        """Positions of the snapshots, ascending."""
        return tuple(sorted(self.snapshots))

    @property
    def levels(self) -> tuple[LevelRun, ...]:
        """See `ctxreuse.engines.base.Context.levels`."""
        return self.provenance.runs(self.n)

    def __repr__(self) -> str:
        return f"LlamaContext(n={self.n}, slot={self.slot})"

    def check_usable(self) -> None:
        """Raise EngineError if an earlier failure left the context without valid rows."""
        if self.broken:
            raise EngineError(f"the context cannot be used: {self.broken}", fix="Start a new one")

    def set_tokens(self, ids: Tokens) -> None:
        """The ids of all tokens processed; earlier views keep theirs."""
        self._ids = np.asarray(ids, "<i4")
        self._ids.flags.writeable = False

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

    def finish_load(self) -> None:
        """Return when no load is in flight; raises what `Loading.wait` raises."""
        if self.loading is None:
            return
        try:
            self.loading.wait()
        except (FormatError, LinkError) as error:
            corrupt = isinstance(error, FormatError)
            self.broken = f"a block that it was loaded from {'is corrupt' if corrupt else 'never came'}"
            raise
        finally:
            self.loading = None
