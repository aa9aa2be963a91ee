"""Tokens that leave a torch model early: its layers in parts, its ramps, and rows that wait for the rest."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from ctxreuse.cuda import exit_scores
from ctxreuse.engines.base import check_prompt
from ctxreuse.engines.exits import ExitStep
from ctxreuse.engines.torch_hf.cache.layers import ArenaLayer
from ctxreuse.engines.torch_hf.context import TorchContext
from ctxreuse.engines.torch_hf.linears import few_rows
from ctxreuse.engines.torch_hf.model import TorchModel, plain_cache
from ctxreuse.engines.torch_hf.modes import inference
from ctxreuse.engines.torch_hf.packed import check_attended, packed_cache, packing
from ctxreuse.engines.torch_hf.pending import PendingRow
from ctxreuse.engines.torch_hf.space import new_cache
from ctxreuse.errors import EngineError
from ctxreuse.exits import ExitPlan, RampCost
from ctxreuse.exits.profile import ExitProfile, Ramp
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace
from ctxreuse.kernels.linear import linear_top

__all__ = ["ExitStates", "HiddenStates", "LayerParts", "TorchExits", "check_exits"]

#: A row of several costs so much of a pass of one: what a token that left costs later.
_ROW = 0.11
#: Parts of a model give the bits of the whole; that is looked at once.
_TOLERANCE = 1e-6


class LayerParts:
    """A model that runs some of its layers at a time. Attention is to the same cache as the whole model's."""

    def __init__(self, module: Any) -> None:
        """Raises EngineError for a model whose layers cannot be run in parts."""
        inner: Any = getattr(module, module.base_model_prefix, None)
        head = module.get_output_embeddings()
        if (
            not all(isinstance(getattr(inner, name, None), torch.nn.Module) for name in ("layers", "norm"))
            or head is None
        ):
            raise EngineError("it has no row of layers that could be run in parts", where=type(module).__name__)
        self._inner, self._head = inner, head
        self.count, self.width = len(inner.layers), int(head.in_features)
        #: Bytes of the weights of each layer, and of the last one that gives logits.
        self.layer_bytes, self.head_bytes = [_bytes(layer) for layer in inner.layers], _bytes(head)
        self._parts: dict[tuple[int, int], Any] = {}
        self._check(module)

    def _part(self, start: int, stop: int) -> Any:
        """A model of layers ``start`` to ``stop`` that shares its weights with the whole."""
        part = self._parts.get((start, stop))
        if part is None:
            part = copy.copy(self._inner)
            part._modules = dict(self._inner._modules)
            part.layers = torch.nn.ModuleList(list(self._inner.layers)[start:stop])
            if stop < self.count:
                part.norm = torch.nn.Identity()
            self._parts[start, stop] = part
        return part

    def run(
        self, given: torch.Tensor, positions: torch.Tensor, cache: DynamicCache, start: int, stop: int
    ) -> torch.Tensor:
        """Run layers ``start`` to ``stop`` on hidden states [n, width], or on int64 ids [n] from layer 0 on.

        Returns hidden states [n, width], behind the last layer normalised. Each layer appends to its own cache.
        """
        view = copy.copy(cache)
        view.layers = [cache.layers[start]] * start + cache.layers[start:]  # masks follow the first one's length
        device = self._inner.device
        given, at = given[None].to(device), positions[None].to(device)
        what = {"inputs_embeds": given} if given.is_floating_point() else {"input_ids": given}
        out = self._part(start, stop)(**what, position_ids=at, past_key_values=view, use_cache=True).last_hidden_state
        found: torch.Tensor = out[0]
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [n, vocab], in the host's memory, of hidden states behind the last layer."""
        found: torch.Tensor = self._head(hidden).float().cpu()
        return found

    @inference
    def _check(self, module: Any) -> None:
        """Models scale or cap what goes in and out in ways of their own; see that parts do what the whole does."""
        ids = torch.arange(1, 6) % module.get_input_embeddings().num_embeddings
        at, middle = torch.arange(len(ids)), self.count // 2
        given = {"input_ids": ids[None].to(module.device), "position_ids": at[None].to(module.device)}
        whole = module(**given, past_key_values=plain_cache(module)).logits[0].float().cpu()
        cache = plain_cache(module)
        hidden = self.run(ids, at, cache, 0, middle)
        found = self.logits(self.run(hidden, at, cache, middle, self.count))
        if not (whole - found).abs().max() <= _TOLERANCE * whole.abs().max():
            raise EngineError("parts of its layers do not give what all give", where=type(module).__name__)


