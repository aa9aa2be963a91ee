"""A small made-up model for tests of codecs: space, codec profile, and blocks that look like its K and V."""

from __future__ import annotations

import numpy as np

from ctxreuse.block.format import BlockView, BlockWriter, block_layout, parse
from ctxreuse.block.levels import JOINT
from ctxreuse.codec import ChannelGroup, CodecProfile, Coding, LevelInfo, PlaneProfile, ProfileLevel, model_digest
from ctxreuse.codec.profile import MOST_CHANNELS, JointProfile
from ctxreuse.codec.whole import joint_group
from ctxreuse.identity.model import LayerSpec, ModelSpace
from ctxreuse.kernels import rope_shift
from ctxreuse.kernels.convert import from_float32
from ctxreuse.rope import Rotary, RotaryStyle
from ctxreuse.testing.profiles import gaussian_tables

__all__ = ["DIM", "HEADS", "LAYERS", "SPREAD", "make_block", "make_profile", "make_space"]

HEADS, DIM, LAYERS = 3, 16, 2
SPREAD = 6.0, 0.9  # of a profile's first component, and of each against the one before


def make_space(dtype: str = "float32", block_tokens: int = 64, *, dim: int = DIM) -> ModelSpace:
    """Two full layers of three heads of 16."""
    layers = tuple(LayerSpec("full", HEADS, dim, dim) for _ in range(LAYERS))
    return ModelSpace("w", "made-up", "t", dtype, layers, "null", 100, 4096, block_tokens)


def make_profile(
    space: ModelSpace,
    *,
    groups: tuple[int, ...] = (HEADS,),
    style: RotaryStyle = "half",
    spread: tuple[float, float] = SPREAD,
    seed: int = 0,
    version: int = 3,
) -> CodecProfile:
    """Random means and orthogonal maps, spreads falling from 12 steps to none, two levels with a nested pair.

    Version 3 has the same levels again for all planes as one.
    """
    rng = np.random.default_rng(seed)
    dim = space.layers[0].k_dim
    inv = 100.0 ** (-np.arange(dim // 2) / (dim // 2))
    ropes = (Rotary(style, tuple(inv.tolist()) if style != "none" else ()),)
    planes: list[PlaneProfile] = []
    alone: dict[str, list[Coding]] = {name: [] for name in _STEPS}
    for layer in range(LAYERS):
        for role in ("k", "v"):
            made = _groups(rng, groups, dim, spread, alone, rounded=version > 1)
            planes.append(PlaneProfile(layer, role, HEADS, dim, 0 if role == "k" else -1, made))
    levels, joint = _levels(alone, ""), tuple[JointProfile, ...]()
    if version > 2:
        together: dict[str, list[Coding]] = {name: [] for name in _STEPS}
        # The maps of planes and of their union have nothing in common, so components of the latter are about alike.
        made = _groups(rng, groups, dim, (spread[0] / 2, 0.999), together, parts=len(planes))
        narrow = max(int(coding.narrow) for own in together.values() for coding in own)
        whole = tuple(joint_group(group, min(narrow, len(group.basis))) for group in made)
        joint = (JointProfile(tuple(plane.parts[0] for plane in planes), HEADS, dim, whole),)
        levels = tuple(level for pair in zip(_levels(together, JOINT), levels) for level in pair)
    return CodecProfile(
        model_digest(space), ropes, tuple(planes), gaussian_tables(), levels, {"text": "none"}, version=version,
        joint=joint,
    )  # fmt: skip


_STEPS = {"kl-0.05": 1.5, "kl-0.01": 0.8, "kl-0.005": 0.5}


def _groups(
    rng: np.random.Generator, groups: tuple[int, ...], dim: int, spread: tuple[float, float],
    codings: dict[str, list[Coding]], *, parts: int = 1, rounded: bool = True,
) -> tuple[ChannelGroup, ...]:  # fmt: skip
    """Groups of so many heads, and what each level does to their components."""
    made: list[ChannelGroup] = []
    first = 0
    for heads in groups:
        channels = parts * heads * dim
        n = channels - 2
        turn = np.linalg.qr(rng.normal(size=(channels, channels)))[0]
        spreads = spread[0] * spread[1] ** np.arange(channels)
        gain = np.full(channels, 1 / 8191, np.float32)
        forward = turn[:n].astype(np.float32)
        basis = np.rint(turn[:n] * 8191).astype(np.int16)
        mean = rng.normal(size=channels).astype(np.float32)
        log_rms = float(np.log2(np.sqrt((spreads**2).mean())))
        made.append(ChannelGroup(first, heads, log_rms, mean, gain, forward, basis, parts > 1))
        first += heads
        for name, step in _STEPS.items():
            active = int((spreads[:n] > step / 6).sum())
            shift = (np.log2(np.maximum(spreads[:active] / step, 1)) > 2).astype(np.uint8)
            width = spreads[:active] / step / (1 << shift)
            table = np.abs(np.log2(width)[:, None] - np.arange(-2, 4)).argmin(1).astype(np.uint8)
            base = len(codings["kl-0.05"][-1].table) if name == "kl-0.005" else 0
            narrow = int((spreads[:active] >= 2 * step).sum()) if rounded else MOST_CHANNELS
            codings[name].append(Coding(table, shift, np.full(base, 6, np.uint8), narrow))
    return tuple(made)


def _levels(codings: dict[str, list[Coding]], suffix: str) -> tuple[ProfileLevel, ...]:
    """Levels from coarse to fine, the finest of which refines the coarsest."""
    found = []
    for (name, step), bits in zip(_STEPS.items(), (2.0, 3.0, 3.5)):
        base = f"kl-0.05{suffix}" if name == "kl-0.005" else ""
        info = LevelInfo(name + suffix, True, bits, float(name[3:]), base=base)
        found.append(ProfileLevel(info, float(np.float32(step)), tuple(codings[name])))
    return tuple(found)


def make_block(
    space: ModelSpace, profile: CodecProfile, *, start: int = 64, spread: tuple[float, float] = SPREAD, seed: int = 1
) -> BlockView:
    """A block whose vectors have the profile's statistics; K rotated at its positions, as an engine would leave it."""
    rng = np.random.default_rng(seed)
    count = space.block_tokens
    tokens = rng.integers(0, 100, count).astype(np.int32)
    writer = BlockWriter(
        block_layout(space), kind="block", space=space.digest, key=bytes(32), parent=bytes(32), end=start + count,
        tokens=tokens, rope_at=start,
    )  # fmt: skip
    for plane in profile.planes:
        x = np.empty((HEADS, count, plane.dim), np.float32)
        for group in plane.groups:
            y = rng.normal(size=(count, len(group.forward))) * (spread[0] * spread[1] ** np.arange(len(group.forward)))
            vectors = group.mean + y @ group.forward * np.exp2(rng.normal(size=(count, 1)) / 4)
            x[group.first : group.first + group.heads] = vectors.reshape(count, group.heads, plane.dim).transpose(
                1, 0, 2
            )
        if plane.rope >= 0 and profile.ropes[0].style != "none":
            for t in range(count):
                row = np.ascontiguousarray(x[:, t : t + 1])
                cos, sin, interleaved = profile.ropes[0].shift(start + t)
                rope_shift(row, row, row.shape, cos, sin, dst_dtype="fp32", interleaved=interleaved)
                x[:, t : t + 1] = row
        target = writer.plane(plane.layer, plane.role)
        bits = from_float32(x, space.dtype)
        target[:] = np.ascontiguousarray(bits).view(np.uint8).reshape(-1)
    return parse(writer.seal())
