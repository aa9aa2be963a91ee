"""A card for any model space, made from the blocks of one context: no transform, one group a head, two levels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ctxreuse.block import BlockView
from ctxreuse.codec import (
    Card,
    CardLevel,
    ChannelGroup,
    Codec,
    Coding,
    LevelInfo,
    PlaneCard,
    Shelf,
    model_digest,
    write_card,
)
from ctxreuse.model import ModelSpace
from ctxreuse.testing.cards import spread_tables

__all__ = ["plain_card", "shelved"]

#: Name, step in units of a token's RMS, bits a value as promised.
_LEVELS = (("kl-0.05", 0.5, 3.0), ("kl-0.01", 0.125, 5.0))


def plain_card(space: ModelSpace, views: Sequence[BlockView]) -> Card:
    """A card for the layers with K and V of ``space``, float32; ``views``: raw blocks, and a state if layers slide.

    K is coded as it stands, rotated: no level keeps what its name promises, but all decode to something near.
    """
    planes: list[PlaneCard] = []
    codings: list[list[Coding]] = [[] for _ in _LEVELS]
    for layer, spec in enumerate(space.layers):
        if spec.kind not in ("full", "hybrid", "sliding"):
            continue
        for role, dim in (("k", spec.k_dim), ("v", spec.v_dim)):
            held = [view.array(layer, role) for view in views if (layer, role) in view.layout.index]
            rows = np.concatenate([array.reshape(spec.kv_heads, -1, dim) for array in held], axis=1).astype(np.float32)
            groups = []
            for head in range(spec.kv_heads):
                groups.append(_group(head, rows[head]))
                for coded, (_, step, _) in zip(codings, _LEVELS):
                    coded.append(_coding(groups[-1], rows[head], step))
            planes.append(PlaneCard(layer, "k" if role == "k" else "v", spec.kv_heads, dim, -1, tuple(groups)))
    levels = tuple(
        CardLevel(LevelInfo(name, True, bits, float(name[3:])), step, tuple(coded))
        for (name, step, bits), coded in zip(_LEVELS, codings)
    )
    return Card(model_digest(space), (), tuple(planes), spread_tables(), levels, {"text": "none"})


def shelved(space: ModelSpace, views: Sequence[BlockView], folder: Path) -> Codec:
    """The codec of a `plain_card` that stands on the shelf in ``folder``."""
    shelf = Shelf(folder)
    shelf.add(write_card(plain_card(space, views)))
    return Codec.open(space, shelf)


def _group(head: int, rows: npt.NDArray[np.float32]) -> ChannelGroup:
    channels = rows.shape[1]
    mean = rows.mean(0)
    usual = float(np.sqrt(np.mean((rows - mean) ** 2))) or 1.0
    whole = np.eye(channels, dtype=np.float32)
    gain = np.full(channels, usual / 8128, np.float32)
    basis = (whole * 8128).astype(np.int16)
    return ChannelGroup(head, 1, float(np.log2(usual)), mean, gain, whole / np.float32(usual), basis)


def _coding(group: ChannelGroup, rows: npt.NDArray[np.float32], step: float) -> Coding:
    spread = np.maximum((rows - group.mean).std(0) / 2.0**group.log_rms / step, 0.25)
    shift = np.clip(np.ceil(np.log2(spread / 4)), 0, 8).astype(np.uint8)
    table = np.abs(np.log2(spread / (1 << shift))[:, None] - np.arange(-2, 4)).argmin(1).astype(np.uint8)
    return Coding(table, shift, np.empty(0, np.uint8))
