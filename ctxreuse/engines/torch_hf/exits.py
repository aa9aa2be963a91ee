"""Tokens that leave a torch model early: its layers in parts, and how passes that end early run on them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from ctxreuse.cuda import exit_scores
from ctxreuse.engines.base import Logits
from ctxreuse.engines.early import EarlyPasses, Lane, ramp_tops
from ctxreuse.engines.exits import ExitStep, HiddenStates
from ctxreuse.engines.torch_hf.cache.layers import ArenaLayer
from ctxreuse.engines.torch_hf.context import TorchContext
from ctxreuse.engines.torch_hf.model import TorchModel, plain_cache
from ctxreuse.engines.torch_hf.modes import by_kernels, inference
from ctxreuse.engines.torch_hf.packed import check_attended, packed_cache, packing
from ctxreuse.engines.torch_hf.space import new_cache
from ctxreuse.errors import EngineError
from ctxreuse.exits import ExitPlan
from ctxreuse.exits.profile import ExitProfile
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace

__all__ = ["LayerParts", "TorchExitStates", "TorchExits", "check_exits"]

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


class TorchExits(EarlyPasses[TorchContext]):
    """See `EarlyPasses`: contexts have no load in flight and no attached runs, and the model packs several."""

    def __init__(self, model: TorchModel, profile: ExitProfile) -> None:
        """Raises EngineError, with the reason, for a model that tokens cannot leave early."""
        check_exits(model.space, model.module)
        self._model, self._parts = model, LayerParts(model.module)
        if profile.width != self._parts.width:
            raise EngineError("the exit profile has no ramps of this model", where=model.space.architecture)
        super().__init__(profile, self._parts.layer_bytes, self._parts.head_bytes, _ROW)
        #: Heads of ramps on the device, as float32: codes, scales, bias.
        self._heads: dict[int, list[torch.Tensor]] = {}
        model.complete = self.complete

    @inference
    def _step(self, batch: Sequence[tuple[TorchContext, Tokens, ExitPlan]]) -> list[ExitStep]:
        return super()._step(batch)

    @inference
    def complete(self, context: TorchContext) -> None:
        """See `EarlyPasses.complete`."""
        super().complete(context)

    def _begun(self, ids: Tokens) -> torch.Tensor:
        return torch.from_numpy(ids.astype(np.int64))

    def _stacked(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(hidden))

    def _joined(self, before: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([before, hidden])

    def _advance(self, lanes: Sequence[Lane[TorchContext]], at: int, stop: int) -> None:
        counts = [len(lane.rows) for lane in lanes]
        given = torch.cat([lane.hidden for lane in lanes])
        positions = torch.cat([torch.arange(lane.first, lane.last + 1) for lane in lanes])
        if len(lanes) == 1:
            with by_kernels(len(given) > 1):
                given = self._parts.run(given, positions, lanes[0].context.cache, at, stop)
        else:
            cache = packed_cache([lane.context.cache for lane in lanes], counts)
            with packing():
                given = self._parts.run(given, positions, cache, at, stop)
            check_attended(cache)
        for lane, hidden in zip(lanes, given.split(counts)):
            lane.hidden = hidden

    def _logits(self, lanes: Sequence[Lane[TorchContext]]) -> list[Logits]:
        counts = [len(lane.rows) for lane in lanes]
        with by_kernels(sum(counts) > 1):
            logits = self._parts.logits(torch.cat([lane.hidden for lane in lanes]))
        return [own.numpy() for own in logits.split(counts)]

    def _tops(
        self, number: int, lanes: Sequence[Lane[TorchContext]], chosen: Sequence[int]
    ) -> tuple[list[float], list[int]]:
        given = root_mean_square(torch.cat([lane.hidden for lane in lanes])[list(chosen)])
        if given.is_cpu:
            return ramp_tops(self._ramps[number], given.numpy(), torch.get_num_threads())
        return self._on_device(number, given)

    def _on_device(self, number: int, given: torch.Tensor) -> tuple[list[float], list[int]]:
        """As `ramp_tops`, where the states lie."""
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

    @contextmanager
    def _undone(self, context: TorchContext) -> Iterator[None]:
        lengths = [layer.length for _, layer in context.arena_layers]
        try:
            with super()._undone(context):
                yield
        except BaseException:
            for (_, layer), length in zip(context.arena_layers, lengths):
                layer.resize(length)
            raise


class TorchExitStates:
    """See `ExitStates`."""

    def __init__(self, space: ModelSpace, module: Any) -> None:
        """Raises EngineError, with the reason, for a model that tokens cannot leave early."""
        check_exits(space, module)
        self._module, self._parts = module, LayerParts(module)
        self.width = self._parts.width

    @inference
    def read(self, ids: Tokens, depths: Sequence[int]) -> HiddenStates:
        """See `ExitStates.read`."""
        given, at = torch.from_numpy(ids.astype(np.int64)), torch.arange(len(ids))
        cache, hidden = plain_cache(self._module), []
        for start, stop in pairwise((0, *depths, self._parts.count)):
            given = self._parts.run(given, at, cache, start, stop)
            hidden.append(root_mean_square(given).cpu().numpy())
        said = self._parts.logits(given).argmax(-1).numpy()
        return HiddenStates(hidden[:-1], given.float().cpu().numpy(), said)

    @inference
    def head_rows(self, tokens: Tokens) -> npt.NDArray[np.float32]:
        """See `ExitStates.head_rows`."""
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
