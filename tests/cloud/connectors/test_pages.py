"""Pages of another engine become planes and come back, in each layout, type and kernel table, as numpy says."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from ctxreuse_cloud.connectors.pages import LAYOUTS, LayerPages, find_layout, layout_of_pages

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
