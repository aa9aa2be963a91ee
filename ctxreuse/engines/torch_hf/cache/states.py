"""States: what windows and linear layers hold at one position, cut out of a cache and put back bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from ctxreuse.block.format import BlockView, Layout, Plane, layout_of
from ctxreuse.block.levels import EXACT
from ctxreuse.dtypes import FLOATS
from ctxreuse.engines.torch_hf.cache.layers import WindowLayer
from ctxreuse.errors import FormatError

__all__ = ["DTYPES", "Snapshot", "begin", "capture", "clear_states", "fits", "read_state", "restore"]

#: The numeric types that a model may have, by the names that a model space uses.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in FLOATS}
_NAMES = {kind: name for name, kind in DTYPES.items()}


class Snapshot:
    """Copies of all states at ``position``: ``planes[layer, role]`` as tensors, ``flags`` as small whole numbers.

    ``level``: ``exact``, or ``approx~…`` if they were decoded from, or computed on top of, something lossy.
    """

    __slots__ = ("flags", "level", "planes", "position")

    def __init__(
        self, position: int, planes: dict[tuple[int, str], torch.Tensor], flags: dict[str, int], level: str = EXACT
    ) -> None:
        self.position, self.planes, self.flags, self.level = position, planes, flags, level

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.planes.values())

    @property
    def layout(self) -> Layout:
        """The planes of the sealed state, in layer order."""
        return layout_of(
            tuple(Plane(layer, role, _NAMES[t.dtype], tuple(t.shape)) for (layer, role), t in self.planes.items())
        )


def _linear(layer: Any) -> bool:
    return isinstance(layer, LinearAttentionLayer)


def capture(cache: DynamicCache, position: int, level: str = EXACT) -> Snapshot:
    """Copy the states at ``position``: the cache's own end, or an earlier one if there are windows only."""
    planes: dict[tuple[int, str], torch.Tensor] = {}
    flags: dict[str, int] = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, WindowLayer):
            planes[index, "k"], planes[index, "v"] = layer.window(position)
        if _linear(layer):
            for s in range(layer.number_of_states):
                if layer.is_conv_states_initialized[s]:
                    planes[index, f"conv{s}"] = layer.conv_states[s].clone()
                if layer.is_recurrent_states_initialized[s]:
                    planes[index, f"recurrent{s}"] = layer.recurrent_states[s].clone()
                flags[f"{index}.{s}"] = int(layer.has_previous_state[s])
    return Snapshot(position, planes, flags, level)


def clear_states(cache: DynamicCache) -> None:
    """Put all windows and linear layers back to position 0."""
    for layer in cache.layers:
        if isinstance(layer, WindowLayer):
            layer.clear()
        if _linear(layer):
            LinearAttentionLayer.__init__(layer, number_of_states=layer.number_of_states)


def begin(cache: DynamicCache, position: int) -> None:
    """Let all windows and linear layers be empty at ``position``: nothing before it is in them."""
    clear_states(cache)
    for layer in cache.layers:
        if isinstance(layer, WindowLayer):
            layer.begin(position)


def restore(cache: DynamicCache, snapshot: Snapshot) -> None:
    """Put all windows and linear layers where they were at the snapshot; it stays usable."""
    clear_states(cache)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, WindowLayer):
            layer.restore(snapshot.planes[index, "k"], snapshot.planes[index, "v"], snapshot.position)
        if _linear(layer):
            for s in range(layer.number_of_states):
                conv, recurrent = (snapshot.planes.get((index, f"{name}{s}")) for name in ("conv", "recurrent"))
                if conv is not None:
                    layer.update_conv_state(conv, state_idx=s, conv_kernel_size=conv.shape[-1])
                if recurrent is not None:
                    layer.update_recurrent_state(recurrent, state_idx=s)
                layer.has_previous_state[s] = bool(snapshot.flags[f"{index}.{s}"])


def fits(view: BlockView, probe: Snapshot, windows: dict[int, int]) -> bool:
    """True if the planes and flags of a sealed state are those this model has at the view's position.

    ``probe`` is any snapshot of the model, ``windows`` the window of each sliding layer.
    """
    expected = []
    for (layer, role), tensor in probe.planes.items():
        shape = list(tensor.shape)
        if layer in windows and role in ("k", "v"):
            shape[1] = min(windows[layer] - 1, view.header.end)
        expected.append(Plane(layer, role, _NAMES[tensor.dtype], tuple(shape)))
    flags = view.header.extra
    return (
        tuple(expected) == view.layout.planes and flags.keys() == probe.flags.keys() and set(flags.values()) <= {0, 1}
    )


def read_state(view: BlockView, device: torch.device) -> Snapshot:
    """A sealed state as a snapshot of its own memory on ``device``; raises FormatError if a plane is corrupt."""
    planes = {}
    for plane in view.layout.planes:
        # The view's memory is read-only, and torch warns of it: copy the bytes first.
        raw = bytearray(view.plane(plane.layer, plane.role))
        if plane.dtype not in DTYPES:
            raise FormatError(f"state plane of type {plane.dtype}")
        tensor = torch.frombuffer(raw, dtype=DTYPES[plane.dtype]) if raw else torch.empty(0, dtype=DTYPES[plane.dtype])
        planes[plane.layer, plane.role] = tensor.view(plane.shape).to(device)
    return Snapshot(view.header.end, planes, dict(view.header.extra), view.header.level)
