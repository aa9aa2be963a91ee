"""Our codec keeps the contract: in every numeric type, with a card made for the model and with a plain one."""

from __future__ import annotations

import pytest

from ctxreuse.block.format import BlockView
from ctxreuse.codec import Codec
from ctxreuse.testing.codec import CodecContract
from ctxreuse.testing.profiles import plain_profile
from support.profiles import make_block, make_profile, make_space


class OfType(CodecContract):
    dtype = "float32"

    def codec(self) -> Codec:
        space = make_space(self.dtype)
        return Codec(space, ("1" * 64, make_profile(space)))

    def blocks(self) -> list[BlockView]:
        space = make_space(self.dtype)
        card = make_profile(space)
        # The first of a context, whose first tokens stay raw, and others.
        return [make_block(space, card, start=start, seed=start) for start in (0, 64, 192)]


class TestFloat32(OfType):
    pass


class TestFloat16(OfType):
    dtype = "float16"


class TestBfloat16(OfType):
    dtype = "bfloat16"


class TestPlain(OfType):
    def codec(self) -> Codec:
        space = make_space()
        return Codec(space, ("2" * 64, plain_profile(space, self.blocks())))


class TestWithoutACard(OfType):
    def codec(self) -> Codec:
        return Codec(make_space())

    def test_there_is_nothing_lossy(self) -> None:
        assert not any(info.lossy for info in self.codec().levels)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_codec_reads_what_another_of_the_same_card_wrote(dtype: str) -> None:
    maker = TestBfloat16 if dtype == "bfloat16" else TestFloat32
    one, two, view = maker().codec(), maker().codec(), maker().blocks()[1]
    from ctxreuse.block.format import parse

    for info in one.levels:
        assert (
            two.decode(parse(one.encode(view, info.name))).tobytes()
            == one.decode(parse(one.encode(view, info.name))).tobytes()
        )
