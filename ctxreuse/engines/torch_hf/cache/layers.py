"""Cache layers that transformers' models write into: arena-backed full attention, windows with slack, linear states."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from ctxreuse.engines.torch_hf.chunks.scatter import active
from ctxreuse.engines.torch_hf.inplace.attention import InPlaceLayer

__all__ = ["ArenaLayer", "FullWindowLayer", "HybridLayer", "HybridWindowLayer", "WindowLayer"]


class ArenaLayer(DynamicLayer):  # type: ignore[misc]
    """K and V of all tokens, appended in place in arena planes [1, heads, capacity, dim].

    The owner binds planes large enough *before* a forward; `update` never moves what is there. ``ready`` returns when
    the part that is being loaded is complete, or raises; an instance attribute replaces it during a load.
    """

    def ready(self) -> None:
        """Nothing is being loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.in_place: InPlaceLayer | None = None  # attached runs; ``length`` counts own rows then
        self._k: torch.Tensor | None = None
        self._v: torch.Tensor | None = None

    def bind(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Use these planes from now on, after copying what the old ones hold."""
        if self._k is not None and self._v is not None and self.length:
            k[:, :, : self.length] = self._k[:, :, : self.length]
            v[:, :, : self.length] = self._v[:, :, : self.length]
        self.adopt(k, v, self.length)

    def adopt(self, k: torch.Tensor, v: torch.Tensor, n: int) -> None:
        """Use these planes from now on, with the ``n`` tokens that they hold."""
        self._k, self._v = k, v
        self.dtype, self.device = k.dtype, k.device
        self.resize(n)
        self.is_initialized = True

    def unbind(self) -> None:
        """Hold nothing, in no planes."""
        self._k = self._v = None
        self.keys = self.values = torch.empty(0)
        self.length = 0

    def keep(self, rows: torch.Tensor) -> None:
        """Move these rows, int64 [n], to the front, in their order."""
        assert self._k is not None
        assert self._v is not None
        for plane in (self._k, self._v):
            plane[:, :, : len(rows)] = plane.index_select(2, rows.to(plane.device))

    def resize(self, n: int) -> None:
        """Let the layer hold the first ``n`` tokens of its planes."""
        if self._k is None and n == 0:
            return
        assert self._k is not None
        assert self._v is not None
        self.length = n
        self.keys, self.values = self._k.narrow(2, 0, n), self._v.narrow(2, 0, n)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("an arena layer is bound by its context before it is used")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [1, heads, S, dim] and return views of all tokens.

        In a scattered forward: write each to its own row and return views of the rows up to the last of them.
        """
        self.ready()
        scatter = active()
        if self.in_place is not None:
            assert self._k is not None
            assert self._v is not None
            return self.in_place.update(self, key_states, value_states, self._k, self._v)
        if scatter is not None:
            self.resize(max(self.length, scatter.end))
            if scatter.drift is not None:
                scatter.drift.correct(self, key_states, value_states)
            scatter.write(self.keys, key_states)
            scatter.write(self.values, value_states)
            return self.keys[:, :, : scatter.end], self.values[:, :, : scatter.end]
        n, count = self.length, key_states.shape[-2]
        self.resize(n + count)
        self.keys.narrow(2, n, count).copy_(key_states)
        self.values.narrow(2, n, count).copy_(value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length if self.in_place is None else self.in_place.n

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        scatter = active()
        return (self.get_seq_length() + query_length if scatter is None else scatter.end), 0


class FullWindowLayer(ArenaLayer):
    """A sliding-window layer that keeps all tokens, so that any can be relocated; a forward sees its windows."""

    is_sliding = True

    def __init__(self, sliding_window: int) -> None:
        super().__init__()
        self.sliding_window = sliding_window

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `ArenaLayer.update`; returns views from the first row that one of the new tokens sees."""
        low = self._low()
        k, v = super().update(key_states, value_states)
        if self.in_place is not None:
            return k, v  # which knows about windows itself
        return k[:, :, low:], v[:, :, low:]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        low, (length, _) = self._low(), super().get_mask_sizes(query_length)
        return length - low, low

    def _low(self) -> int:
        scatter = active()
        if self.in_place is not None:
            return 0
        first = self.length if scatter is None else scatter.first
        return max(first - self.sliding_window + 1, 0)


class WindowLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """K and V of the last ``window - 1`` tokens, in a buffer with slack so that a token is appended in place.

    Older tokens stay until the slack is used up; so the window *before* an earlier position can still be cut out, and
    no forward must be split to take a snapshot at a block boundary (transformers' own layer copies the whole window for
    every token and forgets the rest).
    """

    #: Least room behind the window, in tokens: the window moves to the front once in so many decoded tokens.
    SLACK = 512

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self._k: torch.Tensor | None = None
        self._v: torch.Tensor | None = None
        self.cumulative_length: int = 0
        self._from: int = 0  # position of the token in the buffer's first row
        self.floor: int = 0  # position that the window began at, empty

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [1, heads, S, dim]; returns views of the ``window - 1`` tokens before them and themselves."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        n, m = self.cumulative_length, self.cumulative_length + key_states.shape[-2]
        past = self.past(n)
        k, v = self._room(key_states, value_states, past)
        at, end = n - self._from, m - self._from
        k[:, :, at:end] = key_states
        v[:, :, at:end] = value_states
        self.cumulative_length = m
        self._show()
        return k[:, :, at - past : end], v[:, :, at - past : end]

    def _room(self, new_k: torch.Tensor, new_v: torch.Tensor, past: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers, with room for the new tokens behind the ``past`` that they see."""
        filled, need = self.cumulative_length - self._from, past + new_k.shape[-2]
        if self._k is not None and self._v is not None and filled + new_k.shape[-2] <= self._k.shape[2]:
            return self._k, self._v
        full = self.sliding_window - 1 + self.SLACK
        size = max(need, min(2 * need, full))
        grown = []
        for old, new in ((self._k, new_k), (self._v, new_v)):
            keep = None if old is None else old[:, :, filled - past : filled]
            if old is not None and keep is not None and old.shape[2] >= size:
                old[:, :, :past] = keep.clone()
                grown.append(old)
                continue
            room = new.new_empty(1, new.shape[1], size, new.shape[3])
            if keep is not None:
                room[:, :, :past] = keep
            grown.append(room)
        self._k, self._v = grown
        self._from = self.cumulative_length - past
        return self._k, self._v

    def _show(self) -> None:
        assert self._k is not None
        assert self._v is not None
        end = self.cumulative_length - self._from
        start = end - self.past(self.cumulative_length)
        self.keys, self.values = self._k[:, :, start:end], self._v[:, :, start:end]

    def truncate(self, n: int) -> bool:
        """Forget all after position ``n``; False, and no change, if its window is gone."""
        if not self.holds(n):
            return False
        self.cumulative_length = n
        if self.is_initialized:
            self._show()
        return True

    def holds(self, n: int) -> bool:
        """True if the window before position ``n`` is in the buffer."""
        return self.floor <= n <= self.cumulative_length and n - self.past(n) >= self._from

    def short(self, n: int) -> bool:
        """True if the window before position ``n`` is incomplete, because it began empty not far before."""
        return self.past(n) < min(n, int(self.sliding_window) - 1)

    def window(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V [heads, min(n, window - 1), dim] before position ``n``; `holds` must be true."""
        assert self._k is not None
        assert self._v is not None
        end = n - self._from
        start = end - self.past(n)
        return self._k[0, :, start:end].clone(), self._v[0, :, start:end].clone()

    def restore(self, k: torch.Tensor, v: torch.Tensor, n: int) -> None:
        """Hold just the window before position ``n``: K and V [heads, min(n, window - 1), dim], copied."""
        self.clear()
        self.lazy_initialization(k, v)
        self._from = self.cumulative_length = n - k.shape[1]
        self._room(k[None], v[None], 0)
        assert self._k is not None
        assert self._v is not None
        self._k[0, :, : k.shape[1]], self._v[0, :, : v.shape[1]] = k, v
        self.cumulative_length = n
        self._show()

    def clear(self) -> None:
        """Back to position 0."""
        self.keys = self.values = self._k = self._v = None
        self.cumulative_length = self._from = self.floor = 0
        self.is_initialized = False

    def begin(self, n: int) -> None:
        """Be empty at position ``n``: what comes there sees nothing before it."""
        self.clear()
        self.cumulative_length = self._from = self.floor = n

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        past = self.past(self.cumulative_length)
        return past + query_length, self.cumulative_length - past

    def past(self, n: int) -> int:
        """How many tokens before position ``n`` are in the window there."""
        return min(n - self.floor, int(self.sliding_window) - 1)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self._k, self._v) if t is not None)


class HybridLayer(LinearAttentionAndFullAttentionLayer, ArenaLayer):  # type: ignore[misc]
    """Full attention and linear states side by side in one layer (FalconH1, Zamba2).

    transformers finds the layer whose length a causal mask must have by the class above.
    """

    def __init__(self, number_of_states: int = 1) -> None:
        ArenaLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        # transformers calls it by keyword for linear states; the attention part is bound by the context.
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    def adopt(self, k: torch.Tensor, v: torch.Tensor, n: int) -> None:
        # ArenaLayer.adopt sets dtype and device, which the linear part takes from its first state.
        dtype, device = self.dtype, self.device
        ArenaLayer.adopt(self, k, v, n)
        self.dtype, self.device = dtype, device


class HybridWindowLayer(LinearAttentionLayer, WindowLayer):  # type: ignore[misc]
    """A window and linear states side by side in one layer (Zaya)."""

    is_compileable = False

    def __init__(self, sliding_window: int, number_of_states: int = 1) -> None:
        WindowLayer.__init__(self, sliding_window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        # transformers calls it by keyword for linear states.
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)
        else:
            WindowLayer.lazy_initialization(self, *args)
