"""The audit of given blocks, computed by an engine process of the node."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from ctxreuse.block import BlockView
from ctxreuse.errors import FormatError, LinkDownError
from ctxreuse.keys import Tokens
from ctxreuse.model import ModelSpace
from ctxreuse.runtime.audit import first_k_matches
from ctxreuse_cloud.workers.crew import Workers

if TYPE_CHECKING:
    from ctxreuse.engines.base import Engine

__all__ = ["WorkerAudit"]

# A worker that is restarted loads its model first.
_TRIES, _TIMEOUT = 3, 60.0


class _Rows:
    """What the audit needs of an engine, computed elsewhere."""

    def __init__(self, workers: Workers, space: ModelSpace) -> None:
        self._workers, self.space = workers, space

    def first_rows(self, tokens: Tokens, positions: Tokens) -> tuple[int, npt.NDArray[np.float32]] | None:
        """See `Engine.first_rows`. Raises LinkDownError if no process answers."""
        for left in reversed(range(_TRIES)):
            try:
                return self._workers.rows(self.space.digest, tokens, positions).result(_TIMEOUT)
            except (LinkDownError, TimeoutError):
                if not left or not self._workers.settle(_TIMEOUT):
                    raise LinkDownError("no engine process answers an audit") from None
        return None


class WorkerAudit:
    """A `ctxreuse.bus.serve_audit.Audit`: True also for a model space in which no process computes, as then there is
    nothing to compare with. Called in the auditor's thread, which it may keep waiting."""

    def __init__(self, workers: Workers, rng: random.Random | None = None) -> None:
        self._workers = workers
        # Whoever makes blocks must not know which rows are looked at.
        self._rng = rng or random.SystemRandom()

    def __call__(self, space: bytes, views: Sequence[BlockView]) -> bool:
        """False if one of the blocks of this space is not what its token ids say."""
        model = self._workers.spaces.get(space)
        if model is None:
            return True
        try:
            return first_k_matches(cast("Engine", _Rows(self._workers, model)), views, self._rng) is not False
        except FormatError:
            return False
