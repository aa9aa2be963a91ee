"""What contexts of engines have in common whose token ids are one array and whose loads are `Import`."""

from __future__ import annotations

import numpy as np

from ctxreuse.engines.imports import Import
from ctxreuse.engines.provenance import LevelRun, Provenance
from ctxreuse.errors import EngineError, FormatError, LinkError
from ctxreuse.identity.keys import Tokens

__all__ = ["ResidentContext"]


class ResidentContext:
    """See `ctxreuse.engines.base.Context`. Made by an engine only; all its changes go through the engine."""

    def __init__(self) -> None:
        self.provenance = Provenance()
        self.broken = ""  # why the context cannot be used any more
        self.loading: Import | None = None  # what fills the rows of the newest tokens
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
    def levels(self) -> tuple[LevelRun, ...]:
        """See `ctxreuse.engines.base.Context.levels`."""
        return self.provenance.runs(self.n)

    def check_usable(self) -> None:
        """Raise EngineError if an earlier failure left the context without valid rows."""
        if self.broken:
            raise EngineError(f"the context cannot be used: {self.broken}", fix="Start a new one")

    def set_tokens(self, ids: Tokens) -> None:
        """The ids of all tokens processed; earlier views keep theirs."""
        self._ids = np.asarray(ids, "<i4")
        self._ids.flags.writeable = False

    def append(self, ids: Tokens) -> None:
        """Count more tokens as processed."""
        self.set_tokens(np.concatenate([self._ids, ids]))

    def finish_load(self) -> None:
        """Return when no load is in flight; raises what `Loading.wait` raises."""
        if self.loading is None:
            return
        try:
            self.loading.wait()
        except (FormatError, LinkError, EngineError) as error:
            how = "is corrupt" if isinstance(error, FormatError) else "never came"
            self.broken = f"a block that it was loaded from {how}"
            raise
        finally:
            self.loading = None
