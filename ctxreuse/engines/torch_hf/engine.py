"""TorchEngine: any Hugging Face causal language model behind the Engine interface."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from ctxreuse import models
from ctxreuse.block import BlockView, block_layout
from ctxreuse.codec import Codec
from ctxreuse.engines.base import Live, Logits, check_length, check_prompt
from ctxreuse.engines.moving import HeldFormat, Move, Role, Rows
from ctxreuse.engines.text import HFText, TextModel
from ctxreuse.engines.torch_hf import probe, states
from ctxreuse.engines.torch_hf.arena import Pool
from ctxreuse.engines.torch_hf.attention import inference, install
from ctxreuse.engines.torch_hf.blocks import fill_layer, seal_block, seal_state
from ctxreuse.engines.torch_hf.checks import check_blocks, check_state, decoded_state
from ctxreuse.engines.torch_hf.live import TorchLive
from ctxreuse.engines.torch_hf.loading import Import
from ctxreuse.engines.torch_hf.moves import Moves
from ctxreuse.engines.torch_hf.opening import open_model
from ctxreuse.engines.torch_hf.pieces import pieces
from ctxreuse.engines.torch_hf.space import model_space, new_cache
from ctxreuse.errors import ConfigError, EngineError, FormatError, LinkError
from ctxreuse.keys import Tokens
from ctxreuse.levels import is_raw
from ctxreuse.model import ModelSpace
from ctxreuse.reuse.attend import Held, HeldMove, Selection

__all__ = ["TorchEngine"]

#: Below this a copy takes less than 1 ms, and starting a thread for it a good part of that.
_THREAD_BYTES = 4 << 20


class TorchEngine:
    """See `ctxreuse.engines.base.Engine`. Runs on the CPU; use different contexts from different threads at will.

    ``model`` is used in place: its attention implementation is set (see `attention.install`). ``reserve`` tokens of
    K/V memory are allocated and touched at once. ``chunk`` tokens go through the model together in a long prefill.
    ``background``: blocks are copied by a thread beside the prefill (True) or by the prefill itself when it comes to a
    layer (False); None: by a thread if there are more than a few MiB. Loading 2,048 tokens of SmolLM2 (94 MB, float32)
    made the first token of a 32-token question later by 4 to 15 % with the thread and by 9 to 13 % without (medians of
    11 to 31 pairs, 2 cores with other work on them), and the thread also hides page faults of a cold store.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: TextModel | None = None,
        *,
        weights: str | None = None,
        folder: Path | None = None,
        reserve: int = 0,
        chunk: int = 512,
        block_tokens: int = 64,
        attention: str | None = None,
        background: bool | None = None,
        whole: bool = False,
    ) -> None:
        if chunk < 1 or reserve < 0:
            raise ConfigError(
                f"chunk is {chunk}, reserve is {reserve}", fix="chunk must be 1 or more, reserve 0 or more"
            )
        self._forward = probe.Forward(model)
        self.model, self.text = model.eval(), tokenizer
        self._chunk, self._background = chunk, background
        self._codec: Codec | None = None
        self._whole = whole
        name = install(model, attention)
        self.space = self._measure(weights, folder, name, block_tokens)
        self._layout = block_layout(self.space)
        shape = tuple((i, s.kv_heads, s.k_dim, s.v_dim) for i, s in enumerate(self.space.layers) if s.blocked)
        self._pool = Pool(shape, states.DTYPES[self.space.dtype])
        if reserve and shape:
            check_length(self.space, reserve)
            self._pool.reserve(reserve)
        self._windows = {i: s.window for i, s in enumerate(self.space.layers) if s.window}
        self._reach = max((window - 1 for window in self._windows.values()), default=0)
        self._probe = self._snapshot_probe()
        self._moves = Moves(model, self._forward, self.space, self._layout, chunk, self.start)

    @classmethod
    def open(
        cls,
        name_or_folder: str | os.PathLike[str],
        *,
        dtype: str = "float32",
        threads: int | None = None,
        reserve: int = 0,
        chunk: int = 512,
        block_tokens: int = 64,
        attention: str | None = None,
        background: bool | None = None,
        whole: bool = False,
    ) -> TorchEngine:
        """Open a known model by name, or a Hugging Face folder; ``threads`` sets torch's for the whole process.

        Raises ConfigError if there is no such model or the folder does not hold one.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        model, folder = open_model(name_or_folder, dtype)
        return cls(
            model,
            HFText.open(folder),
            weights=models.weights_digest(folder),
            folder=folder,
            reserve=reserve,
            chunk=chunk,
            block_tokens=block_tokens,
            attention=attention,
            background=background,
            whole=whole,
        )

    def _cache(self) -> DynamicCache:
        return new_cache(self.model, whole=self._whole)

    @inference
    def _measure(self, weights: str | None, folder: Path | None, attention: str, block_tokens: int) -> ModelSpace:
        self._cache()  # refuses kinds of layers that cannot be exported, before the model is run
        cache = probe.plain_cache(self.model)
        probe.fill(self.model, self._forward, cache)
        self._linear = any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)
        self._step = False
        if self._linear and not probe.continues(self.model, self._forward, step=False):
            if not probe.continues(self.model, self._forward, step=True):
                raise EngineError("the model does not continue from its own cache", where=type(self.model).__name__)
            self._step = True
        return model_space(self.model, cache, weights, folder, attention, block_tokens, whole=self._whole)

    @inference
    def _snapshot_probe(self) -> states.Snapshot:
        live = self.start()
        probe.fill(self.model, self._forward, live.cache)
        return states.capture(live.cache, probe.FILLED)

    @property
    def codec(self) -> Codec:
        """See `Engine.codec`; unless one is set, that of the newest card on this user's shelf, opened when needed."""
        if self._codec is None:
            self._codec = Codec.open(self.space)
        return self._codec

    @codec.setter
    def codec(self, codec: Codec) -> None:
        if codec.space.digest != self.space.digest:
            raise ConfigError("the codec is for another model space", where=self.space.architecture)
        self._codec = codec

    def start(self, reserve: int = 0) -> TorchLive:
        """See `Engine.start`."""
        check_length(self.space, reserve)
        return TorchLive(self._cache(), self._pool, self.space.max_tokens, reserve)

    def _own(self, live: Live) -> TorchLive:
        if not isinstance(live, TorchLive):
            raise EngineError(f"a {type(live).__name__} is no context of this engine", fix="Use one that start() gave")
        live.usable()
        return live

    @inference
    def load(
        self,
        live: Live,
        views: Sequence[BlockView],
        state: BlockView | None = None,
        ready: Callable[[int], None] | None = None,
    ) -> Import:
        """See `Engine.load`. The state (one position, small) is read at once, K and V of the blocks layer by layer."""
        live = self._own(live)
        live.filled()
        if live.residents is not None:
            raise EngineError("the context attends to held runs, so no block can be loaded into it")
        live.detach()
        start = live.n
        if start % self.space.block_tokens:
            raise EngineError(
                f"the context holds {start} tokens, which is no block boundary",
                fix=f"Crop or compute to a multiple of {self.space.block_tokens}",
            )
        if live.loading is not None:
            raise EngineError("a load into the context is still in flight, or has failed", fix="wait() for it first")
        if not views:
            if state is not None:
                raise EngineError("a state without blocks")
            return Import((), background=False)
        views = list(views)
        end = start + len(views) * self.space.block_tokens
        check_length(self.space, end)
        coded = any(not is_raw(view.header.level) for view in (*views, *((state,) if state is not None else ())))
        codec = self.codec if coded else None
        check_blocks(views, self.space, self._layout, start, codec)
        state = decoded_state(state, self.space, codec)
        check_state(state, self.space, end, self._probe, self._windows)
        snapshot = states.read_state(state) if state is not None else None
        live.room(end)
        if snapshot is not None:
            states.restore(live.cache, snapshot)
            live.hold(snapshot)
            live.provenance.stain(end, self._reach, snapshot.level)
        live.provenance.load(start, self.space.block_tokens, [view.header.level for view in views])
        jobs = []
        for index, layer in live.arena_layers:
            assert live.lease is not None
            layer.resize(end)
            jobs.append((index, partial(fill_layer, live.lease, start, views, index, ready, codec)))
        live.append(np.concatenate([view.tokens for view in views]))
        beside = self._background
        if beside is None:
            beside = sum(view.layout.nbytes for view in views) >= _THREAD_BYTES
        loading = Import(jobs, background=beside)
        live.attach(loading)
        return loading

    def prefill(self, live: Live, tokens: Tokens) -> Logits:
        """See `Engine.prefill`."""
        live = self._own(live)
        live.filled()
        ids = check_prompt(self.space, live.n, tokens)
        start, end, size = live.n, live.n + len(ids), self.space.block_tokens
        live.room(end)
        boundary = end // size * size if self.space.needs_state else 0
        cut = boundary if self._linear else 0
        logits = np.empty(0, np.float32)
        for at, stop in pieces(start, end, self._chunk, cut, self._step):
            logits = self._run(live, ids[at - start : stop - start])
            if at < boundary <= stop:
                live.snap(boundary, passing=len(ids) < size)
        return logits

    @inference
    def _run(self, live: TorchLive, ids: Tokens) -> Logits:
        try:
            logits = self._forward.call(torch.from_numpy(ids.astype(np.int64)), live.n, live.cache)
            live.settle()
        except BaseException as error:
            self._undo(live, error)
            raise
        live.append(ids)
        live.detach()
        result: Logits = logits.numpy().copy()
        return result

    def _undo(self, live: TorchLive, error: BaseException) -> None:
        """After a failed forward: back to where it began, or unusable where that is impossible."""
        live.abandon()
        if isinstance(error, FormatError):
            live.broken = "a block that it was loaded from is corrupt"
        elif isinstance(error, LinkError):
            live.broken = "a block that it was loaded from never came"
        elif self._linear:
            live.broken = f"a forward was interrupted ({type(error).__name__}) and its recurrent states are lost"
        live.truncate(live.n)
        for window in live.windows:
            window.truncate(live.n)

    def place(self, live: Live, tokens: Tokens, moves: Sequence[Move], level: str, *, turn: bool = True) -> None:
        """See `Mover.place`."""
        self._moves.place(self._own(live), tokens, moves, level, lambda: self.codec, turn=turn)

    def deviations(
        self, live: Live, rows: Tokens, layer: int, role: Role
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """See `Mover.deviations`."""
        return self._moves.deviations(self._own(live), rows, layer, role)

    def attention(
        self, live: Live, rows: Tokens, tokens: Tokens, *, looks: int, layers: int
    ) -> npt.NDArray[np.float32]:
        """See `Mover.attention`."""
        return self._moves.attention(self._own(live), rows, tokens, looks, layers)

    def mend(self, live: Live, rows: Tokens, tokens: Tokens, *, drift: Sequence[tuple[int, int]] = ()) -> Logits:
        """See `Mover.mend`."""
        if not len(rows):
            return self.prefill(live, tokens)
        return self._moves.mend(self._own(live), rows, tokens, drift)

    def hold(self, pieces: Sequence[Rows], format: HeldFormat = "int8") -> Held:
        """See `Holder.hold`."""
        return self._moves.hold(pieces, format, lambda: self.codec)

    def show(
        self,
        live: Live,
        tokens: Tokens,
        moves: Sequence[HeldMove],
        level: str,
        *,
        selection: Selection | None = None,
    ) -> None:
        """See `Holder.show`."""
        self._moves.show(self._own(live), tokens, moves, level, selection)

    @inference
    def first_rows(self, tokens: Tokens, positions: Tokens) -> tuple[int, npt.NDArray[np.float32]] | None:
        """See `Engine.first_rows`: the model runs up to its first layer's write to a cache, and no further."""
        if not self.space.layers[0].blocked:
            return None
        ids = check_prompt(self.space, 0, tokens)
        wide, at = (torch.from_numpy(np.asarray(part, np.int64)) for part in (ids, positions))
        rows = probe.first_keys(self._forward, self._cache(), wide, at)
        return None if rows is None else (0, rows.float().numpy())

    def export(self, live: Live, keys: Sequence[bytes], parent: bytes, first: int) -> Iterator[npt.NDArray[np.uint8]]:
        """See `Engine.export`."""
        live = self._own(live)
        live.filled()
        size = self.space.block_tokens
        if first < 0 or (first + len(keys)) * size > live.n:
            raise EngineError(
                f"blocks {first} to {first + len(keys) - 1} of {size} tokens are not in a context of {live.n} tokens"
            )
        if live.loading is not None:
            live.loading.wait()
        return self._export(live, keys, parent, first)

    def _export(
        self, live: TorchLive, keys: Sequence[bytes], parent: bytes, first: int
    ) -> Iterator[npt.NDArray[np.uint8]]:
        for number, key in enumerate(keys, first):
            if (number + 1) * self.space.block_tokens > live.n:
                raise EngineError(f"the context was cropped to {live.n} tokens while it was exported")
            yield seal_block(self.space, self._layout, live, number, key, parent)
            parent = key

    def export_state(self, live: Live, key: bytes, parent: bytes, position: int) -> npt.NDArray[np.uint8]:
        """See `Engine.export_state`."""
        live = self._own(live)
        snapshot = live.snapshots.get(position)
        if snapshot is None:
            raise EngineError(f"no states are held at position {position}", fix=f"Held: {list(live.states)}")
        return seal_state(self.space, snapshot, live.tokens, key, parent)

    @inference
    def crop(self, live: Live, n: int) -> bool:
        """See `Engine.crop`."""
        live = self._own(live)
        if not 0 <= n <= live.n:
            raise EngineError(f"position {n} is not in a context of {live.n} tokens")
        if n == live.n:
            return True
        if live.loading is not None:
            live.loading.wait()
        if self.space.needs_state:
            if n == 0:
                states.clear_states(live.cache)
            elif n in live.snapshots:
                states.restore(live.cache, live.snapshots[n])
            elif self._linear or not all(window.truncate(n) for window in live.windows):
                return False
            live.snapshots = {at: held for at, held in live.snapshots.items() if at <= n}
        live.truncate(n)
        return True
