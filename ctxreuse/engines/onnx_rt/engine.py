"""OnnxEngine: a decoder's folder on ONNX Runtime behind the Engine interface."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView, BlockWriter, block_layout
from ctxreuse.block.levels import is_raw
from ctxreuse.codec import Codec
from ctxreuse.config import EngineConfig
from ctxreuse.engines.base import Context, Logits, check_length, check_prompt, chunk_spans
from ctxreuse.engines.checks import (
    check_blocks,
    check_boundary,
    check_crop,
    check_export,
    check_kind,
    check_state,
)
from ctxreuse.engines.exits import ExitStep
from ctxreuse.engines.export import export_blocks
from ctxreuse.engines.imports import Import
from ctxreuse.engines.onnx_rt.arena import KvPool, KvSlot, neighbours
from ctxreuse.engines.onnx_rt.context import OnnxContext
from ctxreuse.engines.onnx_rt.exits import OnnxExits, OnnxExitStates
from ctxreuse.engines.onnx_rt.folder import DecoderFolder
from ctxreuse.engines.onnx_rt.model import OnnxModel
from ctxreuse.engines.onnx_rt.space import measure_space
from ctxreuse.engines.rows import fill_rows, gather
from ctxreuse.engines.stepping import step_one_by_one
from ctxreuse.engines.text import HFText
from ctxreuse.engines.user_codec import UserCodec
from ctxreuse.errors import CtxReuseError, EngineError
from ctxreuse.exits import ExitPlan, ExitRow, RampCost
from ctxreuse.exits.profile import ExitProfile, ExitProfileStore
from ctxreuse.identity.keys import Tokens

__all__ = ["OnnxEngine"]

#: Below this a copy takes less than 1 ms, and starting a thread for it a good part of that.
_THREAD_BYTES = 4 << 20


class OnnxEngine(UserCodec):
    """See `ctxreuse.engines.base.Engine`. Use different contexts from different threads at will.

    A context has a slot for K and V of each layer, which the graph reads as past and appends to as present; blocks are
    copied straight into it. Contexts in neighbouring slots decode in one pass.
    """

    def __init__(self, config: EngineConfig, *, reserve: int = 0, block_tokens: int = 64) -> None:
        """Open the folder ``config.model``.

        Raises ConfigError (no such folder, a provider that is not there), FormatError (a broken file), EngineError (a
        graph that the engine cannot keep contexts of).
        """
        folder = DecoderFolder(Path(config.model).expanduser().absolute())
        self._chunk, self._threads = config.chunk, config.threads or len(os.sched_getaffinity(0))
        self._model = OnnxModel(folder, config.provider, config.threads)
        self._pool = KvPool(self._model)
        self.space = measure_space(self._model, self._pool, block_tokens)
        self._layout = block_layout(self.space)
        self._exits: OnnxExits | str = ""  # or why no token can leave
        self._opening = threading.Lock()
        self.text = HFText.open(folder.path, stop_ids=folder.stop_ids)
        check_length(self.space, reserve)

    def new_context(self, reserve: int = 0) -> OnnxContext:
        """See `Engine.new_context`."""
        check_length(self.space, reserve)
        return OnnxContext(self._pool.lease, reserve)

    def prefill(self, context: Context, tokens: Tokens) -> Logits:
        """See `Engine.prefill`."""
        own, ids = self._ready(context, tokens)
        start, end = own.n, own.n + len(ids)
        logits = np.empty(0, np.float32)
        for at, stop in chunk_spans(start, end, self._chunk):
            logits = own.slot.compute(ids[at - start : stop - start], at)
        own.append(ids)
        return logits

    @property
    def batches(self) -> bool:
        """See `Engine.batches`. Contexts that take one token each, in neighbouring slots, are one pass."""
        return self._model.batches

    def step(
        self, batch: Sequence[tuple[Context, Tokens]], *, limit: int | None = None, rows: Sequence[int] = ()
    ) -> list[Logits | CtxReuseError | None]:
        """See `Engine.step`. Contexts that take several tokens are computed one by one."""
        found: dict[int, Logits | CtxReuseError | None] = {}
        decoding: list[tuple[OnnxContext, Tokens, int]] = []
        for number, (context, tokens) in enumerate(batch):
            wanted = rows[number] if rows else 1
            if wanted == 1 and (len(tokens) != 1 or not self.batches):
                found[number] = step_one_by_one(self, [(context, tokens)], limit, self._chunk)[0]
                continue
            try:
                if wanted > 1:
                    found[number] = self._check_draft(context, tokens, wanted)
                    continue
                decoding.append((*self._ready(context, tokens), number))
            except CtxReuseError as error:
                found[number] = error
        for run in neighbours(decoding, lambda one: one[0].slot):
            contexts, ids, numbers = zip(*run)
            bind = contexts[0].slot.bind(len(run))
            try:
                logits = self._model.run(bind, np.stack(ids), [context.n for context in contexts])
            except EngineError as error:
                found |= dict.fromkeys(numbers, error)
                continue
            for context, own, number, row in zip(contexts, ids, numbers, logits):
                context.append(own)
                found[number] = row.copy()
        return [found[number] for number in range(len(batch))]

    def use_drafts(self) -> str:
        """See `DraftEngine.use_drafts`: a graph with logits after its last token only is cut before what gives them."""
        with self._opening:
            if self._model.last_only:
                try:
                    self._model.split([])
                except EngineError as error:
                    return str(error)
        return ""

    def _check_draft(self, context: Context, tokens: Tokens, rows: int) -> Logits:
        """Append tokens in one pass, and return the logits after the last ``rows``; one by one if the graph has none
        but the last."""
        own, ids = self._ready(context, tokens)
        if self._model.last_only:
            return np.stack([self.prefill(own, one[None]) for one in ids][-rows:])
        logits = own.slot.compute(ids, own.n, rows)
        own.append(ids)
        return logits

    def _ready(self, context: Context, tokens: Tokens) -> tuple[OnnxContext, Tokens]:
        """The context, whole and loaded, with room for the tokens, and these as ids; raises what `prefill` promises."""
        return self._room(self._own(context), tokens)

    def _room(self, own: OnnxContext, tokens: Tokens) -> tuple[OnnxContext, Tokens]:
        ids = check_prompt(self.space, own.n, tokens)
        own.finish_load()
        own.reserve(own.n + len(ids))
        return own, ids

    @property
    def ramps(self) -> Sequence[RampCost] | str:
        """See `ExitEngine.ramps`; of this user's exit profile, opened when needed, unless `use_exits` gave another."""
        with self._opening:
            if not self._exits:
                profile = ExitProfileStore().find(self.space)
                if profile is None:
                    return "the model has no exit profile: run `ctxreuse calibrate NAME --exits --engine onnxruntime`"
                try:
                    self.use_exits(profile)
                except EngineError as error:
                    self._exits = error.what
            return self._exits if isinstance(self._exits, str) else self._exits.costs

    def use_exits(self, profile: ExitProfile) -> None:
        """Let tokens leave at these ramps, before any has left: the graph runs in parts from now on. Raises EngineError
        if none can."""
        self._exits = OnnxExits(self._model, profile, self._threads)

    def exit_states(self) -> OnnxExitStates:
        """See `ExitCalibration.exit_states`; the graph runs in parts then."""
        return OnnxExitStates(self._model, self._pool)

    def exit_step(self, batch: Sequence[tuple[Context, Tokens, ExitPlan]]) -> list[ExitStep | CtxReuseError]:
        """See `ExitEngine.exit_step`. Rows that wait are computed context by context."""
        ramps = self.ramps
        if not isinstance(self._exits, OnnxExits):
            raise EngineError(f"no token can leave early: {ramps}")
        return self._exits.exit_step(batch, self._ready_to_leave, together=self.batches)

    def _ready_to_leave(self, context: Context, tokens: Tokens) -> tuple[OnnxContext, Tokens] | Logits:
        """See `EarlyPasses.exit_step`."""
        if len(tokens) != 1:
            return self.prefill(context, tokens)
        own = check_kind(context, OnnxContext)
        own.check_usable()
        return self._room(own, tokens)

    def complete_rows(self, context: Context) -> tuple[ExitRow, ...]:
        """See `ExitEngine.complete_rows`."""
        own = self._own(context)
        found, own.completed = tuple(own.completed), []
        return found

    def load(
        self,
        context: Context,
        views: Sequence[BlockView],
        state: BlockView | None = None,
        ready: Callable[[int], None] | None = None,
    ) -> Import:
        """See `Engine.load`. The graph runs once all layers are in."""
        own, size = self._own(context), self.space.block_tokens
        own.finish_load()
        check_boundary(own.n, size)
        views, start = list(views), own.n
        end = start + sum(len(view.header.tokens) // 4 for view in views)
        check_length(self.space, end)
        codec = self.codec if any(not is_raw(view.header.level) for view in views) else None
        check_blocks(views, self.space, self._layout, start, codec)
        check_state(state, self.space, end, lambda _: False)
        own.reserve(end)
        own.provenance.load(start, [(len(view.tokens), view.header.level) for view in views])
        own.set_tokens(np.concatenate([own.tokens, *(view.tokens for view in views)]))
        jobs = [
            (layer, partial(_fill_layer, own.slot, start, views, layer, ready, codec))
            for layer in range(len(self.space.layers) if views else 0)
        ]
        own.loading = Import(jobs, background=sum(view.layout.nbytes for view in views) >= _THREAD_BYTES)
        return own.loading

    def export(
        self, context: Context, keys: Sequence[bytes], parent: bytes, first: int, *, last_partial: bool = False
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """See `Engine.export`."""
        own = self._own(context)
        check_export(first, len(keys), self.space.block_tokens, own.n, last_partial=last_partial)
        own.finish_load()
        fill = partial(self._fill_block, own)
        return export_blocks(self.space, self._layout, own, keys, parent, first, fill, last_partial=last_partial)

    def _fill_block(self, context: OnnxContext, writer: BlockWriter, start: int, end: int) -> None:
        for layer, role in self._model.names:
            gather(context.slot.rows(layer, role), start, writer.plane(layer, role))

    def export_state(self, context: Context, key: bytes, parent: bytes, position: int) -> npt.NDArray[np.uint8]:
        """See `Engine.export_state`: there are none."""
        raise EngineError(f"no states are kept at position {position}", fix="Its blocks are enough")

    def crop(self, context: Context, n: int) -> bool:
        """See `Engine.crop`: rows behind the length are written over."""
        own = self._own(context)
        check_crop(n, own.n)
        own.finish_load()
        own.set_tokens(own.tokens[:n].copy())
        own.provenance.crop(n)
        return True

    def first_rows(self, tokens: Tokens, positions: Tokens) -> tuple[int, npt.NDArray[np.float32]] | None:
        """See `Engine.first_rows`: the graph computes no layer by itself."""
        return None

    def row_errors(
        self, context: Context, rows: Tokens
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None:
        """See `Engine.row_errors`: what a quantised graph computes of one token is not what it computes of many."""
        return None

    def _own(self, context: Context) -> OnnxContext:
        """The context, if it is a usable one of this engine, with all rows whole; raises EngineError."""
        own = check_kind(context, OnnxContext)
        own.check_usable()
        if own.pending:
            assert isinstance(self._exits, OnnxExits)
            self._exits.complete(own)
        return own


def _fill_layer(
    slot: KvSlot,
    start: int,
    views: Sequence[BlockView],
    layer: int,
    ready: Callable[[int], None] | None,
    codec: Codec | None,
) -> None:
    """Check and copy or decode K and V of one layer to the rows from ``start``, once ``ready`` returns."""
    if ready is not None:
        ready(layer)
    for role in ("k", "v"):
        rows = slot.rows(layer, role)
        fill_rows(rows, start, views, layer, role, codec)
        slot.put(layer, role, rows)
