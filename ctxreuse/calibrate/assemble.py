"""A profile put together from the levels of all transforms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, cast

import msgspec

from ctxreuse.block.levels import LevelInfo, expected_kl
from ctxreuse.calibrate.coding import Planned
from ctxreuse.calibrate.measure import LevelSet
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
from ctxreuse.engines.calibration import CalibrationModel
from ctxreuse.rope import Rotary

__all__ = ["joint_planes", "numbered", "planes_alone", "profile_levels", "without_waste"]


def numbered(families: Sequence[LevelSet]) -> list[Planned]:
    """The levels of all families, as if each coded the groups of all."""
    counts = [len(family.basis.transforms) for family in families]
    found: list[Planned] = []
    for number, family in enumerate(families):
        before, behind, first = (0,) * sum(counts[:number]), (0,) * sum(counts[number + 1 :]), len(found)
        for level in family.levels:
            base = None if level.base is None else first + level.base
            found.append(level._replace(active=before + level.active + behind, base=base))
    return found


def profile_levels(families: Sequence[LevelSet], codings: Sequence[tuple[Coding, ...]]) -> tuple[ProfileLevel, ...]:
    """Levels from coarse to fine, of equal promises the smaller first; ``codings`` are those of `numbered`."""
    made, group, left = [], 0, iter(codings)
    for family in families:
        transforms = family.basis.transforms
        for level in family.levels:
            own = tuple(
                msgspec.structs.replace(coding, narrow=min(transform.narrow(level.step), len(coding.table)))
                for transform, coding in zip(transforms, next(left)[group:])
            )
            base = "" if level.base is None else family.levels[level.base].name
            made.append(ProfileLevel(LevelInfo(level.name, True, 0.0, base=base), level.step, own))
        group += len(transforms)
    merged, later = list[ProfileLevel](), [level for level in made if level.joint]
    for one in (level for level in made if not level.joint):  # in the order of their steps
        while later and expected_kl(later[0].info.name) >= expected_kl(one.info.name):
            merged.append(later.pop(0))
        merged.append(one)
    return (*merged, *later)


def without_waste(profile: CodecProfile) -> CodecProfile:
    """Return the measured profile without joint levels that take no fewer bits than others that promise as much.

    Of too little text their transforms have not learnt enough.
    """
    alone = [level.info for level in profile.levels if not level.joint]

    def wasted(info: LevelInfo) -> bool:
        return any(expected_kl(one.name) <= expected_kl(info.name) and one.bits <= info.bits for one in alone)

    waste = {level.info.name for level in profile.levels if level.joint and wasted(level.info)}
    left = tuple(level for level in profile.levels if not waste & {level.info.name, level.info.base})
    if len(left) == len(profile.levels):
        return profile
    if any(level.joint for level in left):
        return msgspec.structs.replace(profile, levels=left)
    return msgspec.structs.replace(profile, levels=left, joint=(), version=2)


def planes_alone(levels: LevelSet, ropes: Sequence[Rotary], model: CalibrationModel) -> tuple[PlaneProfile, ...]:
    """The planes, coded one by one."""
    planes: list[PlaneProfile] = []
    for (part, *_), groups in _grouped(levels, ropes):
        spec = model.space.layers[part.layer]
        dim = spec.k_dim if part.role == "k" else spec.v_dim
        planes.append(PlaneProfile(part.layer, part.role, spec.kv_heads, dim, part.rope, groups))
    return tuple(planes)


def joint_planes(levels: LevelSet, ropes: Sequence[Rotary], model: CalibrationModel) -> tuple[JointProfile, ...]:
    """The planes, those of several layers as one."""
    planes: list[JointProfile] = []
    narrow = {
        (of.places, of.first): max(transform.narrow(level.step) for level in levels.levels)
        for transform in levels.basis.transforms
        for of in (transform.stats.channels,)
    }
    for parts, groups in _grouped(levels, ropes):
        spec, places = model.space.layers[parts[0].layer], tuple(part.place for part in parts)
        own = tuple(joint_group(group, min(narrow[places, group.first], len(group.basis))) for group in groups)
        planes.append(JointProfile(parts, spec.kv_heads, spec.k_dim, own))
    return tuple(planes)


def _grouped(
    levels: LevelSet, ropes: Sequence[Rotary]
) -> Iterator[tuple[tuple[PlanePart, ...], tuple[ChannelGroup, ...]]]:
    """Planes, or those that are coded as one, and their groups with the components that any level codes."""
    rotaries, found = levels.basis.rotaries, dict[tuple[Place, ...], list[ChannelGroup]]()
    for i, transform in enumerate(levels.basis.transforms):
        components = max((level.active[i] for level in levels.levels), default=0)
        found.setdefault(transform.stats.channels.places, []).append(transform.group(components))
    for places, groups in found.items():
        parts = tuple(
            PlanePart(layer, cast(Literal["k", "v"], role), ropes.index(rotaries[layer]) if role == "k" else -1)
            for layer, role in places
        )
        yield parts, tuple(groups)
