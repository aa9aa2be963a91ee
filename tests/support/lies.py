"""Blocks with right checksums over wrong numbers: what a lying peer sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView, BlockWriter, parse
from ctxreuse.identity.keys import Tokens

__all__ = ["Lie", "forged", "lies", "untouched"]

#: Changes the planes of one block, by (layer, role), float32 [heads, tokens, dim], in place; told the block's number.
Lie = Callable[[int, dict[tuple[int, str], npt.NDArray[np.float32]]], None]


def untouched(number: int, planes: dict[tuple[int, str], npt.NDArray[np.float32]]) -> None:
    """No lie at all."""


def forged(data: Any, lie: Lie = untouched, number: int = 0, tokens: Tokens | None = None) -> npt.NDArray[np.uint8]:
    """The block with what ``lie`` makes of its numbers, sealed again."""
    view: BlockView = parse(data)
    header = view.header
    writer = BlockWriter(
        view.layout,
        kind=header.kind,
        space=header.space,
        key=header.key,
        parent=header.parent,
        end=header.end,
        tokens=view.tokens if tokens is None else tokens,
        level=header.level,
        rope_at=header.rope_at,
        extra=dict(header.extra),
    )
    planes = {}
    for plane in view.layout.planes:
        target = writer.plane(plane.layer, plane.role)
        target[:] = np.frombuffer(view.plane(plane.layer, plane.role), np.uint8)
        if plane.dtype == "float32":
            planes[plane.layer, plane.role] = target.view(np.float32).reshape(plane.shape)
    lie(number, planes)
    return writer.seal()


def lies(layers: int, blocks: int, size: int, seed: int) -> dict[str, Lie]:
    """Lies about a run of ``blocks`` blocks of ``size`` tokens with K and V in ``layers`` layers, by name.

    Rows that only some of a layer lie in are never in the last layer, where nothing but themselves would show it.
    """
    rng = np.random.default_rng(seed)
    deep = max(layers - 2, 0)
    total = blocks * size
    some = {share: rng.choice(total, max(1, round(total * share)), replace=False) for share in (0.1, 0.01)}

    def scaled(number: int, planes: Any) -> None:
        planes[_layer(planes, deep), "v"] *= 1.5

    def noisy(number: int, planes: Any) -> None:
        plane = planes[_layer(planes, deep), "k"]
        plane = plane if plane.any() else planes[_layer(planes, deep), "v"]  # a tiny Zaya has no K to speak of
        plane += 0.01 * np.sqrt((plane**2).mean()) * rng.standard_normal(plane.shape).astype(np.float32)

    def first(number: int, planes: Any) -> None:
        planes[_layer(planes, 0), "v"] *= 1.5

    def last(number: int, planes: Any) -> None:
        planes[_layer(planes, layers - 1), "v"] *= 1.5

    def rows(share: float) -> Lie:
        def change(number: int, planes: Any) -> None:
            chosen = [row - number * size for row in some[share] if row // size == number]
            planes[_layer(planes, deep), "v"][:, chosen] *= 1.5

        return change

    return {
        "V of a deep layer x1.5": scaled,
        "1 % noise on K of one layer": noisy,
        "V of the first layer x1.5": first,
        "V of the last layer x1.5": last,
        "10 % of the rows of a layer": rows(0.1),
        "1 % of the rows of a layer": rows(0.01),
    }


def _layer(planes: dict[tuple[int, str], Any], nth: int) -> int:
    """The ``nth`` layer that has planes."""
    return sorted({layer for layer, _ in planes})[nth]