def _bytes(module: torch.nn.Module) -> int:
    """Bytes of weights of linear layers; those that are int8 have none as parameters."""
    linears = [one for one in module.modules() if isinstance(one, torch.nn.Linear)]
    return sum(
        one.in_features * one.out_features * (one.weight.itemsize if one.weight.numel() else 1) for one in linears
    )


def root_mean_square(hidden: torch.Tensor) -> torch.Tensor:
    """Return hidden states [n, width] as float32, each divided by its root mean square: what a ramp's head takes."""
    wide = hidden.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)


class TorchExits:
    """The exits of one model. Different contexts from different threads."""

    def __init__(self, model: TorchModel, profile: ExitProfile) -> None:
        """Raises EngineError, with the reason, for a model that tokens cannot leave early."""
        check_exits(model.space, model.module)
        self._model, self._ramps = model, profile.ramps
        self._parts = LayerParts(model.module)
        if not profile.ramps or (profile.width, profile.layers) != (self._parts.width, self._parts.count):
            raise EngineError("the exit profile has no ramps of this model", where=model.space.architecture)
        #: See `ExitEngine.ramps`.
        self.costs = tuple(self._cost(ramp) for ramp in profile.ramps)
        #: Heads of ramps on the device, as float32: codes, scales, bias.
        self._heads: dict[int, list[torch.Tensor]] = {}
        model.complete = self._complete

    def _cost(self, ramp: Ramp) -> RampCost:
        """By the bytes of weights that a token reads, which is what it costs."""
        layers, head = self._parts.layer_bytes, self._parts.head_bytes
        whole = sum(layers) + head
        return RampCost((1 - _ROW) * (sum(layers[ramp.depth :]) + head) / whole, ramp.head.data.nbytes / whole)

    @inference
    def step(self, batch: Sequence[tuple[TorchContext, Tokens, ExitPlan]]) -> list[ExitStep]:
        """See `ExitEngine.exit_step`; the contexts have no load in flight and no attached runs, and the model packs
        several. All are as they were if it raises."""
        with ExitStack() as opened:
            lanes = []
            for context, tokens, plan in batch:
                ids = check_prompt(self._model.space, context.n, tokens)
                context.reserve(context.n + len(ids))
                opened.enter_context(_undone(context))
                given = torch.from_numpy(ids.astype(np.int64))
                lanes.append(_Lane(context, given, [PendingRow(plan.ramps)], context.n, plan))
            self._run(lanes, 0)
            for context, tokens, _ in batch:
                context.append(tokens)
        return [lane.found for lane in lanes]

    @inference
    def _complete(self, context: TorchContext) -> None:
        """Compute what the last rows of a context miss."""
        depth = context.pending[-1].depth
        rows = [row for row in context.pending if row.depth == depth]
        lane = _Lane(context, _stacked(rows), rows, context.n - 1, ExitPlan())
        with _undone(context):
            self._run([lane], depth)
        context.completed += lane.found.rows

    def _run(self, lanes: Sequence[_Lane], at: int) -> None:
        """Run the rows of several contexts from layer ``at`` on, and from where they wait those before them, up to the
        ramp at which all leave.

        If some left alone, the pass would save their rows and a later one have them: nothing, and their tokens would
        be less sure.
        """
        waiting = [row for lane in lanes for row in lane.context.pending]
        wanted = {number for row in (*waiting, *(lane.rows[-1] for lane in lanes)) for number in row.ramps}
        depths = {self._ramps[number].depth: number for number in wanted}
        stops = {stop for stop in (*depths, *(row.depth for row in waiting)) if stop > at}
        for stop in sorted(stops | {self._parts.count}):
            self._advance(lanes, at, stop)
            at, number = stop, depths.get(stop, -1)
            if number >= 0:
                self._score(number, lanes)
                if all(lane.may_leave(number) for lane in lanes):
                    for lane in lanes:
                        lane.leave(number, stop)
                    return
            for lane in lanes:
                lane.join(stop)
        with few_rows(sum(len(lane.rows) for lane in lanes)):
            logits = self._parts.logits(torch.cat([lane.hidden for lane in lanes]))
        for lane, own in zip(lanes, logits.split([len(lane.rows) for lane in lanes])):
            lane.end(own)

    def _advance(self, lanes: Sequence[_Lane], at: int, stop: int) -> None:
        counts = [len(lane.rows) for lane in lanes]
        given = torch.cat([lane.hidden for lane in lanes])
        positions = torch.cat([torch.arange(lane.last + 1 - len(lane.rows), lane.last + 1) for lane in lanes])
        if len(lanes) == 1:
            with few_rows(len(given)):
                given = self._parts.run(given, positions, lanes[0].context.cache, at, stop)
        else:
            cache = packed_cache([lane.context.cache for lane in lanes], counts)
            with packing():
                given = self._parts.run(given, positions, cache, at, stop)
            check_attended(cache)
        for lane, hidden in zip(lanes, given.split(counts)):
            lane.hidden = hidden

    def _score(self, number: int, lanes: Sequence[_Lane]) -> None:
        """Compute a ramp for those rows that it is wanted for."""
        rows = [row for lane in lanes for row in lane.rows]
        chosen = [at for at, row in enumerate(rows) if number in row.ramps]
        if not chosen:
            return
        ramp, hidden = self._ramps[number], torch.cat([lane.hidden for lane in lanes])[chosen]
        given = root_mean_square(hidden)
        if given.is_cpu:
            tops = linear_top(given.numpy(), ramp.head, torch.get_num_threads())
            found = zip((tops["best"] - tops["total"]).tolist(), tops["index"].tolist())
        else:
            found = zip(*self._on_device(number, given))
        for at, (sure, index) in zip(chosen, found):
            rows[at].scores[number] = sure  # the log of its probability
            rows[at].tokens[number] = int(ramp.candidates[index])

    def _on_device(self, number: int, given: torch.Tensor) -> tuple[list[float], list[int]]:
        """As `linear_top`, where the states lie: how sure each row is, and of which candidate."""
        head = self._heads.get(number)
        if head is None:
            weights = self._ramps[number].head
            parts = (weights.data, weights.scales, weights.bias)
            head = self._heads[number] = [
                torch.from_numpy(np.asarray(one, np.float32)).to(given.device) for one in parts
            ]
        logits = torch.nn.functional.linear(given, head[0]) * head[1] + head[2]
        scores = exit_scores(logits)
        return (scores[:, 0] - scores[:, 2]).tolist(), logits.argmax(-1).tolist()


