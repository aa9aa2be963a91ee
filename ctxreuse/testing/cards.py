"""A small made-up model for tests of codecs: space, card, and blocks that look like its K and V."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ctxreuse.block import BlockView, BlockWriter, block_layout, parse
from ctxreuse.codec import Card, CardLevel, ChannelGroup, Coding, LevelInfo, PlaneCard, Rope, model_digest
from ctxreuse.codec.planes import to_bits
from ctxreuse.kernels import rope_shift, shift_tables
from ctxreuse.model import LayerSpec, ModelSpace

__all__ = ["DIM", "HEADS", "LAYERS", "SPREAD", "make_block", "make_card", "make_space"]

HEADS, DIM, LAYERS = 3, 16, 2
SPREAD = 6.0, 0.9  # of a card's first component, and of each against the one before


def make_space(dtype: str = "float32", block_tokens: int = 64, *, dim: int = DIM) -> ModelSpace:
    """Two full layers of three heads of 16."""
    layers = tuple(LayerSpec("full", HEADS, dim, dim) for _ in range(LAYERS))
    return ModelSpace("w", "made-up", "t", dtype, layers, "null", 100, 4096, block_tokens)


def spread_tables() -> npt.NDArray[np.uint8]:
    """Tables of discrete Gaussians over symbols 0..30 (centre 15), each with some room for escapes."""
    rows = []
    for sigma in (0.25, 0.5, 1, 2, 4, 8):
        weight = np.exp(-(((np.arange(31) - 15) / sigma) ** 2) / 2)
        row = np.append(np.floor(weight / weight.sum() * 220), 1).astype(int)
        row[15] += 256 - row.sum()
        rows.append(row)
    rows.append(np.array([80, 95, 80] + [0] * 28 + [1]))
    return np.array(rows, np.uint8)


def make_card(
    space: ModelSpace,
    *,
    groups: tuple[int, ...] = (HEADS,),
    style: str = "half",
    spread: tuple[float, float] = SPREAD,
    seed: int = 0,
) -> Card:
    """Random means and orthogonal maps, spreads falling from 12 steps to none, two levels with a nested pair."""
    rng = np.random.default_rng(seed)
    dim = space.layers[0].k_dim
    inv = 100.0 ** (-np.arange(dim // 2) / (dim // 2))
    ropes = (Rope(style, inv if style != "none" else np.empty(0)),)  # type: ignore[arg-type]
    planes: list[PlaneCard] = []
    codings: dict[str, list[Coding]] = {name: [] for name in ("kl-0.05", "kl-0.005", "kl-0.01")}
    for layer in range(LAYERS):
        for role in ("k", "v"):
            made: list[ChannelGroup] = []
            first = 0
            for heads in groups:
                channels = heads * dim
                n = channels - 2
                turn = np.linalg.qr(rng.normal(size=(channels, channels)))[0]
                spreads = spread[0] * spread[1] ** np.arange(channels)
                gain = np.full(channels, 1 / 8191, np.float32)
                forward = turn[:n].astype(np.float32)
                basis = np.rint(turn[:n] * 8191).astype(np.int16)
                mean = rng.normal(size=channels).astype(np.float32)
                log_rms = float(np.log2(np.sqrt((spreads**2).mean())))
                made.append(ChannelGroup(first, heads, log_rms, mean, gain, forward, basis))
                first += heads
                for name, step in (("kl-0.05", 1.5), ("kl-0.005", 0.5), ("kl-0.01", 0.8)):
                    active = int((spreads[:n] > step / 6).sum())
                    shift = (np.log2(np.maximum(spreads[:active] / step, 1)) > 2).astype(np.uint8)
                    width = spreads[:active] / step / (1 << shift)
                    table = np.abs(np.log2(width)[:, None] - np.arange(-2, 4)).argmin(1).astype(np.uint8)
                    base = len(codings["kl-0.05"][-1].table) if name == "kl-0.005" else 0
                    codings[name].append(Coding(table, shift, np.full(base, 6, np.uint8)))
            planes.append(PlaneCard(layer, role, HEADS, dim, 0 if role == "k" else -1, tuple(made)))
    levels = (
        CardLevel(LevelInfo("kl-0.05", True, 2.0, 0.05), float(np.float32(1.5)), tuple(codings["kl-0.05"])),
        CardLevel(LevelInfo("kl-0.01", True, 3.0, 0.01), float(np.float32(0.8)), tuple(codings["kl-0.01"])),
        CardLevel(LevelInfo("kl-0.005", True, 3.5, 0.005, base="kl-0.05"), 0.5, tuple(codings["kl-0.005"])),
    )
    return Card(model_digest(space), ropes, tuple(planes), spread_tables(), levels, {"text": "none"})


def make_block(
    space: ModelSpace, card: Card, *, start: int = 64, spread: tuple[float, float] = SPREAD, seed: int = 1
) -> BlockView:
    """A block whose vectors have the card's statistics; K rotated at its positions, as an engine would leave it."""
    rng = np.random.default_rng(seed)
    count = space.block_tokens
    tokens = rng.integers(0, 100, count).astype(np.int32)
    writer = BlockWriter(
        block_layout(space), kind="block", space=space.digest, key=bytes(32), parent=bytes(32), end=start + count,
        tokens=tokens, rope_at=start,
    )  # fmt: skip
    for plane in card.planes:
        x = np.empty((HEADS, count, plane.dim), np.float32)
        for group in plane.groups:
            y = rng.normal(size=(count, len(group.forward))) * (spread[0] * spread[1] ** np.arange(len(group.forward)))
            vectors = group.mean + y @ group.forward * np.exp2(rng.normal(size=(count, 1)) / 4)
            x[group.first : group.first + group.heads] = vectors.reshape(count, group.heads, plane.dim).transpose(
                1, 0, 2
            )
        if plane.rope >= 0 and card.ropes[0].style != "none":
            for t in range(count):
                row = np.ascontiguousarray(x[:, t : t + 1])
                cos, sin = shift_tables(card.ropes[0].inv_freq, start + t)
                interleaved = card.ropes[0].style == "pairs"
                rope_shift(row, row, row.shape, cos, sin, dst_dtype="fp32", interleaved=interleaved)
                x[:, t : t + 1] = row
        target = writer.plane(plane.layer, plane.role)
        bits = to_bits(x, space.dtype)
        target[:] = np.ascontiguousarray(bits).view(np.uint8).reshape(-1)
    return parse(writer.seal())
