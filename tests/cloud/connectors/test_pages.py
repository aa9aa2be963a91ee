"""Pages of another engine become planes and come back, in each layout, type and kernel table, as numpy says."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from ctxreuse_cloud.connectors.pages import LAYOUTS, LayerPages, find_layout, layout_of_pages
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxreuse import kernels
from ctxreuse.block.format import BlockWriter, block_layout, parse
from ctxreuse.errors import ConfigError
from support.paged import PagedEngine, made_up, page_shape, write_page


@pytest.fixture(params=kernels.available())
def table(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernels.active()
    kernels.use(request.param)
    yield request.param
    kernels.use(before)


def writer(engine: PagedEngine) -> BlockWriter:
    size = engine.shape.tokens
    ids = np.zeros(size, np.int32)
    same = {"kind": "block", "space": engine.space.digest, "key": bytes(32), "parent": bytes(32)}
    return BlockWriter(block_layout(engine.space), end=size, tokens=ids, rope_at=0, **same)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(3, 32, 16), (1, 128, 64), (4, 96, 80)])
def test_planes_are_in_canonical_order_and_come_back(
    table: str, layout: str, dtype: str, sizes: tuple[int, int, int]
) -> None:
    heads, tokens, dim = sizes
    engine = PagedEngine(layout, heads=heads, tokens=tokens, dim=dim, dtype=dtype)
    planes = [[made_up(engine.shape, engine.rng) for _ in "kv"] for _ in engine.pages]
    for memory, (k, v) in zip(engine.memory, planes):
        write_page(memory, engine.shape, layout, 5, k, v)
    block = writer(engine)
    for layer, pages in enumerate(engine.pages):
        pages.save(block, layer, 5)
    view = parse(block.seal())
    for layer, (k, v) in enumerate(planes):
        assert view.plane(layer, "k").tobytes() == k.tobytes()
        assert view.plane(layer, "v").tobytes() == v.tobytes()
    around = engine.bytes_of(6), engine.bytes_of(8)
    assert all(pages.load(view, layer, 7) for layer, pages in enumerate(engine.pages))
    assert engine.bytes_of(7) == engine.bytes_of(5)
    assert (engine.bytes_of(6), engine.bytes_of(8)) == around


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_page_holds_several_blocks_each_in_its_own_place(data: st.DataObject) -> None:
    layout, dtype = data.draw(st.sampled_from(LAYOUTS)), data.draw(st.sampled_from(["bfloat16", "float32"]))
    size, count = data.draw(st.sampled_from([1, 16, 33, 64])), data.draw(st.integers(1, 5))
    heads, dim = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([8, 16, 64]))
    engine = PagedEngine(layout, layers=1, pages=3, heads=heads, tokens=size * count, dim=dim, dtype=dtype)
    place, to = data.draw(st.integers(0, 3 * count - 1)), data.draw(st.integers(0, 3 * count - 1))
    planes = [(made_up(engine.shape, engine.rng), made_up(engine.shape, engine.rng)) for _ in range(3)]
    for page, (k, v) in enumerate(planes):
        write_page(engine.memory[0], engine.shape, layout, page, k, v)
    found = layout_of_pages(layout, engine.shape)
    assert found is not None
    pages = LayerPages(engine.memory[0], engine.shape, found, size)
    space = msgspec.structs.replace(engine.space, block_tokens=size)
    same = {"kind": "block", "space": space.digest, "key": bytes(32), "parent": bytes(32)}
    block = BlockWriter(block_layout(space), end=size, tokens=np.zeros(size, np.int32), rope_at=0, **same)
    pages.save(block, 0, place)
    view = parse(block.seal())
    page, at = place // count, place % count * size
    for role, plane in zip("kv", planes[page]):
        assert view.plane(0, role).tobytes() == plane[:, at : at + size].tobytes()
    for wanted, got in zip(planes[to // count], planes[page]):
        wanted[:, to % count * size :][:, :size] = got[:, at : at + size].copy()
    expected = engine.memory[0].copy()
    for number, (k, v) in enumerate(planes):
        write_page(expected, engine.shape, layout, number, k, v)
    assert pages.load(view, 0, to)
    assert engine.memory[0].tobytes() == expected.tobytes(), "nothing else is written"
    with pytest.raises(ValueError, match="page 3 of 3"):
        pages.save(block, 0, 3 * count)


def test_a_damaged_plane_is_noticed() -> None:
    engine = PagedEngine()
    block = writer(engine)
    for layer, pages in enumerate(engine.pages):
        pages.save(block, layer, 1)
    data = block.seal()
    data[block.offset(1, "v") + 100] ^= 1
    view = parse(data)
    assert engine.pages[0].load(view, 0, 2)
    assert not engine.pages[1].load(view, 1, 2)


@pytest.mark.parametrize("page", [-1, 12, 1 << 40])
def test_a_page_outside_of_the_tensor_is_refused(page: int) -> None:
    engine = PagedEngine()
    with pytest.raises(ValueError, match="page"):
        engine.pages[0].save(writer(engine), 0, page)


def test_a_buffer_of_another_size_is_refused() -> None:
    shape = page_shape("split")
    layout = layout_of_pages("split", shape)
    assert layout is not None
    with pytest.raises(ConfigError, match="buffer"):
        LayerPages(np.zeros(shape.nbytes - 2, np.uint8), shape, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_is_found_by_what_the_engine_wrote(layout: str) -> None:
    shape = page_shape(layout)
    rng = np.random.default_rng(1)
    memory = rng.integers(0, 256, shape.nbytes, np.uint8)
    k, v = made_up(shape, rng), made_up(shape, rng)
    write_page(memory, shape, layout, 3, k, v)
    known = [plane.reshape(-1).view(np.uint8) for plane in (k, v)]
    assert find_layout(memory, shape, 3, *known).name == layout


def test_a_layout_that_nothing_explains_is_refused() -> None:
    shape = page_shape("split")
    rng = np.random.default_rng(1)
    memory = np.zeros(shape.nbytes, np.uint8)
    k, v = made_up(shape, rng), made_up(shape, rng)
    write_page(memory, shape, "split", 3, k[:, ::-1], v)  # as a kernel that packs tokens in tiles would
    with pytest.raises(ConfigError, match="attention backend"):
        find_layout(memory, shape, 3, *(plane.reshape(-1).view(np.uint8) for plane in (k, v)))
