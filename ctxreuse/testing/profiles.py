"""Codec profiles for tests, made from a few blocks of any model without calibration: means, spreads, no transform."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView
from ctxreuse.block.levels import JOINT, LevelInfo
from ctxreuse.codec import Codec, ProfileStore, model_digest, write_profile
from ctxreuse.codec.profile import (
    ChannelGroup,
    CodecProfile,
    Coding,
    JointProfile,
    Place,
    PlanePart,
    PlaneProfile,
    ProfileLevel,
)
from ctxreuse.codec.whole import joint_group
from ctxreuse.identity.model import ModelSpace
from ctxreuse.kernels.convert import to_float32
from ctxreuse.rope import Rotary

__all__ = ["LEVELS", "gaussian_tables", "plain_codec", "plain_profile"]

#: Names, steps in typical deviations of a component, and bits a value; kl-0.008 refines kl-0.05.
LEVELS = {"kl-0.05": (0.45, 3.5), "kl-0.01": (0.225, 4.5), "kl-0.008": (0.15, 5.0)}
_BASE, _REFINED = "kl-0.05", "kl-0.008"
_SIGMAS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_LEAST = 1e-6
#: Joint levels are said to take so much of the bits, as those of real models do; without a transform they take as many.
_JOINT = 0.5

Floats = npt.NDArray[np.float32]


def plain_profile(
    space: ModelSpace,
    views: Sequence[BlockView],
    *,
    theta: Callable[[int], float] | None = None,
    joint: bool = False,
) -> CodecProfile:
    """Make a profile with the levels `LEVELS`; what they do to answers was not measured.

    Args:
        space: the model space; its layers with K and V are coded.
        views: exact blocks of one context, and a state if layers have windows.
        theta: base of a layer's rotary embedding, in halves; None codes K as rotated.
        joint: the same levels again with all planes of one shape as one, ``kl-0.05-joint`` and so on.
    """
    ropes: list[Rotary] = []
    found: dict[Place, tuple[Floats, int]] = {}
    for layer, role in dict.fromkeys(place for view in views for place in view.layout.index):
        if role not in ("k", "v"):
            continue
        spec, rope = space.layers[layer], -1
        if role == "k" and theta is not None:
            rope = len(ropes)
            dim = spec.k_dim
            ropes.append(Rotary("half", tuple(theta(layer) ** (-2.0 * i / dim) for i in range(dim // 2))))
        given = [view for view in views if (layer, role) in view.layout.index]
        rotary = ropes[rope] if rope >= 0 else None
        found[layer, role] = np.concatenate([_rows(space, view, layer, role, rotary) for view in given]), rope
    coded, levels = _planes(space, found, [[place] for place in found], "")
    planes = tuple(
        PlaneProfile(parts[0].layer, parts[0].role, heads, dim, parts[0].rope, (group,))
        for parts, heads, dim, group in coded
    )
    together: tuple[JointProfile, ...] = ()
    if joint:
        alike: dict[object, list[Place]] = {}
        for place, (x, _) in found.items():
            alike.setdefault((space.layers[place[0]], x.shape), []).append(place)
        coded, more = _planes(space, found, list(alike.values()), JOINT)
        together = tuple(
            JointProfile(parts, heads, dim, (joint_group(group, len(group.basis)),))
            for parts, heads, dim, group in coded
        )
        levels = tuple(level for pair in zip(more, levels) for level in pair)
    return CodecProfile(
        model_digest(space), tuple(ropes), planes, gaussian_tables(), levels, {"text": "none"},
        version=3 if joint else 1, joint=together,
    )  # fmt: skip


def _planes(
    space: ModelSpace, found: Mapping[Place, tuple[Floats, int]], parts: Sequence[Sequence[Place]], suffix: str
) -> tuple[list[tuple[tuple[PlanePart, ...], int, int, ChannelGroup]], tuple[ProfileLevel, ...]]:
    """Planes, each of some places that are coded as one, with heads, dims and a group; and levels that code them."""
    planes: list[tuple[tuple[PlanePart, ...], int, int, ChannelGroup]] = []
    codings: dict[str, list[Coding]] = {name: [] for name in LEVELS}
    for places in parts:
        x = np.concatenate([found[place][0] for place in places], 1)
        turned = tuple(PlanePart(layer, "k" if role == "k" else "v", found[layer, role][1]) for layer, role in places)
        heads = space.layers[places[0][0]].kv_heads
        group, widths = _group(x, heads, large=bool(suffix))
        planes.append((turned, heads, x.shape[1] // len(places) // heads, group))
        for name in LEVELS:
            codings[name].append(_coding(widths / _step(name), refined=name == _REFINED))
    levels = [
        ProfileLevel(
            LevelInfo(
                name + suffix,
                True,
                bits * (_JOINT if suffix else 1),
                float(name[3:]),
                base=_BASE + suffix if name == _REFINED else "",
            ),
            float(_step(name)),
            tuple(codings[name]),
        )
        for name, (_, bits) in LEVELS.items()
    ]
    return planes, tuple(levels)


def plain_codec(space: ModelSpace, views: Sequence[BlockView], folder: Path) -> Codec:
    """Make the codec of a `plain_profile`, which is kept in the profile store in ``folder``."""
    profiles = ProfileStore(folder)
    profiles.add(write_profile(plain_profile(space, views)))
    return Codec.open(space, profiles)


def gaussian_tables() -> npt.NDArray[np.uint8]:
    """Tables of Gaussians over symbols 0 to 30 around 15 with room for escapes, and last one for refinements."""
    rows = []
    for sigma in _SIGMAS:
        weight = np.exp(-(((np.arange(31) - 15) / sigma) ** 2) / 2)
        row = np.append(np.floor(weight / weight.sum() * 220), 1).astype(int)
        row[15] += 256 - row.sum()
        rows.append(row)
    rows.append(np.array([80, 95, 80] + [0] * 28 + [1]))
    return np.array(rows, np.uint8)


def _step(name: str) -> np.float32:
    return np.float32(3) * np.float32(LEVELS[_REFINED][0]) if name == _BASE else np.float32(LEVELS[name][0])


def _rows(space: ModelSpace, view: BlockView, layer: int, role: str, rotary: Rotary | None) -> Floats:
    """[tokens, heads * dim], K as before its rotation."""
    spec = space.layers[layer]
    x = to_float32(view.array(layer, role), space.dtype)
    x = x.reshape(spec.kv_heads, -1, x.shape[-1])
    if rotary is not None:
        end = view.header.end
        x = rotary.rotate(x, np.arange(end - x.shape[1], end), undo=True)
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


def _group(x: Floats, heads: int, *, large: bool) -> tuple[ChannelGroup, npt.NDArray[np.float64]]:
    """One group of all channels, widest first, and their widths in the median one."""
    mean = x.mean(0)
    rms = np.maximum(np.sqrt(((x - mean) ** 2).mean(1)), _LEAST)
    typical = float(np.log2(rms.max() if large else rms.mean()))
    sigma = np.maximum(((x - mean) / (1 if large else (rms / 2**typical)[:, None])).std(0), _LEAST)
    order, scale = np.argsort(-sigma), float(np.median(sigma))
    eye = np.eye(x.shape[1])[order]
    gain = np.full(x.shape[1], scale / 8191, np.float32)
    forward, basis = (eye / scale).astype(np.float32), np.rint(eye * 8191).astype(np.int16)
    group = ChannelGroup(0, heads, typical, mean.astype(np.float32), gain, forward, basis, large)
    return group, sigma[order] / scale


def _coding(width: npt.NDArray[np.float64], *, refined: bool) -> Coding:
    shift = np.clip(np.ceil(np.log2(width / 4)), 0, 8).astype(np.uint8)
    table = np.abs(np.log2(width / (1 << shift.astype(int)))[:, None] - np.log2(_SIGMAS)).argmin(1).astype(np.uint8)
    return Coding(table, shift, np.full(len(table) if refined else 0, len(_SIGMAS), np.uint8))
