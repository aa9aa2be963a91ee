"""What every engine offers: start, load, prefill, export and crop a context; no engine's own types appear here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView
from ctxreuse.codec import Codec
from ctxreuse.engines.provenance import LevelRun
from ctxreuse.engines.text import TextModel
from ctxreuse.errors import ContextTooLongError, CtxReuseError, EngineError, TokenRangeError
from ctxreuse.identity.keys import Tokens, as_tokens
from ctxreuse.identity.model import ModelSpace

__all__ = [
    "Context",
    "DeviceMemoryEngine",
    "DraftEngine",
    "Engine",
    "Loading",
    "Logits",
    "SlicingEngine",
    "check_prompt",
    "check_vocabulary",
    "chunk_spans",
    "is_lost",
]

#: float32 [vocab]: the scores of the next token, a copy that the caller owns.
Logits = npt.NDArray[np.float32]


@runtime_checkable
class Context(Protocol):
    """One context in an engine's memory. Not thread-safe: one caller owns it at a time.

    Its memory goes back to the engine when the last reference to it is dropped.
    """

    @property
    def tokens(self) -> Tokens:
        """Ids processed so far, int32 [n]; a read-only view that stays valid and unchanged until `Engine.crop`."""
        ...

    @property
    def n(self) -> int:
        """Number of tokens processed so far."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory of this context, room not used yet and snapshots included."""
        ...

    @property
    def states(self) -> tuple[int, ...]:
        """Positions, ascending, for which `Engine.export_state` and `Engine.crop` have the states."""
        ...

    @property
    def levels(self) -> tuple[LevelRun, ...]:
        """How the K and V of all tokens came to be: runs that cover positions 0 to ``n``.

        What was computed is ``exact``, or ``approx~…`` where something lossy was below it; what was loaded has the
        level that its block named.
        """
        ...


class Loading(Protocol):
    """An import in flight."""

    def wait(self) -> None:
        """Return when all planes are verified and copied; the views may be released then.

        Raises FormatError if a plane was corrupt, LinkError if ``ready`` said that a layer will not come, EngineError
        if the engine's device has no memory for it: the context is unusable then and must be dropped. After wait(),
        raised or not, nothing reads the views any more. Any thread may call it, any number of times.
        """
        ...


