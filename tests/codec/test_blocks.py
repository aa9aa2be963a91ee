"""Whole blocks in one native call: the bytes of plane after plane, from any thread, and errors that name the plane."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from codec.test_codec import ALONE, HEADS, LOSSY, PLANES, codec_of
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.block.format import BlockView, parse
from ctxreuse.block.levels import JOINT
from ctxreuse.codec.planes import plane_coder, raw_type
from ctxreuse.codec.profile import SINKS
from ctxreuse.errors import FormatError
from ctxreuse.kernels import RansTables
from oracle.codec import planes as reference
from support.examples import examples
from support.klt_planes import encode_plane
from support.profiles import DIM, make_block, make_space


def by_planes(codec, view: BlockView, level: str, *, refinement: bool = False) -> dict[tuple[int, str], bytes]:
    """Each plane in a call of its own."""
    tables, number = RansTables(codec.profile.tables), codec.profile.number(level)
    made = {}
    for place in PLANES:
        coder, bits = plane_coder(codec.profile, number, *place, tables), view.array(*place)
        tokens = bits.shape[1]
        start = view.header.end - tokens
        undo = None if coder.ropes[0] is None else coder.ropes[0].span_tables(start, tokens, undo=True)
        made[place], _ = encode_plane(
            coder.native, bits, codec.space.dtype, 0, (tokens * DIM, DIM, 1), [tokens], raw_first=max(SINKS - start, 0),
            raw_dtype=raw_type(codec.space.dtype), angles=undo, refinement=refinement,
        )  # fmt: skip
    return made


@examples("light")
@given(
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    style=st.sampled_from(["half", "pairs", "none"]),
    groups=st.sampled_from([(3,), (1, 2)]),
    version=st.sampled_from([1, 2, 3]),
    tokens=st.sampled_from([1, 5, 64, 70]),
    start=st.sampled_from([0, 2, 64]),
    level=st.sampled_from(ALONE),
)
def test_a_block_has_the_bytes_of_its_planes(dtype, style, groups, version, tokens, start, level):
    space = make_space(dtype, tokens)
    codec = codec_of(space, style=style, groups=groups, version=version)
    block = make_block(space, codec.profile, start=start)
    coded = parse(codec.encode(block, level))
    assert {place: bytes(coded.plane(*place)) for place in PLANES} == by_planes(codec, block, level)
    back = parse(codec.decode(coded))
    for place in PLANES:
        alone = np.zeros((HEADS, tokens, DIM), back.array(*place).view(f"u{block.array(*place).itemsize}").dtype)
        codec.fill([coded], *place, alone, 0)
        assert (alone == back.array(*place).view(alone.dtype)).all()
    if level == "kl-0.005":
        more = parse(codec.refinement(block, level))
        assert {place: bytes(more.plane(*place)) for place in PLANES} == by_planes(codec, block, level, refinement=True)


def test_any_thread_may_use_a_codec():
    space = make_space("bfloat16")
    codec = codec_of(space)
    blocks = [make_block(space, codec.profile, start=64 * i, seed=i) for i in range(6)]
    alone = codec_of(space)
    expected = [bytes(alone.encode(block, level)) for block in blocks for level in LOSSY]
    jobs = [(block, level) for block in blocks for level in LOSSY]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda job: bytes(codec.encode(*job)), jobs))
        decoded = list(pool.map(lambda data: bytes(codec.decode(parse(data))), made))
    assert made == expected
    assert decoded == [bytes(alone.decode(parse(data))) for data in expected]


@pytest.mark.parametrize("tokens", [1, 64])
def test_a_damaged_plane_is_named(tokens):
    space = make_space("bfloat16", tokens)
    codec = codec_of(space)
    block = make_block(space, codec.profile)
    coded = parse(codec.encode(block, "kl-0.05"))
    for view, call in ((block, lambda view: codec.encode(view, "kl-0.05")), (coded, codec.decode)):
        for layer, role in PLANES:
            data = np.frombuffer(view.buffer, np.uint8).copy()
            data[view.offset(layer, role) + 9] ^= 4
            with pytest.raises(FormatError, match=rf"plane '{role}' of layer {layer} is corrupt"):
                call(parse(data))


@examples("light")
@given(
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    style=st.sampled_from(["half", "pairs", "none"]),
    groups=st.sampled_from([(3,), (1, 2)]),
    tokens=st.sampled_from([1, 5, 64, 70]),
    start=st.sampled_from([0, 2, 64]),
    level=st.sampled_from(ALONE),
)
def test_joint_planes_are_coded_as_the_reference_codes_them(dtype, style, groups, tokens, start, level):
    space = make_space(dtype, tokens)
    codec = codec_of(space, style=style, groups=groups)
    block = make_block(space, codec.profile, start=start)
    coder = plane_coder(
        codec.profile, codec.profile.number(level + JOINT), *PLANES[0], RansTables(codec.profile.tables)
    )
    whole = np.concatenate([block.array(*place) for place in PLANES])
    coded = parse(codec.encode(block, level + JOINT))
    stream = reference.encode(coder, whole, dtype, start)
    assert [bytes(coded.plane(*place)) for place in PLANES] == [stream, b"", b"", b""]
    bits = reference.decode(coder, memoryview(stream), dtype, start)
    expected = dict(zip(PLANES, bits.reshape(len(PLANES), HEADS, tokens, DIM)))
    back = parse(codec.decode(coded))
    for place in PLANES[::-1]:
        assert (back.array(*place).view(bits.dtype) == expected[place]).all()
        alone = np.zeros((HEADS, tokens, DIM), bits.dtype)
        codec.fill([coded], *place, alone, 0)
        assert (alone == expected[place]).all()
    if level == "kl-0.005":
        more = parse(codec.refinement(block, level + JOINT))
        assert bytes(more.plane(*PLANES[0])) == reference.refine(coder, whole, dtype, start)
