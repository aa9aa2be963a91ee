"""The torch engine's reuse at any position: see `ctxreuse.engines.moving.Mover`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from ctxreuse.block import Layout
from ctxreuse.codec import Codec
from ctxreuse.engines.base import Logits, check_length, check_prompt, check_vocabulary
from ctxreuse.engines.gauge import Rotary
from ctxreuse.engines.moving import HeldFormat, Move, Role, Rows
from ctxreuse.engines.torch_hf import rotary, states
from ctxreuse.engines.torch_hf.attention import NAME, inference
from ctxreuse.engines.torch_hf.checks import check_moves, check_spans
from ctxreuse.engines.torch_hf.drift import Drift
from ctxreuse.engines.torch_hf.holding import hold
from ctxreuse.engines.torch_hf.layers import ArenaLayer
from ctxreuse.engines.torch_hf.live import TorchLive
from ctxreuse.engines.torch_hf.looking import Looking
from ctxreuse.engines.torch_hf.pieces import pieces
from ctxreuse.engines.torch_hf.placing import fill_moves
from ctxreuse.engines.torch_hf.probe import Forward
from ctxreuse.engines.torch_hf.scatter import scattered
from ctxreuse.errors import EngineError
from ctxreuse.keys import Tokens, as_tokens
from ctxreuse.levels import is_exact, is_raw
from ctxreuse.model import ModelSpace
from ctxreuse.reuse.attend import Held, HeldMove, Selection, Turn

__all__ = ["Moves"]


class Moves:
    """Places, compares and mends rows of contexts of one engine. Contexts are the caller's, checked and usable."""

    def __init__(
        self,
        model: Any,
        forward: Forward,
        space: ModelSpace,
        layout: Layout,
        chunk: int,
        start: Callable[[], TorchLive],
    ) -> None:
        self._model, self._forward, self._start = model, forward, start
        self._space, self._layout, self._chunk = space, layout, chunk
        self._rotaries: dict[int, Rotary] | None = None
        self._checked = False

    def _turns(self) -> dict[int, Rotary]:
        """How each layer turns K; learnt when it is first asked for."""
        if self._rotaries is None:
            self._rotaries = rotary.learn(self._model, self._forward, self._space.max_tokens)
        return self._rotaries

    @inference
    def _scatters(self) -> None:
        """Raises EngineError unless the model computes tokens at scattered positions; found out by doing it, once."""
        if self._checked:
            return
        where = self._space.architecture
        if self._space.needs_state:
            raise EngineError(
                "a model that keeps states cannot compute tokens out of order",
                where=where,
                fix="If its states are sliding windows only, open it with whole=True",
            )
        name = self._model.config._attn_implementation
        if name != NAME:
            raise EngineError(
                f"attention {name!r} cannot compute tokens at scattered positions",
                where=where,
                fix="Open the model with the engine's own (attention=None), if it has torch's",
            )
        if not self._forward.takes_positions or not self._same_scattered():
            raise EngineError("the model does not compute tokens at the positions it is told", where=where)
        self._checked = True

    def _same_scattered(self) -> bool:
        """True if rows that are computed again come out as they were."""
        ids, rows = torch.arange(1, 13) % self._space.vocab_size, torch.tensor([2, 5, 6, 9, 11])
        live = self._start()
        whole = self._forward.call(ids, 0, live.cache)
        held = [plane for _, layer in live.arena_layers for plane in (layer.keys, layer.values)]
        before = [plane.clone() for plane in held]
        with scattered(rows):
            again = self._forward.run(ids[rows], rows, live.cache)
        rounding = max(8 * torch.finfo(states.DTYPES[self._space.dtype]).eps, 5e-5)
        pairs = zip([whole, *before], [again, *held])
        return all(float((a - b).abs().max()) <= rounding * float(a.abs().max()) for a, b in pairs)

    @inference
    def place(
        self,
        live: TorchLive,
        tokens: Tokens,
        moves: Sequence[Move],
        level: str,
        codec: Callable[[], Codec],
        *,
        turn: bool,
    ) -> None:
        """See `Mover.place`; ``codec`` is asked for if a view is coded."""
        if not self._space.needs_state:
            self._scatters()
        self._own_memory(live)
        rotaries = self._turns()
        ids = self._placeable(live, tokens, level)
        start, end = live.n, live.n + len(ids)
        decoder = None if all(is_raw(move.view.header.level) for move in moves) else codec()
        check_moves(moves, ids, start, self._space, self._layout, decoder)
        covered = sum(move.count for move in moves)
        if self._space.needs_state and covered < len(ids):
            raise EngineError(
                "a model that keeps states cannot fill gaps later",
                where=self._space.architecture,
                fix="Place moves without gaps",
            )
        live.detach()
        live.room(end)
        if live.lease is not None:
            fill_moves(live.lease, moves, rotaries, decoder, self._space.dtype, turn=turn)
        for _, layer in live.arena_layers:
            layer.resize(end)
        live.append(ids)
        live.provenance.place(start, end, [(move.start, move.start + move.count) for move in moves], level)
        if self._space.needs_state and len(ids):
            states.begin(live.cache, end)

    def _placeable(self, live: TorchLive, tokens: Tokens, level: str) -> Tokens:
        """The tokens if they may be appended as rows of that level."""
        if is_exact(level) or not is_raw(level):
            raise EngineError(f"moved rows cannot be of level {level!r}", fix="Name an approx~ level")
        ids = as_tokens(tokens)
        if len(ids):
            check_vocabulary(self._space, ids)
        check_length(self._space, live.n + len(ids))
        return ids

    def _own_memory(self, live: TorchLive) -> None:
        if live.residents is not None:
            raise EngineError("the context attends to held runs, so nothing can be copied into it")

    def hold(self, pieces: Sequence[Rows], format: HeldFormat, codec: Callable[[], Codec]) -> Held:
        """See `Holder.hold`."""
        self._scatters()
        return hold(pieces, format, self._space, self._layout, codec)

    def show(
        self, live: TorchLive, tokens: Tokens, moves: Sequence[HeldMove], level: str, selection: Selection | None
    ) -> None:
        """See `Holder.show`."""
        self._scatters()
        ids = self._placeable(live, tokens, level)
        start, end = live.n, live.n + len(ids)
        check_spans([(move.start, move.count) for move in moves], start, end)
        for index, move in enumerate(moves):
            held = move.held.tokens[max(move.row, 0) :][: move.count]
            if move.row < 0 or not np.array_equal(held, ids[move.start - start : move.start - start + move.count]):
                raise EngineError(f"move {index} shows other tokens")
            if set(move.held.layers) != {layer for layer, _ in live.arena_layers}:
                raise EngineError(f"move {index} is of another model")
        if live.loading is not None:
            live.loading.wait()
        live.detach()
        turns = {layer: _turn(found) for layer, found in self._turns().items()}
        live.show(end, turns, moves, selection)
        live.room(end)
        live.append(ids)
        live.provenance.place(start, end, [(move.start, move.start + move.count) for move in moves], level)

    @inference
    def deviations(
        self, live: TorchLive, rows: Tokens, layer: int, role: Role
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """See `Mover.deviations`."""
        self._scatters()
        asked = self._rows(live, rows)
        target = dict(live.arena_layers).get(layer)
        if target is None or role not in ("k", "v"):
            raise EngineError(f"layer {layer} has no {role!r} of all tokens", where=self._space.architecture)
        if not len(asked):
            return np.zeros(0, np.float32), np.zeros(0, np.float32)
        gaps = self._open(live)
        run = np.union1d(asked, gaps[gaps < asked[-1]])
        at = torch.from_numpy(run)
        found: list[torch.Tensor] = []
        if live.loading is not None:
            live.loading.wait()
        live.room(live.n, len(run))
        with live.tried(layer, run), _ending(target, role):
            for a, b in pieces(0, len(run), self._chunk, 0, False):
                try:
                    with scattered(at[a:b]):
                        self._forward.run(self._ids(live, run[a:b]), at[a:b], live.cache)
                except _Reached as reached:
                    found.append(reached.states)
                    continue
                raise EngineError(f"layer {layer} of the model never came to its cache")
        wanted = torch.from_numpy(np.isin(run, asked))
        fresh = torch.cat(found, 2)[0, :, wanted].float()
        held = torch.from_numpy(live.read(layer, role, asked))
        distance, length = ((fresh - held) ** 2).sum((0, 2)), (fresh**2).sum((0, 2))
        return distance.numpy(), length.numpy()

    @inference
    def attention(
        self, live: TorchLive, rows: Tokens, tokens: Tokens, looks: int, layers: int
    ) -> npt.NDArray[np.float32]:
        """See `Mover.attention`."""
        self._scatters()
        ids = check_prompt(self._space, live.n, tokens)
        asked = self._rows(live, rows)
        if looks < 1 or layers < 1:
            raise EngineError(f"a look of {looks} tokens in {layers} layers")
        end = live.n + len(ids)
        first = max(end - looks, 0)
        unseen = np.union1d(self._open(live), np.arange(live.n, end))
        run = np.arange(first, end)
        if live.residents is not None:  # whose kernels see all
            run, unseen = np.union1d(unseen, run), unseen[:0]
        hidden = torch.from_numpy(unseen[unseen < first])
        noted, at = Looking(first, end), torch.from_numpy(run)
        told = torch.from_numpy(np.concatenate([live.tokens, ids])[run].astype(np.int64))
        if live.loading is not None:
            live.loading.wait()
        again = run[run < live.n]
        live.room(end, len(again))
        later = next((layer for index, layer in live.arena_layers if index >= layers), None)
        with live.tried(layers, again), _ending(later, "k") if later is not None else nullcontext():
            if len(hidden):
                _blank([layer for index, layer in live.arena_layers if index < layers], hidden, end)
            for a, b in pieces(0, len(at), self._chunk, 0, False):
                with scattered(at[a:b], looking=noted, unseen=hidden), suppress(_Reached):
                    self._forward.run(told[a:b], at[a:b], live.cache)
                live.settle()
        return noted.of(asked)

    def _open(self, live: TorchLive) -> npt.NDArray[np.int64]:
        """Positions in gaps."""
        return np.concatenate([np.zeros(0, np.int64), *(np.arange(a, b) for a, b in live.gaps)])

    def _run(
        self,
        live: TorchLive,
        again: npt.NDArray[np.int64],
        ids: Tokens,
        drift: Drift | None,
    ) -> torch.Tensor:
        """Compute the tokens at some positions again and ``ids``, at least one, behind all; the last one's logits."""
        at = torch.from_numpy(np.concatenate([again, np.arange(live.n, live.n + len(ids))]))
        told = torch.from_numpy(np.concatenate([live.tokens[again], ids]).astype(np.int64))
        logits = torch.empty(0)
        for a, b in pieces(0, len(at), self._chunk, 0, False):
            with scattered(at[a:b], drift=drift):
                logits = self._forward.run(told[a:b], at[a:b], live.cache)
            live.settle()
        return logits

    @inference
    def mend(self, live: TorchLive, rows: Tokens, tokens: Tokens, drift: Sequence[tuple[int, int]]) -> Logits:
        """See `Mover.mend`; there is at least one row."""
        self._scatters()
        ids = check_prompt(self._space, live.n, tokens)
        asked = self._rows(live, rows)
        if not np.isin(self._open(live), asked).all():
            raise EngineError(f"rows leave gaps at {list(live.gaps)[:4]}", fix="Mend all rows that no move covers")
        drifting = self._drifting(live, drift, asked) if len(drift) else None
        live.room(live.n + len(ids), len(asked))
        try:
            logits = self._run(live, asked, ids, drifting)
        except BaseException as error:
            live.abandon()
            live.broken = f"rows were being computed anew when that failed ({type(error).__name__})"
            raise
        live.provenance.compute(_spans(asked), live.n)
        live.append(ids)
        live.detach()
        result: Logits = logits.numpy().copy()
        return result

    def _drifting(self, live: TorchLive, spans: Sequence[tuple[int, int]], asked: npt.NDArray[np.int64]) -> Drift:
        self._own_memory(live)
        for start, end in spans:
            if not any(a <= start < end <= b for a, b in live.moved):
                raise EngineError(f"tokens {start} to {end} were not moved there, so they have no drift")
        if any(a[1] > b[0] for a, b in pairwise(spans)):
            raise EngineError("spans of drift overlap or do not ascend")
        turns = self._turns()
        return Drift(spans, asked, {layer: turns[index] for index, layer in live.arena_layers})

    def _rows(self, live: TorchLive, rows: Tokens) -> npt.NDArray[np.int64]:
        asked = np.asarray(rows, np.int64)
        if asked.ndim != 1 or (len(asked) and (asked[0] < 0 or asked[-1] >= live.n or (np.diff(asked) <= 0).any())):
            raise EngineError(f"rows are not ascending positions in a context of {live.n} tokens")
        return asked

    def _ids(self, live: TorchLive, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(live.tokens[rows].astype(np.int64))


def _turn(found: Rotary) -> Turn:
    return Turn() if found.style == "none" else Turn(found.inv_freq, found.style == "pairs")


def _spans(rows: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ascending positions as runs (start, end)."""
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(rows, cuts) if len(part)]


def _blank(layers: Sequence[ArenaLayer], rows: torch.Tensor, end: int) -> None:
    """Have zeros in rows of layers with room for ``end``: a mask takes all weight off them, if they are numbers."""
    for layer in layers:
        layer.resize(max(end, layer.length))
        for plane in (layer.keys, layer.values):
            plane.index_fill_(2, rows, 0)


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
