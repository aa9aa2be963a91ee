"""TorchEngine: any Hugging Face causal language model behind the Engine interface."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ctxreuse.block.format import BlockView
from ctxreuse.block.levels import is_raw
from ctxreuse.codec import Codec
from ctxreuse.config import EngineConfig
from ctxreuse.engines.base import Context, Logits, check_length, check_prompt
from ctxreuse.engines.checks import (
    check_blocks,
    check_boundary,
    check_crop,
    check_export,
    check_kind,
    check_state,
    decoded_state,
)
from ctxreuse.engines.exits import ExitStep
from ctxreuse.engines.export import export_blocks
from ctxreuse.engines.imports import Import
from ctxreuse.engines.text import HFText, TextModel
from ctxreuse.engines.torch_hf.cache import states
from ctxreuse.engines.torch_hf.cache.arena import Lease, forked
from ctxreuse.engines.torch_hf.cache.blocks import fill_block, fill_layer, seal_state
from ctxreuse.engines.torch_hf.cache.download import StagedRows
from ctxreuse.engines.torch_hf.cache.upload import Upload
from ctxreuse.engines.torch_hf.chunks.ops import TorchChunkOps
from ctxreuse.engines.torch_hf.context import TorchContext
from ctxreuse.engines.torch_hf.exits import TorchExits, TorchExitStates, check_exits
from ctxreuse.engines.torch_hf.inplace.compress import expand
from ctxreuse.engines.torch_hf.model import ModelOptions, TorchModel, first_keys, open_model
from ctxreuse.engines.torch_hf.modes import inference
from ctxreuse.errors import CtxReuseError, EngineError
from ctxreuse.exits import ExitPlan, ExitRow, RampCost
from ctxreuse.exits.profile import ExitProfile, ExitProfileStore
from ctxreuse.identity.keys import Tokens

__all__ = ["TorchEngine"]

#: Below this a copy takes less than 1 ms, and starting a thread for it a good part of that.
_THREAD_BYTES = 4 << 20


class TorchEngine:
    """See `ctxreuse.engines.base.Engine`. Runs where its model is, on the CPU or on a device of torch; use different
    contexts from different threads at will."""

    def __init__(
        self,
        model: Any,
        tokenizer: TextModel | None = None,
        *,
        folder: Path | None = None,
        background: bool | None = None,
        **options: Unpack[ModelOptions],
    ) -> None:
        """Wrap a transformers model, which is used in place.

        Args:
            model: the model, on one device; its attention implementation is set, see `attention.install`.
            tokenizer: the text side; None: token ids only.
            folder: the model's files, whose digests go into the space; None: it exists in memory only.
            background: copy loaded blocks in a thread beside the prefill (True), or when the prefill comes to a layer
                (False); None: in a thread if they are more than a few MiB. Loading 2,048 tokens of SmolLM2 (94 MB)
                delayed the first token of a 32-token question by 4 to 15 % with the thread and by 9 to 13 % without
                (medians of 11 to 31 pairs, 2 busy cores); the thread also hides page faults of a cold store.
            options: see `ModelOptions`.
        """
        self.text = tokenizer
        self._background = background
        self._model = TorchModel(model, folder, **options)
        self.model, self.space = self._model.module, self._model.space
        #: See `ctxreuse.engines.chunks.ChunkEngine.chunks`.
        self.chunks = TorchChunkOps(self._model)
        self._exits: TorchExits | None = None
        self._reach = max((window - 1 for window in self._model.windows.values()), default=0)

    @classmethod
    def open(
        cls,
        model: str | os.PathLike[str] | EngineConfig,
        *,
        reserve: int = 0,
        block_tokens: int = 64,
        attention: str | None = None,
        background: bool | None = None,
        **settings: Any,
    ) -> TorchEngine:
        """Open a known model by name, a Hugging Face folder, or the model of a config.

        ``settings`` replace fields of the config. Its ``threads``, unless 0, are torch's for the whole process. Raises
        ConfigError if there is no such model or the folder does not hold one.
        """
        config = model if isinstance(model, EngineConfig) else EngineConfig(os.fspath(model))
        config = msgspec.structs.replace(config, **settings)
        if config.threads:
            torch.set_num_threads(config.threads)
        loaded, folder = open_model(config.model, config.torch_dtype, config.device)
        return cls(
            loaded,
            HFText.open(folder),
            folder=folder,
            reserve=reserve,
            chunk=config.chunk,
            block_tokens=block_tokens,
            attention=attention,
            background=background,
            full_kv_for_windows=config.full_kv_for_windows,
            int8_weights=config.int8_weights,
        )

    @property
    def codec(self) -> Codec:
        """See `Engine.codec`; unless one is set, that of this user's newest calibration profile, opened when needed."""
        return self._model.codec

    @codec.setter
    def codec(self, codec: Codec) -> None:
        self._model.codec = codec

    def new_context(self, reserve: int = 0) -> TorchContext:
        """See `Engine.new_context`."""
        return self._model.new_context(reserve)

    def prefill(self, context: Context, tokens: Tokens) -> Logits:
        """See `Engine.prefill`."""
        return self._model.prefill(self._model.own(context), tokens)

    def free_memory(self) -> int | None:
        """See `DeviceMemoryEngine.free_memory`: what the device, torch and the pool of arenas have left."""
        left = self._model.place.free_memory()
        return None if left is None else left + self._model.pool.nbytes

    @property
    def batches(self) -> bool:
        """See `Engine.batches`."""
        return self._model.packs

    def step(
        self, batch: Sequence[tuple[Context, Tokens]], *, limit: int | None = None, rows: Sequence[int] = ()
    ) -> list[Logits | CtxReuseError | None]:
        """See `Engine.step`. A context that is loading goes through the model alone."""
        return self._model.step(batch, self._model.chunk if limit is None else limit, rows)

    @property
    def ramps(self) -> Sequence[RampCost] | str:
        """See `ExitEngine.ramps`; of this user's exit profile, opened when needed, unless `use_exits` gave another."""
        if self._exits is None:
            profile = ExitProfileStore().find(self.space)
            try:
                check_exits(self.space, self.model)
                if profile is None:
                    return "the model has no exit profile: run `ctxreuse calibrate NAME --exits`"
                self.use_exits(profile)
            except EngineError as error:
                return error.what
        assert self._exits is not None
        return self._exits.costs

    def use_exits(self, profile: ExitProfile) -> None:
        """Let tokens leave at these ramps, before any has left. Raises EngineError if none can."""
        self._exits = TorchExits(self._model, profile)

    def exit_states(self) -> TorchExitStates:
        """See `ExitCalibration.exit_states`."""
        return TorchExitStates(self.space, self.model)

    def exit_step(self, batch: Sequence[tuple[Context, Tokens, ExitPlan]]) -> list[ExitStep | CtxReuseError]:
        """See `ExitEngine.exit_step`. A context with attached runs runs through all layers, alone."""
        ramps = self.ramps
        if self._exits is None:
            raise EngineError(f"no token can leave early: {ramps}")
        return self._exits.exit_step(batch, self._ready_to_leave, together=self._model.packs)

    def _ready_to_leave(self, context: Context, tokens: Tokens) -> tuple[TorchContext, Tokens] | Logits:
        """See `EarlyPasses.exit_step`."""
        own = check_kind(context, TorchContext)
        own.check_usable()
        ids = check_prompt(self.space, own.n, tokens)
        if len(ids) != 1 or own.in_place is not None or own.loading is not None or own.gaps:
            return self.prefill(own, ids)
        own.reserve(own.n + 1)
        return own, ids

    def complete_rows(self, context: Context) -> tuple[ExitRow, ...]:
        """See `ExitEngine.complete_rows`."""
        own = self._model.own(context)
        found, own.completed = tuple(own.completed), []
        return found

    @inference
    def load(
        self,
        context: Context,
        views: Sequence[BlockView],
        state: BlockView | None = None,
        ready: Callable[[int], None] | None = None,
    ) -> Import:
        """See `Engine.load`. The state (one position, small) is read at once, K and V of the blocks layer by layer."""
        own, space, model = self._model.own(context), self.space, self._model
        own.check_filled()
        if own.compressed:
            expand(own)
        if own.in_place is not None:
            raise EngineError("the context has attached runs, so no block can be loaded into it")
        own.finish_load()
        start = own.n
        check_boundary(start, space.block_tokens)
        if own.loading is not None:
            raise EngineError("a load into the context is still in flight, or has failed", fix="wait() for it first")
        if not views:
            if state is not None:
                raise EngineError("a state without blocks")
            return Import((), background=False)
        views = list(views)
        end = start + sum(len(view.header.tokens) // 4 for view in views)
        check_length(space, end)
        coded = any(not is_raw(view.header.level) for view in (*views, *((state,) if state is not None else ())))
        codec = model.codec if coded else None
        check_blocks(views, space, model.layout, start, codec)
        state = decoded_state(state, space, codec)
        check_state(state, space, end, lambda view: states.fits(view, model.state_sample, model.windows))
        snapshot = states.read_state(state, model.place.device) if state is not None else None
        own.reserve(end)
        if snapshot is not None:
            states.restore(own.cache, snapshot)
            own.keep_snapshot(snapshot)
            own.provenance.mark_approximate(end, self._reach, snapshot.level)
        own.provenance.load(start, [(len(view.tokens), view.header.level) for view in views])
        jobs: list[tuple[int, Callable[[], None]]] = []
        lease, upload = own.lease, None
        if lease is not None and model.place.apart:
            upload = Upload(model.place, space.dtype, lease, start, views, ready, codec)
        for index, layer in own.arena_layers:
            assert lease is not None
            layer.resize(end)
            if upload is not None:
                jobs.append((index, partial(upload.fill, index)))
            else:
                jobs.append((index, partial(fill_layer, lease, start, views, index, ready, codec)))
        own.append(np.concatenate([view.tokens for view in views]))
        background = self._background
        if background is None:
            background = sum(view.layout.nbytes for view in views) >= _THREAD_BYTES
        loading = Import(jobs, background=background)
        own.begin_load(loading)
        return loading

    @inference
    def fork(self, context: Context, count: int, reserve: int = 0) -> list[Context]:
        """See `ForkingEngine.fork`: the rows are in memory once, for the context too, and pages that one writes to."""
        own, size = self._model.own(context), self.space.block_tokens
        own.check_filled()
        if own.compressed:
            expand(own)
        if own.in_place is not None or any(window.short(own.n) for window in own.windows):
            raise EngineError("the context has attached runs, or its windows began after its start")
        own.wait_load()
        own.finish_load()
        capacity = min(max(reserve, own.n + size), self.space.max_tokens)
        leases: list[Lease | None] = [None] * (count + 1)
        if own.lease is not None:
            leases = [Lease(arena, None) for arena in forked(own.lease.arena, own.n, capacity, count + 1)]
        found: list[Context] = []
        for lease in leases[1:]:
            one = self._model.new_context()
            one.reserve_ids(capacity)
            one.become(own, lease)
            found.append(one)
        if leases[0] is not None:
            own.adopt(leases[0])
        return found

    @inference
    def first_rows(self, tokens: Tokens, positions: Tokens) -> tuple[int, npt.NDArray[np.float32]] | None:
        """See `Engine.first_rows`: the model runs up to its first layer's write to a cache, and no further."""
        if not self.space.layers[0].blocked:
            return None
        ids = check_prompt(self.space, 0, tokens)
        wide, at = (torch.from_numpy(np.asarray(part, np.int64)) for part in (ids, positions))
        rows = first_keys(self._model.forward, self._model.new_cache(), wide, at)
        return None if rows is None else (0, rows.float().numpy())

    def row_errors(
        self, context: Context, rows: Tokens
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None:
        """See `Engine.row_errors`."""
        return self.chunks.row_errors(context, rows)

    def export(
        self, context: Context, keys: Sequence[bytes], parent: bytes, first: int, *, last_partial: bool = False
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """See `Engine.export`."""
        own = self._model.own(context)
        own.check_filled()
        check_export(first, len(keys), self.space.block_tokens, own.n, last_partial=last_partial)
        own.wait_load()
        size = self.space.block_tokens
        if own.compressed and own.lies_in_runs(first * size, min((first + len(keys)) * size, own.n)):
            expand(own)
        fill = (
            StagedRows(own, self._model.place, first * size).fill
            if self._model.place.apart
            else partial(fill_block, own)
        )
        return export_blocks(self.space, self._model.layout, own, keys, parent, first, fill, last_partial=last_partial)

    def export_state(self, context: Context, key: bytes, parent: bytes, position: int) -> npt.NDArray[np.uint8]:
        """See `Engine.export_state`."""
        own = self._model.own(context)
        snapshot = own.snapshots.get(position)
        if snapshot is None:
            raise EngineError(f"no states are kept at position {position}", fix=f"There are some at {list(own.states)}")
        return seal_state(self.space, snapshot, own.tokens, key, parent)

    @inference
    def crop(self, context: Context, n: int) -> bool:
        """See `Engine.crop`."""
        own = self._model.own(context)
        check_crop(n, own.n)
        if n == own.n:
            return True
        own.wait_load()
        if self.space.needs_state:
            if n == 0:
                states.clear_states(own.cache)
            elif n in own.snapshots:
                states.restore(own.cache, own.snapshots[n])
            elif self._model.linear or not all(window.truncate(n) for window in own.windows):
                return False
            own.snapshots = {at: kept for at, kept in own.snapshots.items() if at <= n}
        own.truncate(n)
        return True