class _Lane:
    """One context in a pass with exits.

    Attributes:
        hidden: of its rows, the ids int64 [n] or hidden states [n, width] behind the layers so far.
        rows: its tokens in the pass, of which the last has position ``last``.
        found: what the pass came to.
    """

    __slots__ = ("context", "found", "hidden", "last", "plan", "rows")

    def __init__(
        self, context: TorchContext, hidden: torch.Tensor, rows: list[PendingRow], last: int, plan: ExitPlan
    ) -> None:
        self.context, self.hidden, self.rows, self.last, self.plan = context, hidden, rows, last, plan
        self.found = ExitStep(None, -1, -1, ())

    def may_leave(self, number: int) -> bool:
        """True if a ramp is sure enough of its last row."""
        least = self.plan.least.get(number)
        return least is not None and self.rows[-1].scores[number] >= least

    def leave(self, number: int, depth: int) -> None:
        """Let its last row leave at a ramp, behind ``depth`` layers; all its rows wait there."""
        row = self.rows[-1]
        for one, hidden in zip(self.rows, self.hidden):
            one.depth, one.hidden = depth, hidden
        row.left = number
        self.context.pending.append(row)
        self.found = ExitStep(None, row.tokens[number], number, ())

    def join(self, depth: int) -> None:
        """Take along the rows that wait at a depth."""
        joining = [row for row in self.context.pending if row.depth == depth]
        if joining:
            self.hidden = torch.cat([_stacked(joining), self.hidden])
            self.rows = [*joining, *self.rows]

    def end(self, logits: torch.Tensor) -> None:
        """Note that its rows ran through all layers, with the logits [n, vocab]."""
        self.context.pending = []
        said = logits.argmax(-1).tolist()
        rows = tuple(one.completed(token) for one, token in zip(self.rows, said))
        self.found = ExitStep(logits[-1].numpy().copy(), said[-1], -1, rows)


