"""StoreLevelsContract: what any store must do with blocks of several levels; CodedContext, blocks that can be encoded.

::

    class TestMine(StoreLevelsContract):
        def open(self, folder: Path) -> Store: return MyStore(folder)
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ctxreuse.block.format import BlockWriter, Layout, Plane, block_layout, parse, reseal
from ctxreuse.block.levels import EXACT, PACKED, family
from ctxreuse.codec import Codec
from ctxreuse.identity.model import LayerSpec, ModelSpace
from ctxreuse.store.base import Store
from ctxreuse.testing.profiles import plain_profile
from ctxreuse.testing.store import Context

__all__ = ["SPACE", "CodedContext", "StoreLevelsContract", "codec", "relabelled"]

#: One full layer of one head of 32, float32: a block of 64 tokens takes 5 pages, packed fewer, coded lossily 1 or 2.
SPACE = ModelSpace("w", "made-up", "t", "float32", (LayerSpec("full", 1, 32, 32),), "null", 1 << 30, 1 << 20)


class CodedContext(Context):
    """A context of `SPACE`, whose blocks are numbers like those of a model; equal arguments give equal bytes."""

    def __init__(self, blocks: int, *, seed: int = 0, branch: int = 0, fork: int = 0) -> None:
        size = SPACE.block_tokens
        super().__init__(blocks, seed=seed, branch=branch, fork=fork, size=size, space=SPACE.digest)

    def block(self, i: int, fill: int | None = None) -> npt.NDArray[np.uint8]:
        return self._write(i, block_layout(SPACE), "block", fill)

    def state(self, i: int) -> npt.NDArray[np.uint8]:
        planes = (Plane(0, "k", "float32", (1, 32, 32)), Plane(0, "v", "float32", (1, 32, 32)))
        return self._write(i, Layout(planes), "state", None)

    def at(self, i: int, level: str, *, state: bool = False) -> npt.NDArray[np.uint8]:
        """Block (or state) ``i`` at a level of `codec`, or called ``approx~…``."""
        raw = self.state(i) if state else self.block(i)
        return relabelled(raw, level) if level.startswith("approx") else codec().encode(parse(raw), level)

    def _write(self, i: int, layout: Layout, kind: str, fill: int | None) -> npt.NDArray[np.uint8]:
        writer = BlockWriter(
            layout,
            kind="block" if kind == "block" else "state",
            space=self.space,
            key=self.keys[i],
            parent=self.parent(i),
            end=(i + 1) * self.size,
            tokens=self.run(i),
        )
        rng = np.random.default_rng(int.from_bytes(self.keys[i][:8], "little") if fill is None else fill)
        for plane in layout.planes:
            writer.plane(plane.layer, plane.role)[:] = rng.normal(size=plane.nbytes // 4).astype("<f4").view(np.uint8)
        return writer.seal()


@lru_cache(maxsize=1)
def codec() -> Codec:
    """The codec of `SPACE` with a profile for kl-0.05 and kl-0.01."""
    context = CodedContext(2)
    return Codec(SPACE, ("0" * 64, plain_profile(SPACE, [parse(context.block(i)) for i in range(2)])))


def relabelled(data: npt.NDArray[np.uint8], level: str) -> npt.NDArray[np.uint8]:
    """The same block with another level in its header."""
    return reseal(parse(data), {}, level=level)


class StoreLevelsContract(ABC):
    """Tests of one store. Its capacity must hold 64 blocks of 20 KiB."""

    @abstractmethod
    def open(self, folder: Path) -> Store:
        """Return the store under test, empty; it must encode nothing by itself."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """The store under test, closed afterwards."""
        with contextlib.closing(self.open(tmp_path)) as store:
            yield store

    def level_of(self, store: Store, context: CodedContext, i: int, max_kl: float | None) -> str | None:
        """The level at which a reader with this permission gets block ``i``; None for a miss."""
        with store.read(max_kl) as reader:
            view = context.get(reader, i)
            return None if view is None else family(view.header.level)

    def test_readers_get_what_they_allow_and_nothing_else(self, store: Store) -> None:
        context = CodedContext(5)
        for i, level in enumerate((EXACT, PACKED, "kl-0.01", "approx~kl-0.01", "kl-0.05")):
            assert store.put(context.keys[i], context.at(i, level))
        store.flush()
        for max_kl, blocks in ((None, 2), (0.0, 2), (0.002, 2), (0.01, 4), (0.05, 5)):
            assert store.match(context.keys, max_kl).blocks == blocks, max_kl
            got = [self.level_of(store, context, i, max_kl) for i in range(5)]
            assert got[:blocks] == [EXACT, PACKED, "kl-0.01", "approx", "kl-0.05"][:blocks], max_kl
            assert not any(got[blocks:]), max_kl
        misses = store.stats().misses
        assert set(misses) == {"level"}
        # A miss of this kind is the reader's affair: the block stays.
        assert store.match(context.keys, 0.05).blocks == 5
        assert store.stats().levels == {EXACT: 1, PACKED: 1, "kl-0.01": 1, "approx": 1, "kl-0.05": 1}
        assert [family(entry.level) for entry in store.walk()] == [EXACT, PACKED, "kl-0.01", "approx", "kl-0.05"]
        store.check()

    def test_peeking_allows_no_more_than_reading(self, store: Store) -> None:
        context = CodedContext(1)
        store.put(context.keys[0], context.at(0, "kl-0.01"))
        store.flush()
        for max_kl, seen in ((None, False), (0.01, True)):
            with store.read(max_kl) as reader:
                assert (reader.peek(context.keys[0]) is not None) is seen
        assert not store.stats().misses

    def test_better_levels_replace_worse_ones_and_never_the_other_way(self, tmp_path: Path) -> None:
        ladder = ("approx~kl-0.05", "kl-0.05", "approx~kl-0.01", "kl-0.01", PACKED)
        store, context = self.open(tmp_path), CodedContext(1)
        try:
            for n, level in enumerate(ladder):
                assert store.put(context.keys[0], context.at(0, level))
                for worse in ladder[:n]:
                    assert store.put(context.keys[0], context.at(0, worse))  # accepted as a duplicate
                    assert store.put(context.keys[0], context.at(0, worse), replace=True)
                store.flush()
                assert self.level_of(store, context, 0, 0.05) == family(level)
            assert store.put(context.keys[0], context.block(0))  # no better than packed
            store.flush()
            assert self.level_of(store, context, 0, None) == PACKED
            assert store.stats().blocks == 1
            store.check()
        finally:
            store.close()

    def test_states_have_levels_of_their_own(self, store: Store) -> None:
        context = CodedContext(3)
        context.fill(store)
        store.put(context.keys[0], context.state(0), kind="state")
        store.put(context.keys[1], context.at(1, "kl-0.05", state=True), kind="state")
        store.flush()
        assert store.match(context.keys).state_blocks == 1
        assert store.match(context.keys, 0.05).state_blocks == 2
        with store.read() as reader:
            assert reader.state(context.keys[1], context.run(1), context.space) is None
            assert reader.missed == "level"
        entry = store.entries(context.keys[1:2])[0]
        assert entry is not None
        assert (entry.level, family(entry.state_level)) == (EXACT, "kl-0.05")
        store.put(context.keys[1], context.state(1), kind="state")
        store.flush()
        assert store.match(context.keys).state_blocks == 2
        store.check()

    def test_what_is_no_level_of_a_block_is_refused(self, store: Store) -> None:
        context = CodedContext(1)
        for level in ("kl-0.05>kl-0.01@" + "0" * 16, "q8", "approx", "kl-", ""):
            assert not store.put(context.keys[0], relabelled(context.block(0), level))
        assert store.stats().refused == {"malformed": 5}
        assert store.stats().blocks == 0
