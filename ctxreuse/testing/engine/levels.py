"""EngineLevelsContract: what any engine must do with blocks that are coded, and with what stands on lossy ones.

::

    class TestMine(EngineLevelsContract):
        @pytest.fixture(scope="class")
        @classmethod
        def engine(cls): return MyEngine(...)

The engine's codec is replaced by one with a `plain_profile`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ctxreuse.block.format import BlockView, parse
from ctxreuse.block.levels import EXACT, PACKED, family
from ctxreuse.codec import Codec, ProfileStore
from ctxreuse.engines.base import Context, Engine
from ctxreuse.engines.provenance import leading
from ctxreuse.errors import ConfigError, EngineError, FormatError, LinkDownError
from ctxreuse.identity.keys import ROOT
from ctxreuse.testing.profiles import plain_profile
from ctxreuse.testing.raising import raises
from ctxreuse.testing.sealed import Sealed, continuation, random_tokens, seal, views

__all__ = ["EngineLevelsContract"]

_BLOCKS = 5


class EngineLevelsContract:
    """Inherit, and give a fixture ``engine`` whose ``codec`` can be set."""

    def sealed(self, engine: Engine, *, joint: bool = False) -> tuple[Sealed, Codec]:
        """A context as bytes, and a codec with a profile for it, now the engine's; ``joint``: with joint levels."""
        sealed = seal(engine, random_tokens(engine, _BLOCKS * engine.space.block_tokens))
        raw = [parse(data) for data in (*sealed.blocks, *sealed.states.values())]
        codec = Codec(engine.space, ("0" * 64, plain_profile(engine.space, raw, joint=joint)))
        engine.codec = codec  # type: ignore[misc]
        return sealed, codec

    def coded(
        self, engine: Engine, sealed: Sealed, codec: Codec, levels: Sequence[str], state: str
    ) -> tuple[list[BlockView], BlockView | None]:
        """The context's blocks at these levels, and its last state."""
        blocks, stored_state = views(engine, sealed, len(sealed.tokens))
        made = [parse(codec.encode(view, level)) for view, level in zip(blocks, levels)]
        return made, parse(codec.encode(stored_state, state)) if stored_state is not None else None

    def loaded(self, engine: Engine, blocks: Sequence[BlockView], state: BlockView | None) -> Context:
        """A new context with these blocks."""
        context = engine.new_context()
        engine.load(context, blocks, state).wait()
        return context

    def test_packed_blocks_give_the_bits_of_raw_ones(self, engine: Engine) -> None:
        sealed, codec = self.sealed(engine)
        suffix = random_tokens(engine, 9, seed=1)
        raw = self.loaded(engine, *views(engine, sealed, len(sealed.tokens)))
        expected = continuation(engine, raw, engine.prefill(raw, suffix), 2)
        for levels in ([PACKED] * _BLOCKS, [EXACT, PACKED, EXACT, PACKED, PACKED]):
            context = self.loaded(engine, *self.coded(engine, sealed, codec, levels, PACKED))
            got = continuation(engine, context, engine.prefill(context, suffix), 2)
            assert all(np.array_equal(a, b) for a, b in zip(got, expected))
            assert leading(context.levels, None) == context.n
            assert all(parse(data).header.level == EXACT for data in engine.export(context, sealed.keys, ROOT, 0))

    def test_lossy_blocks_give_what_they_decode_to(self, engine: Engine) -> None:
        sealed, codec = self.sealed(engine)
        self._decodes(engine, sealed, codec, ["kl-0.05"] * _BLOCKS, "kl-0.05")

    def test_joint_blocks_give_what_they_decode_to(self, engine: Engine) -> None:
        sealed, codec = self.sealed(engine, joint=True)
        joint = "kl-0.05-joint"
        self._decodes(engine, sealed, codec, [joint, joint, EXACT, "kl-0.01", joint], joint)

    def _decodes(self, engine: Engine, sealed: Sealed, codec: Codec, levels: Sequence[str], of_state: str) -> None:
        blocks, state = self.coded(engine, sealed, codec, levels, of_state)
        decoded = [parse(codec.decode(view)) for view in blocks]
        twin = parse(codec.decode(state)) if state is not None else None
        a, b = self.loaded(engine, blocks, state), self.loaded(engine, decoded, twin)
        suffix = random_tokens(engine, 9, seed=1)
        assert np.array_equal(engine.prefill(a, suffix), engine.prefill(b, suffix))
        for one, two in zip(engine.export(a, sealed.keys, ROOT, 0), engine.export(b, sealed.keys, ROOT, 0)):
            for plane in parse(one).layout.planes:
                at = plane.layer, plane.role
                assert bytes(parse(one).plane(*at)) == bytes(parse(two).plane(*at))

    def test_a_context_knows_what_stands_on_lossy_blocks(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        sealed, codec = self.sealed(engine)
        mixture = [EXACT, PACKED, "kl-0.01", EXACT, "kl-0.05"]
        # Layers that keep states only have nothing in blocks that could be lossy, but the name counts all the same.
        context = self.loaded(engine, *self.coded(engine, sealed, codec, mixture, EXACT))
        engine.prefill(context, random_tokens(engine, size, seed=1))
        runs = context.levels
        assert [(run.start // size, run.end // size, family(run.level)) for run in runs] == [
            (0, 1, EXACT), (1, 2, PACKED), (2, 3, "kl-0.01"), (3, 4, EXACT), (4, 5, "kl-0.05"), (5, 6, "approx"),
        ]  # fmt: skip
        assert [leading(runs, max_kl) // size for max_kl in (None, 0.01, 0.05)] == [2, 4, 6]
        keys = [*sealed.keys, b"k" * 32]
        exported = [parse(data).header.level for data in engine.export(context, keys, ROOT, 0)]
        assert exported == [EXACT, EXACT, "approx~kl-0.01", EXACT, "approx~kl-0.05", "approx~kl-0.05"]
        for at in context.states:
            data = engine.export_state(context, keys[at // size - 1], keys[at // size - 2], at)
            assert parse(data).header.level == (EXACT if at <= 5 * size else "approx~kl-0.05")

    def test_what_is_cropped_away_is_forgotten(self, engine: Engine) -> None:
        size = engine.space.block_tokens
        sealed, codec = self.sealed(engine)
        context = engine.new_context()
        engine.prefill(context, sealed.tokens[: 2 * size])
        blocks, state = self.coded(engine, sealed, codec, ["kl-0.05"] * _BLOCKS, "kl-0.05")
        engine.load(context, blocks[2:], state).wait()
        assert leading(context.levels, None) == 2 * size
        if engine.crop(context, 2 * size):
            assert [run.level for run in context.levels] == [EXACT]
            engine.prefill(context, sealed.tokens[2 * size : 3 * size])
            assert leading(context.levels, None) == 3 * size
        else:
            assert engine.space.needs_state

    def test_lossy_states_count_although_all_blocks_are_exact(self, engine: Engine) -> None:
        if not engine.space.needs_state:
            return
        sealed, codec = self.sealed(engine)
        blocks, state = self.coded(engine, sealed, codec, [EXACT] * _BLOCKS, "kl-0.01")
        assert state is not None
        context = self.loaded(engine, blocks, state)
        engine.prefill(context, random_tokens(engine, 3, seed=1))
        lossy = family(state.header.level) == "kl-0.01"
        assert (leading(context.levels, None) == len(sealed.tokens)) is lossy
        assert leading(context.levels, 0.01) == context.n

    def test_a_level_without_a_profile_changes_nothing(self, engine: Engine) -> None:
        sealed, codec = self.sealed(engine)
        blocks, state = self.coded(engine, sealed, codec, [EXACT, PACKED, "kl-0.01", EXACT, EXACT], PACKED)
        engine.codec = Codec(engine.space, profiles=ProfileStore("/nonexistent"))  # type: ignore[misc]
        context = engine.new_context()
        error = raises(ConfigError, engine.load, context, blocks, state)
        assert "calibrate" in str(error)
        assert context.n == 0
        if state is None:
            engine.load(context, blocks[:2]).wait()
            assert context.n == 2 * engine.space.block_tokens

    def test_corrupt_streams_are_never_computed_with(self, engine: Engine) -> None:
        sealed, codec = self.sealed(engine)
        rng = np.random.default_rng(3)
        for level in (PACKED, "kl-0.05"):
            data = [codec.encode(parse(block), level).copy() for block in sealed.blocks]
            _, state = self.coded(engine, sealed, codec, [level] * _BLOCKS, level)
            for _ in range(4):
                number = int(rng.integers(_BLOCKS))
                view = parse(data[number])
                planes = [plane for plane in view.layout.planes if plane.nbytes and plane.role in "kv"]
                if not planes:
                    return
                plane = planes[int(rng.integers(len(planes)))]
                at = view.offset(plane.layer, plane.role) + int(rng.integers(plane.nbytes))
                data[number][at] ^= 0x10
                context = engine.new_context()
                loading = engine.load(context, [parse(block) for block in data], state)
                raises(FormatError, engine.prefill, context, sealed.tokens[:3])
                raises(FormatError, loading.wait)
                raises(EngineError, engine.prefill, context, sealed.tokens[:3])
                data[number][at] ^= 0x10

    def test_layers_are_decoded_as_they_come(self, engine: Engine) -> None:
        sealed, codec = self.sealed(engine)
        blocks, state = self.coded(engine, sealed, codec, ["kl-0.01", PACKED, EXACT, "kl-0.05", EXACT], PACKED)
        expected = self.loaded(engine, blocks, state)
        seen: list[int] = []
        context = engine.new_context()
        loading = engine.load(context, blocks, state, seen.append)
        suffix = random_tokens(engine, 5, seed=1)
        logits = engine.prefill(context, suffix)
        loading.wait()
        assert sorted(seen) == [i for i, spec in enumerate(engine.space.layers) if spec.blocked]
        assert np.array_equal(logits, engine.prefill(expected, suffix))

        def never(layer: int) -> None:
            raise LinkDownError(f"layer {layer} does not come")

        if seen:
            broken = engine.new_context()
            loading = engine.load(broken, blocks, state, never)
            raises(LinkDownError, engine.prefill, broken, suffix)
            raises(LinkDownError, loading.wait)