class HiddenStates(NamedTuple):
    """Of each token of a text: ``hidden``, by depth, as a ramp's head takes it, float32 [n, width]; ``last``: behind
    all layers, as the model's own head takes it; ``said``: what the model says next, int64 [n]."""

    hidden: list[npt.NDArray[np.float32]]
    last: npt.NDArray[np.float32]
    said: npt.NDArray[np.int64]


class ExitStates:
    """Reads hidden states of a model, to make ramps from."""

    def __init__(self, space: ModelSpace, module: Any) -> None:
        """Raises EngineError, with the reason, for a model that tokens cannot leave early."""
        check_exits(space, module)
        self._module, self._parts = module, LayerParts(module)
        self.width = self._parts.width

    @inference
    def read(self, ids: Tokens, depths: Sequence[int]) -> HiddenStates:
        """Run a text from position 0 on; depths ascend."""
        given, at = torch.from_numpy(ids.astype(np.int64)), torch.arange(len(ids))
        cache, hidden = plain_cache(self._module), []
        for start, stop in pairwise((0, *depths, self._parts.count)):
            given = self._parts.run(given, at, cache, start, stop)
            hidden.append(root_mean_square(given).cpu().numpy())
        said = self._parts.logits(given).argmax(-1).numpy()
        return HiddenStates(hidden[:-1], given.float().cpu().numpy(), said)

    @inference
    def head_rows(self, tokens: Tokens) -> npt.NDArray[np.float32]:
        """Return the rows of the model's own head, float32 [n, width], of some tokens."""
        weight = self._module.get_output_embeddings().weight
        if not weight.numel():
            raise EngineError("the model's weights are int8", fix="Calibrate it without int8_weights")
        found: npt.NDArray[np.float32] = weight[torch.from_numpy(tokens.astype(np.int64))].float().cpu().numpy()
        return found


def check_exits(space: ModelSpace, module: Any) -> None:
    """Raise EngineError, with the reason, for a model whose layers do not all keep K and V of all tokens."""
    if space.needs_state or any(type(layer) is not ArenaLayer for layer in new_cache(module).layers):
        raise EngineError(
            "it has recurrent states or sliding windows, in which a token that leaves early would be missing",
            where=space.architecture,
        )


def _stacked(rows: Sequence[PendingRow]) -> torch.Tensor:
    return torch.stack([row.hidden for row in rows if row.hidden is not None])


@contextmanager
def _undone(context: TorchContext) -> Iterator[None]:
    """After a failure inside: let each layer have what it had."""
    lengths = [layer.length for _, layer in context.arena_layers]
    before = [(row, row.depth, row.hidden) for row in context.pending]
    try:
        yield
    except BaseException:
        for (_, layer), length in zip(context.arena_layers, lengths):
            layer.resize(length)
        for row, depth, hidden in before:
            row.depth, row.hidden = depth, hidden
        context.pending = [row for row, _, _ in before]
        raise
