"""What an engine offers for reuse at any position: place stored rows, compare them with fresh ones, compute others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ctxreuse.block import BlockView
from ctxreuse.engines.base import Live, Logits
from ctxreuse.errors import FormatError
from ctxreuse.keys import Tokens
from ctxreuse.reuse.attend import Held, HeldMove, Selection

__all__ = ["HeldFormat", "Holder", "Move", "MoveError", "MovedLive", "Mover", "Role", "Rows"]

Role = Literal["k", "v"]
#: How held rows are kept: quantised to 8 or 4 bits, or as the blocks store them.
HeldFormat = Literal["int8", "int4", "stored"]


@dataclass(frozen=True, slots=True)
class Move:
    """Rows ``row`` to ``row + count`` of a block's tokens are to stand at positions ``start`` to ``start + count``."""

    start: int
    view: BlockView
    row: int
    count: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows ``row`` to ``row + count`` of a block."""

    view: BlockView
    row: int
    count: int


class MoveError(FormatError):
    """A block cannot be moved: corrupt, foreign, or of other tokens. ``index``: which of the moves, ``key``: its key.

    It is the caller's cue to forget that source and to compute the rows.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "", index: int = 0, key: bytes = b"") -> None:
        super().__init__(what, where=where, fix=fix)
        self.index, self.key = index, key


@runtime_checkable
class MovedLive(Live, Protocol):
    """A context that rows can be moved into."""

    @property
    def moved(self) -> tuple[tuple[int, int], ...]:
        """Spans (start, end), ascending, whose rows were moved there and have not been computed since."""
        ...

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Spans (start, end), ascending, that hold nothing yet: the next `Mover.mend` must compute them."""
        ...


@runtime_checkable
class Mover(Protocol):
    """An engine that reuses K and V at other positions than those they were computed at.

    K and V of a token depend on all that stood before it, so what is moved is approximate. K is turned by the
    difference of the positions, as far as the engine knows how its model turns it; whether that is near enough is for
    a measurement to say. All methods are called by the context's owner.
    """

    def place(self, live: Live, tokens: Tokens, moves: Sequence[Move], level: str, *, turn: bool = True) -> None:
        """Append ``tokens`` int32 [n] to a context, with K and V of the rows that ``moves`` name.

        Moves are ascending, do not overlap, and lie in ``live.n`` to ``live.n + n``, at any position; their views may
        be raw, packed or coded at a level that the engine's codec knows, and are not needed after the call. K of a row
        is turned by (new position - position it stands at in its block), not at all with ``turn=False``. Tokens that no
        move covers are gaps: the context cannot be continued, exported or loaded into until `mend` has computed them.
        ``level`` is what the moved rows count as from now on: ``approx~…``.

        A model with states (windows, recurrent layers) takes moves without gaps only, and its states begin empty behind
        them.

        Raises, before anything is changed: MoveError if a view is corrupt or not of this space or of other tokens;
        ConfigError if there is no card for a level; EngineError if the engine cannot move (the reason is in the text),
        or if the moves or the level are not as said; TokenRangeError, ContextTooLongError.
        """
        ...

    def deviations(
        self, live: Live, rows: Tokens, layer: int, role: Role
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """How far the K or V held at ``layer`` is from what the ids at ``rows`` (int32 [n], ascending) give afresh.

        Returns the squared distance and the squared length of the fresh rows, summed over heads and dims, float32 [n]
        each. The rows run through the layers below ``layer``, together with the gaps before the last of them; they
        attend to what is held and to each other's fresh rows. Costs that share of a prefill of these rows; the context
        is unchanged afterwards. Raises EngineError for rows or a layer that the context has not, or an engine that
        cannot; what `Loading.wait` raises if a load in flight fails.
        """
        ...

    def attention(
        self, live: Live, rows: Tokens, tokens: Tokens, *, looks: int, layers: int
    ) -> npt.NDArray[np.float32]:
        """How much attention the rows at ``rows`` (int32 [n], ascending) get, as they are held, from what comes last.

        The last ``looks`` tokens of the context and of ``tokens`` (at least one), which are to follow, run through the
        first ``layers`` layers. They see what the context holds and each other, but nothing of gaps or of new tokens
        before them; where a context shows held runs, these are computed as well, and seen. Returns the softmax weights
        on each row, summed over what looks, heads and layers, float32 [n]. Of what a layer adds to its scores only the
        mask and a softcap count. The context is unchanged afterwards. Raises EngineError for rows that the context has
        not, for less than one look or layer, or an engine that cannot; what `Engine.prefill` raises; what
        `Loading.wait` raises if a load in flight fails.
        """
        ...

    def mend(self, live: Live, rows: Tokens, tokens: Tokens, *, drift: Sequence[tuple[int, int]] = ()) -> Logits:
        """Compute ``rows`` (int32, ascending positions in the context) anew and append ``tokens`` (at least one).

        Returns the logits after the last token, float32 [vocab]. ``rows`` must hold every gap; K and V of the others
        are overwritten, so that all later rows of the same call see them.

        ``drift``: spans (start, end) of rows that were moved together, ascending. To those of them that are not
        computed is added, layer by layer, what the computed ones of the same span let expect that they are off, in V
        and in K as it is before it is turned. They still count as moved. A context that shows held runs takes none.

        Raises EngineError before anything is changed for rows that are not in the context or leave a gap, for a span
        that was not moved there, and what `Engine.prefill` raises.
        """
        ...


@runtime_checkable
class Holder(Mover, Protocol):
    """A mover whose contexts can attend to rows where they are held, without a copy in the context's own memory."""

    def hold(self, pieces: Sequence[Rows], format: HeldFormat = "int8") -> Held:
        """Rows that stood one behind another in one prompt, as a run that any number of contexts can show.

        Every plane is checked. ``stored`` keeps views of the blocks' buffers, which must outlive the run: raw planes
        are read there, such as in the map of a store that is being read; coded ones are decoded, a layer at a time,
        whenever a forward reads them. Raises MoveError, ConfigError and EngineError as `Mover.place` does.
        """
        ...

    def show(
        self,
        live: Live,
        tokens: Tokens,
        moves: Sequence[HeldMove],
        level: str,
        *,
        selection: Selection | None = None,
    ) -> None:
        """Append ``tokens`` to a context, held runs where ``moves`` name them and gaps elsewhere, as `Mover.place`.

        Takes no time and no memory for what is held: attention turns the queries to each run instead of its K. The
        context keeps the runs alive. Rows that `Mover.mend` computes hide the held ones; blocks that hold shown rows
        cannot be exported, and nothing can be loaded or placed into the context any more. ``selection``: which pages
        of all runs of the context are read from now on (None: all). Raises EngineError and what `check_prompt` raises
        before anything is changed.
        """
        ...