@runtime_checkable
class Engine(Protocol):
    """Runs one model. Different contexts may be used from different threads; one context from one thread at a time."""

    @property
    def space(self) -> ModelSpace:
        """The identity of everything this engine computes."""
        ...

    @property
    def text(self) -> TextModel | None:
        """Tokenizer and chat template of the model; None: it has none, so the engine takes token ids only."""
        ...

    @property
    def codec(self) -> Codec | None:
        """What decodes blocks that are not raw; None: only raw ones can be loaded."""
        ...

    def new_context(self, reserve: int = 0) -> Context:
        """An empty context with room for ``reserve`` tokens; it grows as needed. Raises ContextTooLongError."""
        ...

    def load(
        self,
        context: Context,
        views: Sequence[BlockView],
        state: BlockView | None = None,
        ready: Callable[[int], None] | None = None,
    ) -> Loading:
        """Append consecutive blocks to a context; returns at once, prefill may follow at once.

        The context is empty, or ends at a block boundary with no load in flight: the blocks follow at ``context.n``.
        What parent the first block names is the caller's business: the context does not know its keys. ``state`` is the
        state at the blocks' end, needed exactly if ``space.needs_state``; it replaces the context's states. The views
        must stay valid until ``wait()`` of the result has returned. The last may be partial (see `export`) unless
        ``space.needs_state``; no block can follow it.

        ``ready(layer)`` is called before the planes of a layer are copied, so that blocks can be loaded
        that are still on their way: it returns when the planes are in, or raises LinkError. It may be called from
        another thread, and must return or raise some day, as ``wait()`` waits for it. Layers are begun in ascending
        order, and a thread that asks for one has copied those that it asked for before: their planes may be gone.

        Blocks and state may be of any level, also mixed, that ``codec`` knows; coded ones are decoded into the
        context's memory, layer by layer as well.

        Raises ConfigError, before anything is changed, if there is no profile for a level; FormatError, before anything
        is changed, if the views are not blocks of this space at this position, do not follow each other, or have other
        shapes; EngineError if the context ends inside a block, a load is in flight, or the state is missing.
        """
        ...

    def prefill(self, context: Context, tokens: Tokens) -> Logits:
        """Append tokens and return the logits after the last one, float32 [vocab].

        Where ``space.needs_state``, states are kept at the last block boundary that the run reaches. Raises
        EngineError (no tokens), TokenRangeError, ContextTooLongError before anything is changed, and what
        `Loading.wait` raises if a load in flight fails: nothing computed from it is returned, the context is unusable.
        """
        ...

    @property
    def batches(self) -> bool:
        """True if `step` advances several contexts in one forward pass; False: in one each."""
        ...

    def step(
        self, batch: Sequence[tuple[Context, Tokens]], *, limit: int | None = None, rows: Sequence[int] = ()
    ) -> list[Logits | CtxReuseError | None]:
        """Advance several contexts: append to each its tokens, or as many of them as one forward pass takes.

        Returns for each the logits after its last token; None if some of its tokens are left: `Context.n` tells how
        many, and the next step takes them all; or the error that `prefill` would raise, which does not harm the others.
        The logits are those of `prefill` within the engine's rounding.

        Args:
            batch: different contexts, each with at least one token.
            limit: most tokens that a context takes in this pass, 1 or more (an engine that does not batch may take
                more); None: as the engine likes.
            rows: after how many of its last tokens the logits of each context are wanted; more than 1: all its tokens
                (which are as many at least) go through in this pass, and the logits are float32 [rows, vocab], to check
                a draft. Empty: after the last token of each.
        """
        ...

    def export(
        self, context: Context, keys: Sequence[bytes], parent: bytes, first: int, *, last_partial: bool = False
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """Sealed bytes of whole blocks ``first, first + 1, …``, one a key; ``parent`` is the key before ``keys[0]``.

        ``last_partial``: the last of them has the tokens at the end of the context that fill no block (one at least).

        Planes are raw; the level is ``exact``, or ``approx~…`` where ``context.levels`` has anything lossy in or below
        the block. Each array is new memory that the caller owns. Raises EngineError if the context does not reach that
        far.
        """
        ...

    def export_state(self, context: Context, key: bytes, parent: bytes, position: int) -> npt.NDArray[np.uint8]:
        """Sealed bytes of the states at ``position`` (one of ``context.states``); the header carries the ids of the
        block that ends there, so that ``key`` and ``parent`` are that block's. Raises EngineError for another
        position."""
        ...

    def crop(self, context: Context, n: int) -> bool:
        """Forget all tokens after position ``n``. False, and no change, if there are no states at ``n``.

        Raises EngineError if ``n`` is below 0 or beyond the context.
        """
        ...

    def first_rows(self, tokens: Tokens, positions: Tokens) -> tuple[int, npt.NDArray[np.float32]] | None:
        """K of single tokens where it depends on the token and its position only: in the model's first layer.

        Returns that layer and K [heads, n, k_dim] float32 of ``tokens`` [n] as they would stand at ``positions`` [n],
        equal (to rounding) to the rows that a prefill stores; None if the first layer keeps no K of all tokens. Costs
        one layer of n tokens and touches no context: a sample of a received block can be checked with it.
        """
        ...

    def row_errors(
        self, context: Context, rows: Tokens
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None:
        """Recompute some rows of a context through all layers, on its own K and V, and compare.

        Returns the squared distances to the context's rows and the squared lengths of the computed ones, summed over
        heads and dims: float32 [layers, 2 (K, V), n] for ``rows`` (int32 [n], ascending positions) and the layers that
        keep K and V of all tokens. None where the model cannot compute tokens out of order, as one with states. The
        context is unchanged; a load in flight is waited for layer by layer. Raises EngineError for rows that it does
        not have; what `Loading.wait` raises.
        """
        ...


def is_lost(context: Context) -> bool:
    """True if the process that held the context has ended (its ``lost``): it is of no use any more."""
    return bool(getattr(context, "lost", False))


def check_prompt(space: ModelSpace, n: int, tokens: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """The tokens as int32 if they may follow ``n`` others; raises what `Engine.prefill` promises."""
    ids = as_tokens(tokens)
    if not len(ids):
        raise EngineError("no tokens to process", fix="A prompt needs at least one token, e.g. the model's BOS")
    check_vocabulary(space, ids)
    check_length(space, n + len(ids))
    return ids


@runtime_checkable
class SlicingEngine(Protocol):
    """An engine that takes much longer for each of few tokens of a context than for each of many."""

    @property
    def least_slice(self) -> int:
        """Tokens of a prefill that go together at least, however long those wait who only want one token each."""
        ...


@runtime_checkable
class DraftEngine(Protocol):
    """An engine that is made ready before it checks several tokens of a draft in one pass."""

    def use_drafts(self) -> str:
        """Make it ready. Returns why each token of a draft takes a pass of its own all the same; "": none does."""
        ...


@runtime_checkable
class DeviceMemoryEngine(Protocol):
    """An engine whose contexts may lie in another memory than the host's."""

    def free_memory(self) -> int | None:
        """Return the bytes that contexts could be given now where they lie; None: they lie in the host's memory."""
        ...


def check_vocabulary(space: ModelSpace, ids: Tokens) -> None:
    """Raises TokenRangeError if one of ``ids`` (at least one) is not in the model's vocabulary."""
    if int(ids.max()) >= space.vocab_size:
        raise TokenRangeError(
            f"token id {int(ids.max())} is outside the vocabulary of {space.vocab_size}",
            where=space.architecture,
            fix="Tokenise the text with this model's own tokenizer",
        )


def check_length(space: ModelSpace, n: int) -> None:
    """Raises ContextTooLongError if the model has fewer than ``n`` positions."""
    if n > space.max_tokens:
        raise ContextTooLongError(
            f"the context would have {n} tokens and the model has {space.max_tokens} positions",
            where=space.architecture,
            fix=f"Leave out at least {n - space.max_tokens} tokens, or use a model with a longer context",
        )


def chunk_spans(
    start: int, end: int, chunk: int, boundary: int = 0, *, step: bool = False
) -> Iterator[tuple[int, int]]:
    """Positions [at, stop) of each forward from ``start`` to ``end``.

    At most 1.5 times ``chunk`` tokens go together; long runs are cut at multiples of it, so that a resumed and a whole
    prefill share most of their cuts, and thereby their rounding. ``boundary`` (if inside) is always a cut. With
    ``step`` what follows a context goes token by token, and what starts one goes together.
    """
    at = start
    while at < end:
        goal = boundary if at < boundary < end else end
        if step:
            stop = goal if at == 0 else at + 1
        elif goal - at <= chunk:
            stop = goal
        else:
            stop = (at // chunk + 1) * chunk
            if stop - at < chunk // 2:
                stop += chunk
            stop = min(stop, goal)
        yield at, stop
        at = stop
