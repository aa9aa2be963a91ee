"""What each level of a card costs and does on held-out text: bytes of blocks, and scores on what they decode to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ctxreuse.block import BlockWriter, Kind, Plane, layout_of, parse
from ctxreuse.calibrate.coding import Planned
from ctxreuse.calibrate.gather import Progress, Window
from ctxreuse.calibrate.transform import Transform
from ctxreuse.calibrate.trial import Fidelity, compare, decode, mean_fidelity, prepare
from ctxreuse.codec.card import Card
from ctxreuse.codec.card_bytes import card_digest, write_card
from ctxreuse.codec.codec import Codec
from ctxreuse.codec.planes import to_bits
from ctxreuse.engines.gauge import Gauge, Planes, Rotary
from ctxreuse.keys import KEY_BYTES, Tokens
from ctxreuse.model import ModelSpace

__all__ = ["Size", "coded_size", "measure"]


class Size(NamedTuple):
    """Bytes of coded blocks, heads and raw first tokens included, and values of K and V in them."""

    nbytes: int
    values: int


def measure(
    gauge: Gauge,
    card: Card,
    transforms: Sequence[Transform],
    rotaries: dict[int, Rotary],
    levels: Sequence[Planned],
    texts: Sequence[Tokens],
    prefix: int,
    progress: Progress,
) -> Card:
    """The card with the figures of its levels, measured on windows of text that it was not made from."""
    codec = Codec(gauge.space, (card_digest(write_card(card)).hex(), card))
    seen: list[list[Fidelity]] = [[] for _ in levels]
    sizes: list[list[Size]] = [[] for _ in levels]
    for number, ids in enumerate(texts):
        window = Window(gauge.read(ids[:prefix]), ids[prefix:])
        prepared = prepare(gauge, window, transforms, rotaries)
        for i, level in enumerate(levels):
            progress("held-out text", number * len(levels) + i, len(texts) * len(levels))
            planes = decode(prepared, transforms, rotaries, level.step, level.active)
            scores = gauge.scores(window.reading, window.following, planes)
            seen[i].append(compare(prepared.exact, scores, window.following))
            sizes[i].append(coded_size(codec, window.reading.planes, ids[:prefix], level.name))
    progress("held-out text", len(texts) * len(levels), len(texts) * len(levels))
    figures = []
    for made, fidelities, parts in zip(card.levels, seen, sizes):
        mean = mean_fidelity(fidelities)
        bits = 8 * sum(p.nbytes for p in parts) / sum(p.values for p in parts)
        info = msgspec.structs.replace(made.info, bits=bits, kl=mean.kl, top1=mean.top1, dnll=mean.dnll)
        figures.append(msgspec.structs.replace(made, info=info))
    return msgspec.structs.replace(card, levels=tuple(figures))


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
        bits = to_bits(np.ascontiguousarray(plane), space.dtype)
        writer.plane(layer, role)[:] = np.ascontiguousarray(bits).view(np.uint8).reshape(-1)
    coded = parse(codec.encode(parse(writer.seal()), level))
    return coded.start + coded.layout.nbytes
