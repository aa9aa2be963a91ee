"""Audit of received blocks, computed by an engine process of the node."""

from __future__ import annotations

from collections.abc import Sequence

from ctxreuse.block.format import BlockView
from ctxreuse.errors import LinkDownError
from ctxreuse_cloud.workers.pool import WorkerPool

__all__ = ["WorkerAudit"]

# A restarted process loads its model first.
_TRIES, _TIMEOUT = 3, 60.0


class WorkerAudit:
    """A `ctxreuse.peer.serve.audit.AuditRun`, called in the auditor's thread. None for spaces without a process."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers

    def __call__(self, space: bytes, keys: Sequence[bytes], first: int, state: BlockView | None) -> bool | None:
        """See `AuditRun`. Raises LinkDownError if no process answers, EngineError if the audit fails."""
        if space not in self._workers.spaces:
            return None
        data = bytes(state.buffer) if state is not None else b""
        for left in reversed(range(_TRIES)):
            try:
                return self._workers.audit(space, keys, first, data).result(_TIMEOUT)
            except (LinkDownError, TimeoutError):
                if not left or not self._workers.settle(_TIMEOUT):
                    raise LinkDownError("no engine process answers an audit") from None
        return None
