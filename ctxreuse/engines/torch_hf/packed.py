"""One forward pass over tokens of several contexts: the linear layers see them together, attention one by one.

The weights are read once for all contexts, which is most of what a decoded token costs: SmolLM2 in float32 on 2
cores takes 36 ms for a token of one context and 45 ms for one of each of four.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ctxreuse.engines.torch_hf.inplace.attention import call_of
from ctxreuse.engines.torch_hf.modes import setting
from ctxreuse.errors import EngineError

__all__ = ["WINDOW", "PackedKeys", "check_attended", "is_packing", "packed_cache", "packed_keys", "packing", "seen"]

#: Attribute of an additive mask that hides no more than later tokens, and those before a window: its size, 0 for none.
WINDOW = "_ctxreuse_window"

# transformers hands a model's attention the very tensor that the cache returned; nothing else tells the contexts apart.
_MARK = "_ctxreuse_packed"
_packing: ContextVar[bool] = ContextVar("ctxreuse_packing", default=False)


#: Masks of one pass by queries, keys and window.
_Masks: TypeAlias = dict[tuple[int, int, int | None], torch.Tensor | None]


class _Segment(NamedTuple):
    """One context's part of a layer's call: its tokens are ``start`` to ``stop`` of the pass."""

    start: int
    stop: int
    keys: torch.Tensor
    values: torch.Tensor


class PackedKeys:
    """K and V of all contexts in one layer of a packed pass."""

    def __init__(self, layer: _PackedLayer, segments: Sequence[_Segment]) -> None:
        self._layer, self._segments = layer, segments

    def attend(
        self,
        one: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
        q: torch.Tensor,
        each: Callable[[torch.Tensor, Sequence[tuple[torch.Tensor, torch.Tensor]]], torch.Tensor | None] | None,
    ) -> torch.Tensor:
        """Attention of q [1, H, T, D] -> [1, T, H, D].

        ``one(q, k, v, mask)`` attends for one context; ``each(q [contexts, H, D], [(k, v), ...])`` for those with one
        token, if it can (else None).
        """
        self._layer.pending = False
        plain = [call_of(segment.keys) is None for segment in self._segments]
        single = [one for one, own in zip(self._segments, plain) if own and one.stop - one.start == 1]
        rows = slice(None) if len(single) == q.shape[2] else [segment.start for segment in single]
        found = each(q[0, :, rows].transpose(0, 1), [(s.keys, s.values) for s in single]) if each and single else None
        if found is not None and len(found) == q.shape[2]:
            return found[None]
        out = q.new_empty(1, q.shape[2], q.shape[1], self._segments[0].values.shape[3])
        if found is not None:
            out[0, rows] = found
        for (start, stop, keys, values), own in zip(self._segments, plain):
            if found is None or stop - start > 1 or not own:
                mask = self._layer.mask(stop - start, keys.shape[2], q) if own else None
                out[:, start:stop] = one(q[:, :, start:stop], keys, values, mask)
        return out


def packed_keys(key: torch.Tensor) -> PackedKeys | None:
    """What a cache's K stands for in a packed pass; None in others."""
    found: PackedKeys | None = getattr(key, _MARK, None)
    return found


def _mask(queries: int, keys: int, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
    """The additive mask [1, 1, queries, keys] of a context's last tokens, of the type and device of another tensor.

    None: all of ``keys`` are seen, or torch's own causal mask is right.
    """
    if queries == 1 or (queries == keys and (window is None or keys <= window)):
        return None
    allowed = seen(torch.arange(keys - queries, keys, device=like.device), 0, keys, window)
    made = like.new_zeros(1, 1, queries, keys).masked_fill_(~allowed, float("-inf"))
    setattr(made, WINDOW, window or 0)
    return made


def seen(at: torch.Tensor, first: int, end: int, window: int | None) -> torch.Tensor:
    """Which of the tokens ``first`` to ``end`` those at ``at`` int64 [S] see, bool [S, end - first]."""
    at, key = at[:, None], torch.arange(first, end, device=at.device)[None]
    return key <= at if window is None else (key <= at) & (key > at - window)


class _PackedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of several contexts. ``pending``: the model has not attended to what the last call returned."""

    def __init__(self, layers: Sequence[Any], counts: Sequence[int], masks: _Masks) -> None:
        super().__init__()
        self._layers, self._counts = layers, counts
        self.is_sliding = bool(getattr(layers[0], "is_sliding", False))
        self.window: int | None = int(layers[0].sliding_window) if self.is_sliding else None
        self.is_initialized, self.pending = True, False
        self.sliding_window = self.window
        self._masks = masks

    def mask(self, queries: int, keys: int, like: torch.Tensor) -> torch.Tensor | None:
        """See `_mask`; made once for all layers."""
        what = queries, keys, self.window
        if what not in self._masks:
            self._masks[what] = _mask(*what, like)
        return self._masks[what]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to each context its part of [1, heads, T, dim]; the K returned is marked for `packed_keys`."""
        segments, start = [], 0
        for layer, count in zip(self._layers, self._counts):
            stop = start + count
            k, v = layer.update(key_states.narrow(2, start, count), value_states.narrow(2, start, count))
            segments.append(_Segment(start, stop, k, v))
            start = stop
        keys = key_states[:]
        setattr(keys, _MARK, PackedKeys(self, segments))
        self.pending = True
        return keys, value_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


def packed_cache(caches: Sequence[DynamicCache], counts: Sequence[int]) -> DynamicCache:
    """A cache that appends the first ``counts[0]`` tokens of a pass to the first cache, and so on."""
    found = DynamicCache()
    masks: _Masks = {}
    found.layers = [_PackedLayer(layers, counts, masks) for layers in zip(*(cache.layers for cache in caches))]
    return found


def check_attended(cache: DynamicCache) -> None:
    """After a packed pass: raise EngineError if the model attended to something else than its cache returned."""
    if any(layer.pending for layer in cache.layers):
        raise EngineError("the model changes what its cache gives it, so its contexts run one by one")


def is_packing() -> bool:
    """True inside a packed pass of this thread: attention makes the masks itself."""
    return _packing.get()


def packing() -> AbstractContextManager[None]:
    """Forwards of this thread inside are packed."""
    return setting(_packing, True)
