"""A card for any small model, without calibration: means and spreads of its own K and V, and no transform."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ctxreuse.block import BlockView
from ctxreuse.codec import Card, CardLevel, ChannelGroup, Coding, LevelInfo, PlaneCard, Rope, model_digest
from ctxreuse.codec.planes import from_bits
from ctxreuse.kernels import rope_shift, shift_tables
from ctxreuse.model import ModelSpace

__all__ = ["LEVELS", "plain_card"]

#: Names and steps, in typical deviations of a component: the third refines the first.
LEVELS: Mapping[str, float] = {"kl-0.05": 0.9, "kl-0.01": 0.45, "kl-0.008": 0.3}
_SIGMAS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)

Floats = npt.NDArray[np.float32]


def plain_card(space: ModelSpace, blocks: Sequence[BlockView], *, theta: Callable[[int], float]) -> Card:
    """A card whose levels `LEVELS` can be made and read; what they do to answers is not known, as nothing was measured.

    ``blocks``: exact blocks of the model, whose K is rotated by halves with base ``theta(layer)``. Layers that have no
    planes in blocks get none here.
    """
    ropes: list[Rope] = []
    planes: list[PlaneCard] = []
    codings: dict[str, list[Coding]] = {name: [] for name in LEVELS}
    steps = {name: np.float32(step) for name, step in LEVELS.items()}
    steps["kl-0.05"] = np.float32(3) * steps["kl-0.008"]
    for plane in blocks[0].layout.planes:
        heads, _, dim = plane.shape
        rope = -1
        if plane.role == "k":
            rope = len(ropes)
            ropes.append(Rope("half", theta(plane.layer) ** (-np.arange(dim // 2) * 2.0 / dim)))
        x = np.concatenate([_rows(space, view, plane.layer, plane.role, ropes[rope]) for view in blocks])
        mean = x.mean(0)
        rms = np.sqrt(((x - mean) ** 2).mean(1))
        typical = float(np.log2(rms.mean()))
        sigma = ((x - mean) / (rms / 2**typical)[:, None]).std(0)
        order = np.argsort(-sigma)
        eye = np.eye(heads * dim)[order]
        scale = float(np.median(sigma))
        gain = np.full(heads * dim, scale / 8191, np.float32)
        group = ChannelGroup(
            0,
            heads,
            typical,
            mean.astype(np.float32),
            gain,
            (eye / scale).astype(np.float32),
            np.rint(eye * 8191).astype(np.int16),
        )
        planes.append(PlaneCard(plane.layer, plane.role, heads, dim, rope, (group,)))  # type: ignore[arg-type]
        for name, step in steps.items():
            wide = sigma[order] / scale / step
            shift = np.clip(np.ceil(np.log2(wide / 4)), 0, 8).astype(np.uint8)
            table = np.abs(np.log2(wide / (1 << shift.astype(int)))[:, None] - np.log2(_SIGMAS)).argmin(1)
            base = len(table) if name == "kl-0.008" else 0
            codings[name].append(Coding(table.astype(np.uint8), shift, np.full(base, len(_SIGMAS), np.uint8)))
    bits = {"kl-0.05": 2.5, "kl-0.01": 3.5, "kl-0.008": 4.0}
    levels = tuple(
        CardLevel(
            LevelInfo(name, True, bits[name], float(name[3:]), base="kl-0.05" if name == "kl-0.008" else ""),
            float(step),
            tuple(codings[name]),
        )
        for name, step in steps.items()
    )
    return Card(model_digest(space), tuple(ropes), tuple(planes), _tables(), levels, {"text": "none"})


def _rows(space: ModelSpace, view: BlockView, layer: int, role: str, rope: Rope) -> Floats:
    """[tokens, heads * dim], K as before its rotation."""
    x = np.ascontiguousarray(from_bits(view.array(layer, role), space.dtype), np.float32)
    if role == "k":
        start = view.header.end - x.shape[1]
        for t in range(x.shape[1]):
            row = np.ascontiguousarray(x[:, t : t + 1])
            cos, sin = shift_tables(rope.inv_freq, -(start + t))
            rope_shift(row, row, row.shape, cos, sin, dst_dtype="fp32", interleaved=False)
            x[:, t : t + 1] = row
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


def _tables() -> npt.NDArray[np.uint8]:
    """Gaussians over symbols 0 to 30 around 15 with room for escapes, and last one for refinements."""
    rows = []
    for sigma in _SIGMAS:
        weight = np.exp(-(((np.arange(31) - 15) / sigma) ** 2) / 2)
        row = np.append(np.floor(weight / weight.sum() * 220), 1).astype(int)
        row[15] += 256 - row.sum()
        rows.append(row)
    rows.append(np.array([80, 95, 80] + [0] * 28 + [1]))
    return np.array(rows, np.uint8)
