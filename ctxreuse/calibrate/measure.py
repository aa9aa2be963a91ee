"""Size and accuracy of each level of a profile, on held-out text of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ctxreuse.block.format import BlockWriter, Kind, Plane, layout_of, parse
from ctxreuse.calibrate.coding import Planned
from ctxreuse.calibrate.gather import Progress, Window
from ctxreuse.calibrate.texts import KindWindow
from ctxreuse.calibrate.transform import Basis
from ctxreuse.calibrate.trial import by_kind, compare, decode, mean_fidelity, prepare
from ctxreuse.codec.codec import Codec
from ctxreuse.codec.profile import CodecProfile, KindFigures
from ctxreuse.codec.profile_bytes import profile_digest, write_profile
from ctxreuse.engines.calibration import CalibrationModel, Fidelity, Planes
from ctxreuse.identity.keys import KEY_BYTES, Tokens
from ctxreuse.identity.model import ModelSpace
from ctxreuse.kernels.convert import from_float32

__all__ = ["LevelSet", "Size", "coded_size", "measure"]


class LevelSet(NamedTuple):
    """Levels of one basis."""

    basis: Basis
    levels: tuple[Planned, ...]


class Size(NamedTuple):
    """Bytes of coded blocks, heads and raw first tokens included, and values of K and V in them."""

    nbytes: int
    values: int


def measure(
    model: CalibrationModel,
    profile: CodecProfile,
    families: Sequence[LevelSet],
    texts: Sequence[KindWindow],
    prefix: int,
    progress: Progress,
) -> CodecProfile:
    """Return the profile with the figures of its levels, measured on text that it was not made from."""
    codec = Codec(model.space, (profile_digest(write_profile(profile)).hex(), profile))
    seen: dict[str, list[Fidelity]] = {level.info.name: [] for level in profile.levels}
    sizes: dict[str, list[Size]] = {level.info.name: [] for level in profile.levels}
    done, all_ = 0, len(texts) * len(profile.levels)
    for kind, ids in texts:
        window, exact = Window(model.read(ids[:prefix]), ids[prefix:], kind), None
        for family in families:
            prepared = prepare(model, window, family.basis, exact)
            exact = prepared.exact
            for level in family.levels:
                progress("held-out text", done, all_)
                planes = decode(prepared, family.basis, level.step, level.active)
                scores = model.scores(window.reading, window.following, planes)
                seen[level.name].append(compare(exact, scores, window.following))
                sizes[level.name].append(coded_size(codec, window.reading.planes, ids[:prefix], level.name))
                done += 1
    progress("held-out text", all_, all_)
    kinds, figures = [kind for kind, _ in texts], []
    for made in profile.levels:
        fidelities, parts = seen[made.info.name], sizes[made.info.name]
        mean, each = mean_fidelity(fidelities), by_kind(kinds, fidelities)
        info = msgspec.structs.replace(made.info, bits=_bits(parts), kl=mean.kl, top1=mean.top1, dnll=mean.dnll)
        of_kind = {
            kind: KindFigures(each[kind].kl, _bits([part for of, part in zip(kinds, parts) if of == kind]))
            for kind in each
        }
        figures.append(msgspec.structs.replace(made, info=info, kinds=of_kind))
    return msgspec.structs.replace(profile, levels=tuple(figures))


def _bits(sizes: Sequence[Size]) -> float:
    return 8 * sum(size.nbytes for size in sizes) / sum(size.values for size in sizes)


def coded_size(codec: Codec, planes: Planes, tokens: Tokens, level: str) -> Size:
    """Blocks of the layers that keep all tokens, and a state of those with windows, encoded at a level."""
    space, size = codec.space, codec.space.block_tokens
    nbytes = values = 0
    for at in range(0, len(tokens) // size * size, size):
        block = {key: p[:, at : at + size] for key, p in planes.items() if space.layers[key[0]].blocked}
        nbytes += _encoded(codec, block, tokens[at : at + size], at + size, level)
        values += sum(p.size for p in block.values())
    state = {key: p for key, p in planes.items() if not space.layers[key[0]].blocked}
    if state:
        nbytes += _encoded(codec, state, tokens[-size:], len(tokens), level)
        values += sum(p.size for p in state.values())
    return Size(nbytes, values)


def _encoded(codec: Codec, planes: Planes, tokens: Tokens, end: int, level: str) -> int:
    """Bytes of a block with these planes, but for the padding to pages, which says more about the disk."""
    if not planes:
        return 0
    space: ModelSpace = codec.space
    layout = layout_of(tuple(Plane(layer, role, space.dtype, p.shape) for (layer, role), p in planes.items()))
    key = bytes(KEY_BYTES)
    kind: Kind = "block" if space.layers[next(iter(planes))[0]].blocked else "state"
    writer = BlockWriter(
        layout, kind=kind, space=space.digest, key=key, parent=key, end=end, tokens=tokens, rope_at=end - len(tokens)
    )
    for (layer, role), plane in planes.items():
        bits = from_float32(plane, space.dtype)
        writer.plane(layer, role)[:] = np.ascontiguousarray(bits).view(np.uint8).reshape(-1)
    coded = parse(codec.encode(parse(writer.seal()), level))
    return coded.start + coded.layout.nbytes
