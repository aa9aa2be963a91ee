"""Runs a model a few tokens once: what its layers keep, and whether it continues from a cache as it promises."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch
from transformers import DynamicCache

from ctxreuse.engines.torch_hf.attention import inference
from ctxreuse.engines.torch_hf.space import config_of
from ctxreuse.errors import EngineError

__all__ = ["FILLED", "Forward", "continues", "fill", "first_keys", "plain_cache"]

#: Tokens that `fill` runs.
FILLED = 8
_TOKENS = 12
#: Rounding moves float32 logits by about 1e-6 of their scale; Jamba, which drops its state, by 1e-3.
_TOLERANCE = 5e-5


class Forward:
    """Calls a model's forward with the arguments that it has."""

    def __init__(self, model: Any) -> None:
        if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
            raise EngineError(f"{type(model).__name__} is not a transformers model")
        names = inspect.signature(model.forward).parameters
        # Models of recurrent layers alone (Mamba) have another name for the same cache.
        self._cache = next((name for name in ("past_key_values", "cache_params") if name in names), "")
        if not self._cache or "input_ids" not in names:
            raise EngineError(
                "the model does not take its context as past_key_values or cache_params",
                where=type(model).__name__,
                fix="Causal language models with transformers' Cache are supported",
            )
        places = {str(p.device) for p in model.parameters()}
        if places - {"cpu"}:
            raise EngineError(f"the model is on {', '.join(sorted(places))}", fix="Move it to the CPU: model.to('cpu')")
        self._model = model
        open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names.values())
        # Bamba restarts counting at 0 after a resume unless it is told the positions; every model is.
        self._positions = "position_ids" in names or open_ended
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in names else {}

    def call(self, ids: torch.Tensor, at: int, cache: DynamicCache) -> torch.Tensor:
        """Run int64 ids [S] from position ``at`` on; the cache grows by them. Call inside `torch.inference_mode`."""
        return self.run(ids, torch.arange(at, at + len(ids)), cache)

    @property
    def takes_positions(self) -> bool:
        """True if the model can be told where each token stands."""
        return self._positions

    def run(self, ids: torch.Tensor, positions: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """As `call`, each token at a position [S] of its own."""
        return self._run(ids[None], positions[None], cache)

    def each(self, ids: torch.Tensor, positions: torch.Tensor, cache: DynamicCache) -> None:
        """Run each token alone, as a context of its own; what the layers keep has them in its first axis."""
        self._run(ids[:, None], positions[:, None], cache)

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        options: dict[str, Any] = dict(self._last_only)
        if self._positions:
            options["position_ids"] = positions
        options[self._cache] = cache
        out = self._model(input_ids=ids, use_cache=True, **options)
        logits: torch.Tensor = out.logits[0, -1].float()
        return logits


def plain_cache(model: Any) -> DynamicCache:
    """An empty cache with transformers' own layers."""
    return DynamicCache(config=config_of(model))


def fill(model: Any, forward: Forward, cache: DynamicCache) -> None:
    """Run the probe's tokens (ids 1, 2, …) into a cache."""
    forward.call(_ids(model, FILLED), 0, cache)


def _ids(model: Any, count: int) -> torch.Tensor:
    return torch.arange(1, count + 1) % config_of(model).vocab_size


class _Captured(Exception):
    """Ends a forward with what its first layer was about to keep."""

    def __init__(self, keys: torch.Tensor) -> None:
        super().__init__()
        self.keys = keys


def _capture(key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> NoReturn:
    raise _Captured(key_states)


def first_keys(
    forward: Forward, cache: DynamicCache, ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor | None:
    """K [heads, n, dim] that the first layer would keep of int64 ids [n] at ``positions`` [n]; ``cache`` is spent.

    None if the model cannot be told positions. Call inside `torch.inference_mode`.
    """
    if not forward.takes_positions:
        return None
    cache.layers[0].update = _capture
    try:
        forward.run(ids, positions, cache)
    except _Captured as caught:
        return caught.keys[0]
    return None


@inference
def continues(model: Any, forward: Forward, *, step: bool) -> bool:
    """True if tokens after a cached prefix, together or (``step``) one by one, give what they give without a cache.

    Jamba ignores its recurrent state when more than one token follows; such a model must be fed token by token.
    """
    ids = _ids(model, _TOKENS)
    whole = forward.call(ids, 0, plain_cache(model))
    cache = plain_cache(model)
    part = forward.call(ids[:FILLED], 0, cache)
    # Another context in between: RecurrentGemma keeps its states in the model itself, where they belong to nobody.
    forward.call(ids[1:], 0, plain_cache(model))
    for at in range(FILLED, _TOKENS, 1 if step else _TOKENS):
        part = forward.call(ids[at : at + 1] if step else ids[at:], at, cache)
    return bool((whole - part).abs().max() <= _TOLERANCE * whole.abs().max())
