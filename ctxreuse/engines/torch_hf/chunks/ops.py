"""Chunk reuse of the torch engine: see `ctxreuse.engines.chunks.InPlaceOps`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from ctxreuse.block.levels import is_exact, is_raw
from ctxreuse.engines.base import Context, Logits, check_length, check_prompt, check_vocabulary, chunk_spans
from ctxreuse.engines.checks import check_relocations, check_spans
from ctxreuse.engines.chunks import BlockRows, CompressedFormat, Relocation, Role, RunFormat
from ctxreuse.engines.torch_hf.attention import NAME
from ctxreuse.engines.torch_hf.cache import states
from ctxreuse.engines.torch_hf.cache.layers import ArenaLayer
from ctxreuse.engines.torch_hf.cache.upload import relocate_rows
from ctxreuse.engines.torch_hf.chunks import rotary
from ctxreuse.engines.torch_hf.chunks.drift import DriftCorrection
from ctxreuse.engines.torch_hf.chunks.insert import fill_rows
from ctxreuse.engines.torch_hf.chunks.scatter import AttentionScores, ComparedError, RowComparison, scattered
from ctxreuse.engines.torch_hf.context import TorchContext
from ctxreuse.engines.torch_hf.devices import device_errors
from ctxreuse.engines.torch_hf.inplace.compress import compress, expand
from ctxreuse.engines.torch_hf.inplace.pin import pin_rows
from ctxreuse.engines.torch_hf.model import TorchModel
from ctxreuse.engines.torch_hf.modes import inference
from ctxreuse.errors import EngineError
from ctxreuse.identity.keys import Tokens, as_tokens
from ctxreuse.reuse.inplace import AttachedRun, PinnedRun, Selection
from ctxreuse.rope import Rotary

__all__ = ["TorchChunkOps"]


class TorchChunkOps:
    """See `ctxreuse.engines.chunks.InPlaceOps`; works on contexts of one model."""

    def __init__(self, model: TorchModel) -> None:
        self._model, self._space = model, model.space
        self._rotaries: Mapping[int, Rotary] | None = None
        self._checked = False

    def rotaries(self) -> Mapping[int, Rotary]:
        """How each layer rotates K; learnt at the first call."""
        if self._rotaries is None:
            self._rotaries = rotary.learn(self._model.module, self._model.forward, self._space.max_tokens)
        return self._rotaries

    @inference
    def _check_scatters(self) -> None:
        """Raise EngineError unless the model computes tokens at scattered positions; tried once."""
        if self._checked:
            return
        where = self._space.architecture
        if self._space.needs_state:
            raise EngineError(
                "a model that keeps states cannot compute tokens out of order",
                where=where,
                fix="If its states are sliding windows only, open it with full_kv_for_windows=True",
            )
        name = self._model.module.config._attn_implementation
        if name != NAME:
            raise EngineError(
                f"attention {name!r} cannot compute tokens at scattered positions",
                where=where,
                fix="Open the model with the engine's own (attention=None), if it has torch's",
            )
        if not self._model.forward.takes_positions or not self._recomputes():
            raise EngineError("the model does not compute tokens at the positions it is given", where=where)
        self._checked = True

    def _recomputes(self) -> bool:
        """True if rows that are computed again come out as they were."""
        ids, rows = torch.arange(1, 13) % self._space.vocab_size, torch.tensor([2, 5, 6, 9, 11])
        context, forward = self._model.new_context(), self._model.forward
        whole = forward.call(ids, 0, context.cache)
        planes = [plane for _, layer in context.arena_layers for plane in (layer.keys, layer.values)]
        before = [plane.clone() for plane in planes]
        with scattered(rows):
            again = forward.run(ids[rows], rows, context.cache)
        rounding = max(8 * torch.finfo(states.DTYPES[self._space.dtype]).eps, 5e-5)
        pairs = zip([whole, *before], [again, *planes])
        return all(float((a - b).abs().max()) <= rounding * float(a.abs().max()) for a, b in pairs)

    @inference
    def insert_rows(
        self, context: Context, tokens: Tokens, rows: Sequence[Relocation], level: str, *, rotate: bool = True
    ) -> None:
        """See `ChunkOps.insert_rows`."""
        own = self._model.own(context)
        if not self._space.needs_state:
            self._check_scatters()
        _check_own_memory(own)
        rotaries = self.rotaries()
        ids = self._check_appended(own, tokens, level)
        start, end = own.n, own.n + len(ids)
        codec = None if all(is_raw(one.view.header.level) for one in rows) else self._model.codec
        check_relocations(rows, ids, start, self._space, self._model.layout, codec)
        if self._space.needs_state and sum(one.count for one in rows) < len(ids):
            raise EngineError(
                "a model that keeps states cannot fill gaps later",
                where=self._space.architecture,
                fix="Insert rows without gaps",
            )
        own.finish_load()
        own.reserve(end)
        if own.lease is not None:
            relocate = partial(relocate_rows, self._model.place) if self._model.place.apart else fill_rows
            relocate(own.lease, rows, rotaries if rotate else {}, codec, self._space.dtype)
        for _, layer in own.arena_layers:
            layer.resize(end)
        own.append(ids)
        own.provenance.insert(start, end, [(one.start, one.start + one.count) for one in rows], level)
        if self._space.needs_state and len(ids):
            states.begin(own.cache, end)

    def _check_appended(self, context: TorchContext, tokens: Tokens, level: str) -> Tokens:
        """The tokens if they may be appended as rows of that level; raises EngineError and as `check_prompt`."""
        if is_exact(level) or not is_raw(level):
            raise EngineError(f"relocated rows cannot be of level {level!r}", fix="Name an approx~ level")
        ids = as_tokens(tokens)
        if len(ids):
            check_vocabulary(self._space, ids)
        check_length(self._space, context.n + len(ids))
        return ids

    def pin_run(self, rows: Sequence[BlockRows], format: RunFormat = "int8") -> PinnedRun:
        """See `InPlaceOps.pin_run`."""
        self._check_scatters()
        codec = None if all(is_raw(one.view.header.level) for one in rows) else self._model.codec
        return pin_rows(rows, format, self._space, self._model.layout, codec)

    def attach(
        self,
        context: Context,
        tokens: Tokens,
        runs: Sequence[AttachedRun],
        level: str,
        *,
        selection: Selection | None = None,
    ) -> None:
        """See `InPlaceOps.attach`."""
        own = self._model.own(context)
        self._check_scatters()
        ids = self._check_appended(own, tokens, level)
        start, end = own.n, own.n + len(ids)
        check_spans([(one.start, one.count) for one in runs], start, end)
        for index, one in enumerate(runs):
            pinned = one.run.tokens[max(one.row, 0) :][: one.count]
            if one.row < 0 or not np.array_equal(pinned, ids[one.start - start : one.start - start + one.count]):
                raise EngineError(f"run {index} holds other tokens")
            if set(one.run.layers) != {layer for layer, _ in own.arena_layers}:
                raise EngineError(f"run {index} is of another model")
        own.wait_load()
        own.finish_load()
        own.attach_runs(end, self.rotaries(), runs, selection)
        own.reserve(end)
        own.append(ids)
        own.provenance.insert(start, end, [(one.start, one.start + one.count) for one in runs], level)

    @inference
    def compress(self, context: Context, format: CompressedFormat, level: str) -> None:
        """See `CompressingOps.compress`."""
        own = self._model.own(context)
        self._check_scatters()
        self._check_appended(own, own.tokens[:0], level)
        own.check_filled()
        own.wait_load()
        own.finish_load()
        with device_errors(self._model.place):
            compress(own, format, self.rotaries(), level)

    @inference
    def deviations(
        self, context: Context, rows: Tokens, layer: int, role: Role
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """See `ChunkOps.deviations`."""
        own = self._model.own(context)
        self._check_scatters()
        compared = _check_rows(own, rows)
        target = dict(own.arena_layers).get(layer)
        if target is None or role not in ("k", "v"):
            raise EngineError(f"layer {layer} has no {role!r} of all tokens", where=self._space.architecture)
        if not len(compared):
            return np.zeros(0, np.float32), np.zeros(0, np.float32)
        gaps = _gap_rows(own)
        run = np.union1d(compared, gaps[gaps < compared[-1]])
        at, ids = torch.from_numpy(run), torch.from_numpy(own.tokens[run].astype(np.int64))
        found: list[torch.Tensor] = []
        own.wait_load()
        own.reserve(own.n, len(run))
        with own.restored(layer, run), _ending(target, role):
            for a, b in chunk_spans(0, len(run), self._model.chunk):
                try:
                    with scattered(at[a:b]):
                        self._model.forward.run(ids[a:b], at[a:b], own.cache)
                except _Reached as reached:
                    found.append(reached.states)
                    continue
                raise EngineError(f"layer {layer} of the model never came to its cache")
        wanted = torch.from_numpy(np.isin(run, compared))
        fresh = torch.cat(found, 2)[0, :, wanted].float().cpu()
        stored = torch.from_numpy(own.read(layer, role, compared))
        distance, length = ((fresh - stored) ** 2).sum((0, 2)), (fresh**2).sum((0, 2))
        return distance.numpy(), length.numpy()

    @inference
    def row_errors(
        self, context: Context, rows: Tokens
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None:
        """See `Engine.row_errors`."""
        try:
            self._check_scatters()
        except EngineError:
            return None
        own = self._model.own(context)
        own.check_filled()
        _check_own_memory(own)
        at = torch.from_numpy(_check_rows(own, rows))
        compared = RowComparison(len(own.arena_layers))
        if not len(at) or not own.arena_layers:
            return None
        with scattered(at, compared=compared), suppress(ComparedError):
            self._model.forward.run(torch.from_numpy(own.tokens[at.numpy()].astype(np.int64)), at, own.cache)
        shape = len(own.arena_layers), 2, len(at)
        found = (torch.stack(of).view(shape).cpu().numpy() for of in (compared.distances, compared.lengths))
        return next(found), next(found)

    @inference
    def attention(
        self, context: Context, rows: Tokens, tokens: Tokens, *, queries: int, layers: int
    ) -> npt.NDArray[np.float32]:
        """See `ChunkOps.attention`."""
        own = self._model.own(context)
        self._check_scatters()
        ids = check_prompt(self._space, own.n, tokens)
        scored = _check_rows(own, rows)
        if queries < 1 or layers < 1:
            raise EngineError(f"attention probe of {queries} tokens in {layers} layers: both must be 1 or more")
        end = own.n + len(ids)
        first = max(end - queries, 0)
        unseen = np.union1d(_gap_rows(own), np.arange(own.n, end))
        run = np.arange(first, end)
        if own.in_place is not None:  # whose kernels see all
            run, unseen = np.union1d(unseen, run), unseen[:0]
        hidden = torch.from_numpy(unseen[unseen < first])
        scores, at = AttentionScores(first, end), torch.from_numpy(run)
        fed = torch.from_numpy(np.concatenate([own.tokens, ids])[run].astype(np.int64))
        own.wait_load()
        recomputed = run[run < own.n]
        own.reserve(end, len(recomputed))
        later = next((layer for index, layer in own.arena_layers if index >= layers), None)
        with own.restored(layers, recomputed), _ending(later, "k") if later is not None else nullcontext():
            if len(hidden):
                _blank([layer for index, layer in own.arena_layers if index < layers], hidden, end)
            for a, b in chunk_spans(0, len(at), self._model.chunk):
                with scattered(at[a:b], scores=scores, unseen=hidden), suppress(_Reached):
                    self._model.forward.run(fed[a:b], at[a:b], own.cache)
                own.check_attended()
        return scores.of(scored)

    @inference
    def recompute_rows(
        self, context: Context, rows: Tokens, tokens: Tokens, *, drift: Sequence[tuple[int, int]] = ()
    ) -> Logits:
        """See `ChunkOps.recompute_rows`."""
        own = self._model.own(context)
        if not len(rows):
            return self._model.prefill(own, tokens)
        self._check_scatters()
        ids = check_prompt(self._space, own.n, tokens)
        recomputed = _check_rows(own, rows)
        if not np.isin(_gap_rows(own), recomputed).all():
            raise EngineError(f"rows leave gaps at {list(own.gaps)[:4]}", fix="Recompute all rows that were not filled")
        correction = self._correction(own, drift, recomputed) if len(drift) else None
        own.reserve(own.n + len(ids), len(recomputed))
        try:
            logits = self._recompute(own, recomputed, ids, correction)
        except BaseException as error:
            own.abandon_load()
            own.broken = f"recomputing rows failed halfway ({type(error).__name__})"
            raise
        own.provenance.recompute(_spans(recomputed), own.n)
        own.append(ids)
        own.finish_load()
        result: Logits = logits.numpy().copy()
        return result

    def _recompute(
        self, context: TorchContext, rows: npt.NDArray[np.int64], ids: Tokens, drift: DriftCorrection | None
    ) -> torch.Tensor:
        """Compute the tokens at some positions again and ``ids``, at least one, behind all; the last one's logits."""
        at = torch.from_numpy(np.concatenate([rows, np.arange(context.n, context.n + len(ids))]))
        fed = torch.from_numpy(np.concatenate([context.tokens[rows], ids]).astype(np.int64))
        logits = torch.empty(0)
        for a, b in chunk_spans(0, len(at), self._model.chunk):
            with scattered(at[a:b], drift=drift):
                logits = self._model.forward.run(fed[a:b], at[a:b], context.cache)
            context.check_attended()
        return logits

    def _correction(
        self, context: TorchContext, spans: Sequence[tuple[int, int]], rows: npt.NDArray[np.int64]
    ) -> DriftCorrection:
        _check_own_memory(context)
        for start, end in spans:
            if not any(a <= start < end <= b for a, b in context.relocated):
                raise EngineError(f"tokens {start} to {end} were not inserted there, so they have no drift")
        if any(a[1] > b[0] for a, b in pairwise(spans)):
            raise EngineError("spans of drift overlap or do not ascend")
        rotaries = {layer: self.rotaries()[index] for index, layer in context.arena_layers}
        return DriftCorrection(spans, rows, rotaries)


