"""One text's exact context, cut into blocks, and what becomes of the next tokens when other K and V are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.rivals import Kvtc, KvtcBasis, Rival
from ctxreuse.block.format import BlockView, parse, reseal
from ctxreuse.block.levels import EXACT
from ctxreuse.codec import Codec
from ctxreuse.engines.calibration import Fidelity
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.engines.torch_hf.fidelity import Scores, score
from ctxreuse.identity.keys import Tokens
from ctxreuse.rope import Rotary

__all__ = ["CODED", "RAW_BITS", "RAW_TOKENS", "SCORED", "Context", "rows_of"]

#: Tokens whose K and V are coded, and how many after them are scored.
CODED, SCORED = 768, 192
#: The first tokens of a context are kept as they are, by every codec, in floats of 16 bits.
RAW_TOKENS, RAW_BITS = 4, 16

Array = npt.NDArray[np.float32]
_ROLES = ("k", "v")


class Context:
    """The blocks (and the state, if the model has one) of a text's first tokens; float32 engines only.

    ``tokens`` int32 [CODED + SCORED + 1]. Holds the exact scores, 4 * SCORED * vocabulary bytes. Not thread-safe.
    """

    def __init__(self, engine: TorchEngine, rotaries: dict[int, Rotary], tokens: Tokens) -> None:
        self._engine, self._rotaries, self._next = engine, rotaries, tokens[CODED:]
        size = engine.space.block_tokens
        keys = [bytes([i + 1]) * 32 for i in range(CODED // size)]
        context = engine.new_context(CODED + SCORED + 1)
        engine.prefill(context, tokens[:CODED])
        self.blocks = [parse(block) for block in engine.export(context, keys, bytes(32), 0)]
        self.state: BlockView | None = None
        if engine.space.needs_state:
            self.state = parse(engine.export_state(context, keys[-1], keys[-2], CODED))
        del context
        self.values = sum(int(np.prod(plane.shape)) for view in self.views for plane in view.layout.planes)
        self._exact = self._score(self.blocks, self.state)

    @property
    def views(self) -> list[BlockView]:
        """All blocks, then the state."""
        return [*self.blocks, *([] if self.state is None else [self.state])]

    def _score(self, blocks: Sequence[BlockView], state: BlockView | None) -> Scores:
        context = self._engine.new_context(CODED + SCORED + 1)
        self._engine.load(context, blocks, state).wait()
        return score(self._engine, context, self._next)

    def fidelity(self, views: Sequence[BlockView]) -> Fidelity:
        """What the next tokens make of these blocks (and state) in place of the exact ones: a real load."""
        count = len(self.blocks)
        return self._score(views[:count], views[count] if self.state is not None else None).against(self._exact)

    def rival(self, rival: Rival) -> tuple[Fidelity, float]:
        """Code all planes by a rival: how far the next tokens move, and the bits it took in all."""
        layers = len(self._engine.space.layers)
        bits = 0.0

        def code(layer: int, role: str, plane: Array, start: int) -> Array:
            nonlocal bits
            positions = np.arange(start, start + plane.shape[1])
            rotary = self._rotaries[layer] if role == "k" else Rotary("none")
            flat = rotary.rotate(plane, positions, undo=True).transpose(1, 0, 2)
            raw = max(RAW_TOKENS - start, 0)
            coded = rival.code(np.ascontiguousarray(flat[raw:]), role, layer, layers)
            bits += coded.bits + RAW_BITS * flat[:raw].size
            back = np.concatenate([flat[:raw], coded.values]).transpose(1, 0, 2)
            turned = rotary.rotate(np.ascontiguousarray(back), positions)
            turned[:, :raw] = plane[:, :raw]
            return turned

        return self.fidelity(self.rebuilt(code)), bits

    def kvtc(self, kvtc: Kvtc, bases: Mapping[str, KvtcBasis]) -> tuple[Fidelity, float]:
        """As `rival`, for a codec of all layers at once; of a model whose layers all keep all tokens."""
        bits, whole = 0.0, dict[tuple[int, str], Array]()
        place = np.arange(CODED)
        for role, basis in bases.items():
            planes = [np.concatenate([_array(v, layer, role) for v in self.blocks], 1) for layer in self._rotaries]
            rotaries = [self._rotaries[layer] if role == "k" else Rotary("none") for layer in self._rotaries]
            flat = [rows_of(turn.rotate(plane, place, undo=True)) for turn, plane in zip(rotaries, planes)]
            back, used = kvtc.code(np.concatenate(flat, 1)[RAW_TOKENS:], basis)
            bits += used + RAW_BITS * RAW_TOKENS * back.shape[1]
            at = 0
            for layer, turn, plane in zip(self._rotaries, rotaries, planes):
                heads, _, dim = plane.shape
                own = back[:, at : at + heads * dim].reshape(-1, heads, dim).transpose(1, 0, 2)
                turned = turn.rotate(np.ascontiguousarray(own), place[RAW_TOKENS:])
                whole[layer, role] = np.concatenate([plane[:, :RAW_TOKENS], turned], 1)
                at += heads * dim
        return self.fidelity([self._sealed(view, whole) for view in self.views]), bits

    def ours(self, codec: Codec, level: str) -> tuple[Fidelity, float]:
        """Code all blocks (and the state) at a level: how far the next tokens move, and the bits of all containers.

        The engine loads the coded blocks themselves.
        """
        coded = [codec.encode(view, codec.level_for(view, level)) for view in self.views]
        return self.fidelity([parse(block) for block in coded]), 8.0 * sum(block.nbytes for block in coded)

    def rebuilt(self, change: Callable[[int, str, Array, int], Array]) -> list[BlockView]:
        """Blocks and state with other K and V: ``change(layer, role, [heads, rows, dim], first position)``."""
        whole: dict[tuple[int, str], Array] = {}
        for layer, spec in enumerate(self._engine.space.layers):
            for role in _ROLES:
                if spec.blocked:
                    plane = np.concatenate([_array(view, layer, role) for view in self.blocks], axis=1)
                    whole[layer, role] = change(layer, role, plane, 0)
                elif spec.kind == "sliding" and self.state is not None:
                    plane = _array(self.state, layer, role)
                    whole[layer, role] = change(layer, role, plane, CODED - plane.shape[1])
        return [self._sealed(view, whole) for view in self.views]

    def _sealed(self, view: BlockView, whole: dict[tuple[int, str], Array]) -> BlockView:
        planes = {}
        for plane in view.layout.planes:
            held = whole.get((plane.layer, plane.role))
            if held is not None:
                # The last row of a plane is that of the last token, in blocks and in windows.
                end = held.shape[1] - (CODED - view.header.end)
                rows = held[:, end - plane.shape[1] : end]
                planes[plane.layer, plane.role] = np.ascontiguousarray(rows).view(np.uint8).ravel()
        return parse(reseal(view, planes, level=EXACT))


def rows_of(plane: Array) -> Array:
    """A plane [heads, tokens, dim] as [tokens, heads * dim]."""
    return np.ascontiguousarray(plane.transpose(1, 0, 2).reshape(plane.shape[1], -1))


def _array(view: BlockView, layer: int, role: str) -> Array:
    return np.asarray(view.array(layer, role), np.float32)
