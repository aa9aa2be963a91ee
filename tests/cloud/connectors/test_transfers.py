"""Pages go to a real store and come back in another process's memory; what is damaged or missing is said, not used."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ctxreuse_cloud.connectors.access import StoreAccess, share_store
from ctxreuse_cloud.connectors.changes import StoreChanges
from ctxreuse_cloud.connectors.pages import LAYOUTS, LayerPages, layout_of_pages
from ctxreuse_cloud.connectors.requests import PagedBlock, RequestBlocks, StepProgress
from ctxreuse_cloud.connectors.transfers import PageLoad, PageSaver, SaveBuffers

from ctxreuse.block.format import BlockWriter, block_layout, parse, rekey
from ctxreuse.block.levels import PACKED
from ctxreuse.codec import Codec
from ctxreuse.codec.profile_bytes import profile_digest, write_profile
from ctxreuse.config import StoreConfig
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.errors import ConfigError
from ctxreuse.identity.keys import ROOT, Tokens, prefix_keys, tenant_salt
from ctxreuse.llm import LLM
from ctxreuse.store import open_store
from ctxreuse.testing.clock import FakeClock
from support.paged import PagedEngine
from support.profiles import make_block, make_profile, make_space
from support.tiny_text import save_model
from support.waiting import patient, until

TOKENS = np.arange(160, dtype=np.int32)


@pytest.fixture
def access(tmp_path: Path) -> Iterator[StoreAccess]:
    found = share_store(StoreConfig(path=str(tmp_path), capacity=64 << 20))
    yield found
    found.close()


def saved(access: StoreAccess, engine: PagedEngine, tokens: Tokens = TOKENS, limit: int = 8 << 20) -> list[PagedBlock]:
    """Save the whole blocks of tokens from the pages 1, 2, …"""
    run = engine.run(tokens, list(range(1, 1 + len(tokens) // engine.shape.tokens)))
    saver = PageSaver(access, engine.space, engine.pages, limit)
    saver.save([run])
    saver.close()
    store = access.writing()
    assert store is not None
    store.flush()
    return run


def load(access: StoreAccess, engine: PagedEngine, *runs: list[PagedBlock]) -> tuple[set[int], int]:
    loading = PageLoad(access, engine.space, engine.pages, runs)
    for layer in range(len(engine.pages)):
        loading.ensure(layer)
    bad, blocks, seconds = loading.finish()
    assert seconds >= 0
    return bad, blocks


def test_pages_come_back_in_another_layout(access: StoreAccess) -> None:
    engine, other = PagedEngine("transposed"), PagedEngine("transposed", seed=1)
    run = saved(access, engine)
    back = other.run(TOKENS, [8, 2, 5, 3, 9])
    assert [block.key for block in back] == [block.key for block in run]
    assert load(access, other, back) == (set(), 5)
    for mine, theirs in zip(run, back):
        assert engine.bytes_of(mine.page) == other.bytes_of(theirs.page)


def test_the_engine_may_overwrite_pages_once_save_has_returned(access: StoreAccess) -> None:
    engine = PagedEngine()
    run = engine.run(TOKENS, [1, 2, 3, 4, 5])
    before = [engine.bytes_of(block.page) for block in run]
    saver = PageSaver(access, engine.space, engine.pages, 8 << 20)
    saver.save([run])
    for memory in engine.memory:
        memory[:] = 0
    saver.close()
    assert saver.take_counts() == {"saved": 5}
    assert load(access, engine, run) == (set(), 5)
    assert [engine.bytes_of(block.page) for block in run] == before


def test_a_damaged_block_is_reported_with_what_follows_and_dropped(access: StoreAccess) -> None:
    engine = PagedEngine()
    run = saved(access, engine)
    access.close()
    data = Path(access.config.path, "blocks", "data.mdb")
    whole = bytearray(data.read_bytes())
    plane = engine.pages[1].shape
    with open_store(access.config.path, readonly=True) as store, store.read() as reader:
        view = reader.block(run[2].key, TOKENS[64:96], engine.space.digest)
        assert view is not None
        bytes_of_v = bytes(view.plane(1, "v"))
    at = whole.find(bytes_of_v)
    assert at > 0
    whole[at + plane.dim] ^= 0x10
    data.write_bytes(whole)
    again = share_store(access.config)
    assert load(again, engine, run, run[:2]) == ({3, 4, 5}, 4)
    store = again.writing()
    assert store is not None
    assert store.match([block.key for block in run]).blocks == 2, "it is dropped, with those that need it"
    again.close()
    access.users += 1  # for the fixture


def test_missing_and_foreign_blocks_spoil_their_run_only(access: StoreAccess) -> None:
    engine = PagedEngine()
    run = saved(access, engine)
    unknown = engine.run(TOKENS + 1, [6, 7])
    liar = [*run[:1], PagedBlock(run[1].key, run[1].parent, unknown[1].tokens, run[1].end, 8)]
    assert load(access, engine, unknown, liar, run[:3]) == ({6, 7, 8}, 4)


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"tokens": 64}, {"heads": 2}])
def test_another_type_or_page_size_misses(access: StoreAccess, change: dict[str, object]) -> None:
    run = saved(access, PagedEngine())
    other = PagedEngine(**change)  # type: ignore[arg-type]
    assert load(access, other, other.run(TOKENS, [1, 2]))[1] == 0
    claimed = [PagedBlock(block.key, block.parent, block.tokens, block.end, block.page) for block in run]
    assert load(access, other, claimed) == ({1, 2, 3, 4, 5}, 0), "also where a key is claimed"


def test_memory_for_saves_is_bounded(access: StoreAccess) -> None:
    engine = PagedEngine(pages=70)
    tokens = np.arange(64 * 32, dtype=np.int32)
    run = engine.run(tokens, list(range(1, 65)))
    saver = PageSaver(access, engine.space, engine.pages, 1)
    saver.save([run])
    saver.close()
    counts = saver.take_counts()
    assert counts["saved"] >= 1
    assert counts["unsaved_memory"] >= 1
    assert counts.total() == 64
    assert load(access, engine, run)[1] == counts["saved"], "no block is stored without those before it"


def test_blocks_are_saved_once(access: StoreAccess) -> None:
    engine = PagedEngine()
    run = saved(access, engine)
    saver = PageSaver(access, engine.space, engine.pages, 8 << 20)
    saver.save([run, run])
    saver.close()
    assert saver.take_counts() == {}


def test_a_full_store_evicts_and_goes_on(tmp_path: Path) -> None:
    access = share_store(StoreConfig(path=str(tmp_path), capacity=1 << 20))
    engine = PagedEngine(dim=64)
    for first in range(0, 5000, 500):
        saved(access, engine, TOKENS + first)
    store = access.writing()
    assert store is not None
    assert store.stats().nbytes <= 1 << 20
    assert store.stats().evicted > 0
    store.check()
    access.close()


def test_buffers_are_free_again_when_nothing_refers_to_them() -> None:
    buffers = SaveBuffers(5000, 20_000)
    one, two = buffers.take(), buffers.take()
    assert one is not None
    assert two is not None
    assert buffers.take() is None
    part = one[:100]
    del one
    assert buffers.take() is None
    view = part.data[5:10]
    del part
    assert buffers.take() is None
    del view
    assert buffers.take() is not None


BESIDE = """
import sys
from ctxreuse.config import StoreConfig
from ctxreuse.testing.clock import FakeClock
from ctxreuse_cloud.connectors.access import StoreAccess
clock = FakeClock()
access = StoreAccess(StoreConfig(path=sys.argv[1]), clock)
print(access.reading() is not None, access.writing() is not None, flush=True)
input()
print(access.writing() is not None, flush=True)
clock.advance(5)
print(access.writing() is not None, flush=True)
access.close()
"""


def test_a_process_reads_beside_the_writer_and_becomes_it_after_its_end(tmp_path: Path) -> None:
    writer = StoreAccess(StoreConfig(path=str(tmp_path)))
    assert writer.reading() is None, "no store yet"
    saved(writer, PagedEngine())
    words = [sys.executable, "-c", BESIDE, str(tmp_path)]
    other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline().split() == ["True", "False"]
    writer.close()
    answer, _ = other.communicate("\n", patient(60))
    assert answer.split() == ["False", "True"], "it does not try at each step"


KILLED = """
import sys
import numpy as np
from ctxreuse.config import StoreConfig
from ctxreuse_cloud.connectors.access import StoreAccess
from ctxreuse_cloud.connectors.transfers import PageSaver
from support.paged import PagedEngine
from support.profiles import make_block, make_profile, make_space
from support.tiny_text import save_model
access = StoreAccess(StoreConfig(path=sys.argv[1]))
engine = PagedEngine(pages=70)
saver = PageSaver(access, engine.space, engine.pages, 64 << 20)
for first in range(0, 1 << 30, 4096):
    saver.save([engine.run(np.arange(first, first + 2048, dtype=np.int32), list(range(1, 65)))])
    if first == 4096:
        assert saver.flush(60)
        access.writing().flush(60)
    print(first, flush=True)
