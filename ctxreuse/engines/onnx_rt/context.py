"""One context of the ONNX Runtime engine: its slot, its token ids, its load in flight."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ctxreuse.engines.imports import Import
from ctxreuse.engines.onnx_rt.arena import KvSlot
from ctxreuse.engines.provenance import LevelRun, Provenance
from ctxreuse.errors import EngineError, FormatError, LinkError
from ctxreuse.identity.keys import Tokens

__all__ = ["OnnxContext"]


class OnnxContext:
    """See `ctxreuse.engines.base.Context`. Made by the engine only; all its changes go through the engine."""

    #: Every layer keeps K and V of all tokens.
    states: tuple[int, ...] = ()

    def __init__(self, room: Callable[[int], KvSlot], reserve: int) -> None:
        """``room`` leases a slot for so many tokens."""
        self.provenance = Provenance()
        self.broken = ""  # why the context cannot be used any more
        self._room = room
        self._ids: Tokens = np.zeros(0, "<i4")
        self._pending: Import | None = None
        self.slot = room(reserve)

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
        """Bytes of K and V that the slot has room for."""
        return self.slot.nbytes

    @property
    def levels(self) -> tuple[LevelRun, ...]:
        """See `ctxreuse.engines.base.Context.levels`."""
        return self.provenance.runs(self.n)

    def __repr__(self) -> str:
        return f"OnnxContext(n={self.n}, nbytes={self.nbytes})"

    def check_usable(self) -> None:
        """Raise EngineError if an earlier failure left the context without valid rows."""
        if self.broken:
            raise EngineError(f"the context cannot be used: {self.broken}", fix="Start a new one")

    def reserve(self, n: int) -> None:
        """Have room for ``n`` tokens; it doubles, and what is there is copied. No load may be in flight."""
        if n > self.slot.capacity:
            old, self.slot = self.slot, self._room(n)
            self.slot.copy(old, self.n)

    def set_tokens(self, ids: Tokens) -> None:
        """The ids of all tokens processed; earlier views keep theirs."""
        self._ids = np.asarray(ids, "<i4")
        self._ids.flags.writeable = False

    def begin_load(self, loading: Import) -> None:
        """The rows of the newest tokens come by ``loading``."""
        self._pending = loading

    def finish_load(self) -> None:
        """Wait for what is being loaded; raises what `Loading.wait` raises."""
        if self._pending is None:
            return
        loading, self._pending = self._pending, None
        try:
            loading.wait()
        except (FormatError, LinkError) as error:
            corrupt = isinstance(error, FormatError)
            self.broken = f"a block that it was loaded from {'is corrupt' if corrupt else 'never came'}"
            raise