def _check_own_memory(context: TorchContext) -> None:
    if context.compressed:
        expand(context)
    if context.in_place is not None:
        raise EngineError("the context has attached runs, so no rows can be copied into it")


def _check_rows(context: TorchContext, rows: Tokens) -> npt.NDArray[np.int64]:
    """The rows as int64 if they are ascending positions in the context; raises EngineError."""
    found = np.asarray(rows, np.int64)
    if found.ndim != 1 or (len(found) and (found[0] < 0 or found[-1] >= context.n or (np.diff(found) <= 0).any())):
        raise EngineError(f"rows are not ascending positions in a context of {context.n} tokens")
    return found


def _gap_rows(context: TorchContext) -> npt.NDArray[np.int64]:
    """Positions in gaps."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(a, b) for a, b in context.gaps)])


def _spans(rows: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ascending positions as runs (start, end)."""
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(rows, cuts) if len(part)]


def _blank(layers: Sequence[ArenaLayer], rows: torch.Tensor, end: int) -> None:
    """Zero rows of layers with room for ``end``: a mask takes all weight off them, if they are numbers."""
    for layer in layers:
        layer.resize(max(end, layer.length))
        for plane in (layer.keys, layer.values):
            plane.index_fill_(2, rows.to(plane.device), 0)


class _Reached(Exception):
    """Ends a forward with what a layer was about to keep."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.states = states


@contextmanager
def _ending(layer: ArenaLayer, role: Role) -> Iterator[None]:
    """Forwards inside end where they come to the cache of ``layer``."""

    def reach(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise _Reached(keys if role == "k" else values)

    layer.update = reach  # type: ignore[assignment]
    try:
        yield
    finally:
        del layer.update