"""


def test_what_a_killed_process_left_is_whole_or_missing(tmp_path: Path) -> None:
    paths = [path for path in sys.path if path]
    code = f"import sys; sys.path[:0] = {paths!r}\n" + KILLED
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    firsts = [int(process.stdout.readline()) for _ in range(4)]  # two are stored, others under way
    process.send_signal(signal.SIGKILL)
    firsts += map(int, process.communicate()[0].split())
    access = StoreAccess(StoreConfig(path=str(tmp_path)))
    store = access.writing()
    assert store is not None
    engine, back = PagedEngine(pages=70), PagedEngine(pages=70, seed=3)
    found = 0
    for first in firsts:
        tokens = np.arange(first, first + 2048, dtype=np.int32)
        run = back.run(tokens, list(range(1, 65)))
        stored = store.match([block.key for block in run]).blocks
        found += stored
        assert load(access, back, run[:stored]) == (set(), stored)
        assert all(engine.bytes_of(i) == back.bytes_of(i) for i in range(1, stored + 1))
    assert found >= 64
    store.check()
    access.close()


def test_one_process_shares_one_store(tmp_path: Path) -> None:
    config = StoreConfig(path=str(tmp_path))
    one, two = share_store(config), share_store(config)
    assert one is two
    with pytest.raises(ConfigError, match="two settings"):
        share_store(StoreConfig(path=str(tmp_path), capacity=1 << 21))
    assert one.writing() is two.reading()
    one.close()
    assert two.reading() is not None
    two.close()
    assert two.reading() is None


def test_a_store_that_cannot_be_opened_is_tried_again(tmp_path: Path) -> None:
    clock = FakeClock()
    access = StoreAccess(StoreConfig(path=str(tmp_path / "store")), clock)
    assert access.reading() is None
    open_store(tmp_path / "store").close()
    assert access.reading() is None
    clock.advance(5)
    until(lambda: access.reading() is not None)
    access.close()


def test_blocks_are_mapped_ahead_and_a_close_meanwhile_is_no_error(tmp_path: Path) -> None:
    access = StoreAccess(StoreConfig(path=str(tmp_path)))
    run = saved(access, PagedEngine())
    store = access.writing()
    assert store is not None
    hits = store.stats().hits
    access.populate(1 << 30)
    until(lambda: not any(thread.name == "ctxreuse-populate" for thread in threading.enumerate()))
    assert store.stats().hits == hits, "it is no use of a block"
    access.populate(1 << 30)
    access.close()
    until(lambda: not any(thread.name == "ctxreuse-populate" for thread in threading.enumerate()))
    assert len(run) == 5


def test_changes_of_a_store_name_what_is_stored_and_what_left(access: StoreAccess) -> None:
    store = access.writing()
    assert store is not None
    changes = StoreChanges(store)
    assert changes.take() == ([], [])
    keys = [block.key for block in saved(access, PagedEngine())]
    stored, removed = changes.take()
    assert (set(stored), removed) == (set(keys), [])
    store.drop(keys[3], "corrupt")
    stored, removed = changes.take()
    assert (stored, set(removed)) == ([], set(keys[3:]))
    changes.close()
    store.drop(keys[0], "corrupt")
    assert changes.take() == ([], [])


@pytest.fixture(scope="module")
def torch_engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from ctxreuse.engines.torch_hf import TorchEngine

    return TorchEngine.open(save_model(tmp_path_factory.mktemp("llama")))


def paged(engine: Any, layout: str, page_tokens: int, seed: int) -> tuple[PagedEngine, list[LayerPages]]:
    """Pages of another engine with the model of ``engine``, and the same pages by blocks of ``engine``."""
    space = engine.space
    sizes = {"heads": space.layers[0].kv_heads, "dim": space.layers[0].k_dim, "dtype": space.dtype}
    made = PagedEngine(layout, layers=len(space.layers), seed=seed, tokens=page_tokens, **sizes)
    found = layout_of_pages(layout, made.shape)
    assert found is not None
    made.space = space
    return made, [LayerPages(memory, made.shape, found, space.block_tokens) for memory in made.memory]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_the_torch_engine_go_through_pages_of_another_size_and_back(
    torch_engine: Any, tmp_path: Path, layout: str
) -> None:
    prompt = np.random.default_rng(2).integers(0, 256, 300, np.int32)
    planned = RequestBlocks(torch_engine.space.digest, 64, page_blocks=2)
    key = {"tenant": "default", "computed": 0}
    with LLM(torch_engine, store=tmp_path / "edge") as edge:
        whole = edge.runtime.complete(edge.runtime.request(prompt), SamplingParams(max_tokens=8))
        whole.drain()
    access = share_store(StoreConfig(path=str(tmp_path / "edge")))
    reading, (other, pages) = access.reading(), paged(torch_engine, layout, 128, 1)
    assert reading is not None
    assert planned.match("a", prompt, stored=lambda keys: reading.match(keys).blocks, **key) == 256  # type: ignore[arg-type]
    planned.allocated("a", [7, 4, 2], 256)
    plan = planned.step([StepProgress("a", 256, [7, 4, 2])])
    loading = PageLoad(access, torch_engine.space, pages, plan.loads)
    assert loading.finish()[:2] == (set(), 4)
    access.close()
    assert planned.match("b", prompt, stored=lambda keys: 0, **key) == 0  # type: ignore[arg-type]
    plan = planned.step([StepProgress("b", 256, [7, 4])])
    access = share_store(StoreConfig(path=str(tmp_path / "engine")))
    saver = PageSaver(access, torch_engine.space, pages, 8 << 20)
    saver.save(plan.saves)
    other.memory.clear()
    saver.close()
    access.close()
    with LLM(torch_engine, store=tmp_path / "engine") as edge:
        again = edge.runtime.complete(edge.runtime.request(prompt), SamplingParams(max_tokens=8))
        again.drain()
        assert again.usage.tokens.by_source["disk"] == 256
    assert again.tokens == whole.tokens


@pytest.mark.parametrize("level", [PACKED, "kl-0.01", "kl-0.01-joint"])
def test_coded_blocks_are_decoded_into_pages_where_the_engine_allows_their_level(
    access: StoreAccess, level: str
) -> None:
    space = make_space()
    profile = make_profile(space)
    codec = Codec(space, (profile_digest(write_profile(profile)).hex(), profile))
    views = [make_block(space, profile, start=64 * i, seed=i) for i in range(4)]
    prompt = np.concatenate([view.tokens for view in views])
    keys = prefix_keys(space.digest, tenant_salt(""), prompt, 64)
    store = access.writing()
    assert store is not None
    decoded = []
    for key, parent, view in zip(keys, [ROOT, *keys], views):
        coded = codec.encode(parse(rekey(view.buffer, key, parent)), level)
        assert store.put(key, coded)
        decoded.append(parse(codec.decode(parse(coded))))
    store.flush()
    engine = PagedEngine("transposed", tokens=128, dtype="float32")
    engine.space = space
    found = layout_of_pages("transposed", engine.shape)
    assert found is not None
    pages = [LayerPages(memory, engine.shape, found, 64) for memory in engine.memory]
    planned = RequestBlocks(space.digest, 64, page_blocks=2)
    planned.match("a", [*prompt.tolist(), 1], "", 0, len)
    planned.allocated("a", [5, 3, 1], 256)
    runs = planned.step([]).loads
    exact = PageLoad(access, space, pages, runs, codec=lambda: codec).finish()
    loaded = PageLoad(access, space, pages, runs, max_kl=0.01, codec=lambda: codec).finish()
    assert exact[1] == (4 if level == PACKED else 0)
    assert loaded[:2] == (set(), 4)
    for block, view in zip(runs[0], decoded):
        for layer, own in enumerate(pages):
            writer = BlockWriter(
                block_layout(space), kind="block", space=space.digest, key=block.key, parent=block.parent,
                end=block.end, tokens=view.tokens, rope_at=0,
            )  # fmt: skip
            own.save(writer, layer, block.page)
            for role in "kv":
                assert bytes(writer.plane(layer, role)) == bytes(view.plane(layer, role))
    unknown = PageLoad(access, space, pages, runs, max_kl=0.01, codec=lambda: Codec(space)).finish()
    assert unknown[1] == (4 if level == PACKED else 0), "without its profile a lossy block is a miss"
    assert store.match(keys, 0.01).blocks == 4, "and stays"


def test_a_damaged_coded_block_spoils_its_run_only_from_there(access: StoreAccess) -> None:
    space = make_space()
    profile = make_profile(space)
    view = make_block(space, profile, start=0)
    key = prefix_keys(space.digest, tenant_salt(""), view.tokens, 64)[0]
    coded = Codec(space).encode(parse(rekey(view.buffer, key, ROOT)), PACKED).copy()
    parsed = parse(coded)
    coded[parsed.offset(1, "v") + 50] ^= 0x10
    store = access.writing()
    assert store is not None
    assert store.put(key, coded)
    engine = PagedEngine(tokens=64, dtype="float32")
    run = [PagedBlock(key, ROOT, view.tokens.tobytes(), 64, 7)]
    assert PageLoad(access, space, engine.pages, [run]).finish()[:2] == ({7}, 0)
    assert store.match([key]).blocks == 0
