"""Contexts that wait, kept in a fraction of their memory where their sessions allow it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ctxreuse.block.levels import EXACT, expected_kl
from ctxreuse.engines.base import is_lost
from ctxreuse.engines.chunks import ChunkEngine, CompressedFormat, CompressingOps
from ctxreuse.errors import CtxReuseError, EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ctxreuse.engines.base import Context, Engine
    from ctxreuse.reuse.quality_gate import QualityGate

__all__ = ["ContextCompressor"]

log = logging.getLogger(__name__)

#: The smallest first.
_FORMATS: tuple[CompressedFormat, ...] = ("int4", "int8")


class ContextCompressor:
    """Decides which contexts of one engine may be quantised, and has it done. Any thread may call.

    What quantised rows cost in KL must have been measured for the model (``ctxreuse calibrate NAME --chunks``).
    """

    def __init__(self, engine: Engine, gate: Callable[[], QualityGate]) -> None:
        """``gate``: by what is known now."""
        ops: object = engine.chunks if isinstance(engine, ChunkEngine) else None
        self._ops = ops if isinstance(ops, CompressingOps) else None
        self._gate = gate
        self._refused: set[CompressedFormat] = set()
        #: The levels of contexts that were compressed.
        self._levels: WeakKeyDictionary[Context, str] = WeakKeyDictionary()

    def compress(self, context: Context, max_kl: float | None) -> bool:
        """Compress a context that is not in use, if its session's ``max_kl`` allows that; True if it is smaller now."""
        if self._ops is None or max_kl is None or is_lost(context):
            return False
        before = context.nbytes
        for format, level in self._choices(context, max_kl):
            try:
                self._ops.compress(context, format, level)
            except EngineError as error:
                self._refused.add(format)
                log.info("contexts are not kept as %s: %s", format, error)
            except CtxReuseError:
                return False
            else:
                self._levels[context] = level
                return context.nbytes < before
        return False

    def _choices(self, context: Context, max_kl: float) -> list[tuple[CompressedFormat, str]]:
        """Formats within ``max_kl``, the smallest first, with the level that they have then."""
        # Rows that were computed on top of quantised ones are what was measured, so quantising them adds nothing.
        known = (EXACT, self._levels.get(context, EXACT))
        lossy = [run.level for run in context.levels if run.level not in known]
        below = max(map(expected_kl, lossy), default=0.0)
        found, gate = list[tuple[CompressedFormat, str]](), self._gate()
        for format in _FORMATS:
            decision, _ = gate.in_place(max_kl, format, below, whole=True)
            if decision.allowed and format not in self._refused:
                found.append((format, decision.level))
        return found
