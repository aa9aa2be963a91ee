"""The engine's interface for chunk reuse: insert stored rows at other positions, probe them, recompute some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView
from ctxreuse.engines.base import Context, Logits
from ctxreuse.errors import FormatError
from ctxreuse.identity.keys import Tokens
from ctxreuse.reuse.inplace import AttachedRun, PinnedRun, Selection
from ctxreuse.reuse.plan import BlockRows

__all__ = [
    "BlockRows",
    "ChunkEngine",
    "ChunkOps",
    "CompressedFormat",
    "CompressingOps",
    "InPlaceOps",
    "RelocatedContext",
    "Relocation",
    "RelocationError",
    "Role",
    "RunFormat",
]

Role = Literal["k", "v"]
#: How pinned rows are kept: quantised to 8 or 4 bits, or as the blocks store them.
RunFormat = Literal["int8", "int4", "stored"]
#: How the rows of a context that waits are kept.
CompressedFormat = Literal["int8", "int4"]


@dataclass(frozen=True, slots=True)
class Relocation:
    """Rows ``row`` to ``row + count`` of a block, to be inserted at positions ``start`` to ``start + count``."""

    start: int
    view: BlockView
    row: int
    count: int


class RelocationError(FormatError):
    """A block cannot be relocated: corrupt, of another model space, or of other tokens.

    ``index``: which of the relocations, ``key``: its block's key. Forget that source and compute the rows.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "", index: int = 0, key: bytes = b"") -> None:
        super().__init__(what, where=where, fix=fix)
        self.index, self.key = index, key


@runtime_checkable
class RelocatedContext(Context, Protocol):
    """A context that rows can be inserted into."""

    @property
    def relocated(self) -> tuple[tuple[int, int], ...]:
        """Spans (start, end), ascending, whose rows were inserted and have not been recomputed since."""
        ...

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Spans (start, end), ascending, that hold nothing yet; the next `recompute_rows` must fill them."""
        ...


@runtime_checkable
class ChunkOps(Protocol):
    """What an engine does to reuse K and V at other positions than those they were computed at.

    K and V of a token depend on all tokens before it, so relocated rows are approximate: K is rotated by the
    difference of the positions, the rest of the error is for calibration to measure. Call from the context's owner.
    """

    def insert_rows(
        self, context: Context, tokens: Tokens, rows: Sequence[Relocation], level: str, *, rotate: bool = True
    ) -> None:
        """Append tokens to a context, with K and V of stored rows; positions that no row covers become gaps.

        While there are gaps, the context cannot be continued, exported or loaded into. A model with states (windows,
        recurrent layers) takes no gaps, and its states begin empty behind the rows.

        Args:
            tokens: int32 [n], the ids of the new positions.
            rows: ascending, without overlap, within ``context.n`` to ``context.n + n``. Views may be raw, packed or
                coded at a level the engine's codec knows; they are not needed after the call.
            level: the level of the inserted rows from now on, ``approx~…``.
            rotate: rotate K by (new position - stored position).

        Raises (the context is unchanged):
            RelocationError: a view is corrupt, of another model space or of other tokens.
            ConfigError: no calibration profile for a level.
            EngineError: the engine cannot relocate rows, or the arguments contradict each other.
            TokenRangeError, ContextTooLongError: as `check_prompt`.
        """
        ...

    def deviations(
        self, context: Context, rows: Tokens, layer: int, role: Role
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Compare K or V in the context at ``layer`` with freshly computed rows.

        Returns the squared distance and the squared length of the fresh rows ``rows`` (int32 [n], ascending), summed
        over heads and dims, float32 [n] each. The rows, and the gaps before the last of them, run through the layers
        below ``layer``, attending to the context and to each other's fresh rows; the context is unchanged afterwards.
        Raises EngineError for rows or a layer that the context does not have; what `Loading.wait` raises.
        """
        ...

    def attention(
        self, context: Context, rows: Tokens, tokens: Tokens, *, queries: int, layers: int
    ) -> npt.NDArray[np.float32]:
        """Sum the attention that ``rows`` (int32 [n], ascending) get from the end of the prompt; float32 [n].

        The last ``queries`` tokens of the context and of ``tokens`` (which are to follow, at least one) run through
        the first ``layers`` layers. They see the context and each other, but no gaps and no new tokens before them
        (those are computed as well where runs are attached). Softmax weights are summed over queries, heads and
        layers; mask and softcap are respected, other changes to scores are not. The context is unchanged afterwards.
        Raises EngineError for rows that the context does not have or fewer than one query or layer; what
        `Engine.prefill` and `Loading.wait` raise.
        """
        ...

    def recompute_rows(
        self, context: Context, rows: Tokens, tokens: Tokens, *, drift: Sequence[tuple[int, int]] = ()
    ) -> Logits:
        """Recompute some rows, append tokens, and return the logits after the last one, float32 [vocab].

        Args:
            rows: int32, ascending positions in the context, all gaps among them. Later rows of the call see the
                recomputed ones.
            tokens: at least one.
            drift: spans (start, end), ascending, each inserted together. Their rows that are not recomputed are
                corrected, layer by layer, by what the recomputed ones of the same span predict (in V, and in K before
                rotation). They still count as relocated. Not possible with attached runs.

        Raises EngineError, before anything is changed, for rows outside the context or a gap left open, and for a span
        that was not inserted there; what `Engine.prefill` raises.
        """
        ...


@runtime_checkable
class InPlaceOps(ChunkOps, Protocol):
    """Chunk operations with runs that contexts attend to in place, without copying them."""

    def pin_run(self, rows: Sequence[BlockRows], format: RunFormat = "int8") -> PinnedRun:
        """Pin rows that stood one behind another in one prompt, for any number of contexts to attend to.

        Every plane is checked. ``stored`` keeps views of the blocks' buffers, which must outlive the run: raw planes
        are read there, coded ones are decoded layer by layer in each forward. Raises as `ChunkOps.insert_rows`.
        """
        ...

    def attach(
        self,
        context: Context,
        tokens: Tokens,
        runs: Sequence[AttachedRun],
        level: str,
        *,
        selection: Selection | None = None,
    ) -> None:
        """Append tokens to a context, with pinned runs in their places and gaps elsewhere.

        Copies nothing: attention rotates the queries to each run instead of its K. The context keeps the runs alive.
        Recomputed rows hide the pinned ones. Blocks that hold attached rows cannot be exported, and nothing can be
        loaded or inserted afterwards. ``selection``: which pages of all its runs the context reads (None: all).
        Raises EngineError and what `check_prompt` raises, before anything is changed.
        """
        ...


@runtime_checkable
class CompressingOps(Protocol):
    """Contexts that wait are kept quantised, and attended to as they are when they go on."""

    def compress(self, context: Context, format: CompressedFormat, level: str) -> None:
        """Quantise all rows of a context, which frees its other memory; tokens computed later are kept as always.

        What cannot be done with quantised rows (loading, forking, inserting, exporting their blocks) expands them
        first. ``level``: an ``approx~`` level, at which all rows are from now on where they were no worse. Raises
        EngineError, and changes nothing, if the engine or the model cannot; what `Loading.wait` raises.
        """
        ...


@runtime_checkable
class ChunkEngine(Protocol):
    """An engine that can reuse chunks."""

    @property
    def chunks(self) -> ChunkOps:
        """Its operations; each raises EngineError if the model at hand does not allow it."""
        ...
