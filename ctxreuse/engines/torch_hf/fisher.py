"""TorchGauge: K and V of a text, their gradients, and scores on changed K and V, for any Hugging Face causal model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from ctxreuse.engines.base import check_length, check_vocabulary
from ctxreuse.engines.calibration import Planes, Prefix
from ctxreuse.engines.torch_hf.chunks.rotary import learn
from ctxreuse.engines.torch_hf.engine import TorchEngine
from ctxreuse.engines.torch_hf.model import Forward, plain_cache
from ctxreuse.errors import EngineError
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace
from ctxreuse.rope import Rotary

__all__ = ["TorchCalibrationModel", "TorchPrefix"]


class TorchPrefix:
    """See `ctxreuse.engines.calibration.Prefix`; holds the cache that the model filled, unchanged."""

    def __init__(self, cache: DynamicCache, n: int, layers: tuple[int, ...]) -> None:
        self.cache, self.n, self.layers = cache, n, layers

    @property
    def planes(self) -> Planes:
        """See `Prefix.planes`; views of the cache, valid as long as the reading."""
        planes = {}
        for layer in self.layers:
            part = self.cache.layers[layer]
            planes[layer, "k"], planes[layer, "v"] = part.keys[0].float().numpy(), part.values[0].float().numpy()
        return planes


class TorchCalibrationModel:
    """See `ctxreuse.engines.calibration.CalibrationModel`. Shares the model with the engine, which may be used in
    between."""

    def __init__(self, engine: TorchEngine) -> None:
        self.space: ModelSpace = engine.space
        self._model = engine.model
        self._forward = Forward(engine.model)
        self._layers = tuple(i for i, spec in enumerate(self.space.layers) if spec.kv_heads)
        if not self._layers:
            raise EngineError("no layer keeps K and V", where=self.space.architecture, fix="Nothing to calibrate")
        for parameter in engine.model.parameters():
            parameter.requires_grad_(False)

    def rotaries(self) -> dict[int, Rotary]:
        """See `CalibrationModel.rotaries`."""
        return learn(self._model, self._forward, self.space.max_tokens)

    def read(self, tokens: Tokens) -> TorchPrefix:
        """See `CalibrationModel.read`."""
        check_vocabulary(self.space, tokens)
        check_length(self.space, len(tokens))
        cache = plain_cache(self._model)
        with torch.no_grad():
            self._forward.call(torch.from_numpy(tokens.astype(np.int64)), 0, cache)
        return TorchPrefix(cache, len(tokens), self._layers)

    def _own(self, reading: Prefix) -> TorchPrefix:
        if not isinstance(reading, TorchPrefix):
            raise EngineError(
                f"a {type(reading).__name__} is no reading of this engine", fix="Use one that read() gave"
            )
        return reading

    def _logits(self, cache: DynamicCache, at: int, following: Tokens) -> torch.Tensor:
        """Log probabilities [S, vocab] after each token."""
        check_vocabulary(self.space, following)
        check_length(self.space, at + len(following))
        options: dict[str, Any] = {}
        if self._forward.takes_positions:
            options["position_ids"] = torch.arange(at, at + len(following))[None]
        ids = torch.from_numpy(following.astype(np.int64))[None]
        out = self._model(input_ids=ids, past_key_values=cache, use_cache=True, **options)
        return torch.log_softmax(out.logits[0].float(), -1)

    def gradients(self, reading: Prefix, following: Tokens, seed: int) -> Planes:
        """See `CalibrationModel.gradients`."""
        own = self._own(reading)
        with torch.enable_grad():
            cache = _changed(own, lambda layer, role, plane: plane.requires_grad_())
            leaves = {(i, r): getattr(cache.layers[i], n) for i in self._layers for r, n in _NAMES}
            scores = self._logits(cache, own.n, following)
            # d/dlogits of sum(w * scores) is w - p sum(w): with w = sqrt(p) * noise its covariance is diag(p) - pp',
            # the Fisher information of the logits, as for tokens drawn from p, but without their rare large values.
            noise = torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed))
            weights = (scores.detach() / 2).exp() * noise
            try:
                (weights * scores).sum().backward()
            except RuntimeError as error:
                raise EngineError(
                    f"the model has no gradients: {error}", where=self.space.architecture, fix="It cannot be calibrated"
                ) from error
        return {at: leaf.grad[0].float().numpy() for at, leaf in leaves.items()}

    def scores(self, reading: Prefix, following: Tokens, planes: Planes | None = None) -> npt.NDArray[np.float32]:
        """See `CalibrationModel.scores`."""
        own = self._own(reading)

        def replace(layer: int, role: str, plane: torch.Tensor) -> torch.Tensor:
            if planes is None:
                return plane
            return torch.from_numpy(np.ascontiguousarray(planes[layer, role]))[None].to(plane.dtype)

        with torch.no_grad():
            result: npt.NDArray[np.float32] = self._logits(_changed(own, replace), own.n, following).numpy()
        return result


_NAMES = (("k", "keys"), ("v", "values"))


def _changed(reading: TorchPrefix, change: Callable[[int, str, torch.Tensor], torch.Tensor]) -> DynamicCache:
    """A copy of the reading's cache with other K and V."""
    cache = copy.deepcopy(reading.cache)
    for index in reading.layers:
        for role, name in _NAMES:
            setattr(cache.layers[index], name, change(index, role, getattr(cache.layers[index], name)))
    return cache
