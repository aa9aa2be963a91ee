"""How each layer of a model rotates its K, learnt from the model's own rotary embedding and verified on its K."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ctxreuse.engines.torch_hf.model import Forward, plain_cache
from ctxreuse.engines.torch_hf.modes import inference
from ctxreuse.engines.torch_hf.space import config_of
from ctxreuse.rope import Rotary

__all__ = ["learn"]

#: A wrong frequency, style or dimension moves K by its own length; rounding by a few units of the last place.
_TOLERANCE, _PLACES = 1e-3, 8
_CHECKED = (0, 1, 2, 5, 37, 300)


@inference
def learn(model: Any, forward: Forward, positions: int) -> dict[int, Rotary]:
    """The rotary of every layer that keeps K; ``positions`` is how many tokens the model takes.

    One token alone attends to itself only, wherever it stands: so K of *every* layer is the same vector at every
    position once it is rotated back, and the first rotary of the model for which that holds is the layer's.
    """
    places = [p for p in _CHECKED if p < positions]
    alone = _alone(model, forward, places)
    found = list(_candidates(model, positions))
    tolerance = max(_TOLERANCE, _PLACES * torch.finfo(model.dtype).eps)
    result = {}
    for layer, rows in alone.items():
        choices = [Rotary("none"), *(r for r in found if 2 * len(r.inv_freq) <= rows.shape[-1])]
        fits = (r for r in choices if _holds(r, places, rows, tolerance))
        result[layer] = next(fits, Rotary("none"))
    return result


def _alone(model: Any, forward: Forward, places: list[int]) -> dict[int, npt.NDArray[np.float32]]:
    """K [heads, places, dim] of all attention layers for one token at each of the positions, in one forward."""
    cache = plain_cache(model)
    positions = places if forward.takes_positions else [0] * len(places)
    forward.each(torch.full((len(places),), 1 % config_of(model).vocab_size), torch.tensor(positions), cache)
    kept = {i: getattr(layer, "keys", None) for i, layer in enumerate(cache.layers)}
    return {i: k[:, :, 0].transpose(0, 1).float().cpu().numpy() for i, k in kept.items() if k is not None and k.numel()}


def _holds(rotary: Rotary, places: list[int], rows: npt.NDArray[np.float32], tolerance: float) -> bool:
    back = rotary.rotate(rows, np.array(places), undo=True)
    first = back[:, :1]
    return bool(np.abs(back - first).max() <= tolerance * np.abs(first).max())


def _candidates(model: Any, positions: int) -> Iterator[Rotary]:
    """Rotaries that the model's modules compute, each in both styles."""
    seen = set()
    types = dict.fromkeys(getattr(config_of(model), "layer_types", None) or ())
    for module in model.modules():
        names = inspect.signature(module.forward).parameters if "Rotary" in type(module).__name__ else {}
        if "position_ids" not in names:
            continue
        for kind in types if "layer_type" in names else (None,):
            rotary = _evaluate(module, kind, positions)
            if rotary is not None and rotary not in seen:
                seen.add(rotary)
                yield rotary
                yield Rotary("pairs", rotary.inv_freq, rotary.scale)


def _evaluate(module: Any, kind: str | None, positions: int) -> Rotary | None:
    """Frequencies and length from cos and sin at powers of two, or None if the module gives something else.

    The model's float32 product of frequency and position is exact there, and each step doubles the precision.
    """
    places = [0, *(1 << b for b in range(max(positions - 1, 1).bit_length()) if 1 << b < positions)]
    where = next((one.device for one in module.buffers()), None)
    given = torch.zeros(1, 1, 1, device=where), torch.tensor([places], device=where)
    arguments = (*given, *(() if kind is None else (kind,)))
    try:
        out = module(*arguments)
    except (KeyError, AttributeError, TypeError):  # a layer type that has no rotary of its own
        return None
    if not (isinstance(out, tuple) and len(out) == 2 and out[0].shape == out[1].shape and out[0].ndim == 3):
        return None
    cos, sin = (part[0].double().cpu().numpy() for part in out)
    half = cos.shape[1] // 2
    # Both layouts of cos and sin occur: [f0 f1 … f0 f1 …] and [f0 f0 f1 f1 …].
    columns = slice(0, half) if np.array_equal(cos[:, :half], cos[:, half:]) else slice(0, None, 2)
    cos, sin = cos[:, columns], sin[:, columns]
    scale = float(cos[0].mean())
    if not scale > 0 or len(places) < 2:
        return None
    phase = np.arctan2(sin, cos)
    frequency = phase[1]
    for row, place in zip(phase[2:], places[2:]):
        frequency = (row + 2 * np.pi * np.rint((frequency * place - row) / (2 * np.pi))) / place
    # Models keep their frequencies in float32: rounding to it gives the very number.
    return Rotary("half", tuple(float(f) for f in frequency.astype(np.float32)), float(np.float32(scale)))
