"""Replays count what they say they count."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.errors import ConfigError, CtxReuseError
from ctxreuse.lab.replay import Counting, Line, bound, count, serve
from ctxreuse.lab.show import sentence
from ctxreuse.lab.study import Study, default_capacities, parse_capacity
from ctxreuse.store.policy import Shadow, make_policy
from ctxreuse.store.policy.native import NATIVE
from oracle.policy.lru import LRU
from support.examples import examples
from support.traces import forests, packed


class Witness(Shadow[int]):
    """Notes for each block since when it lies there unused, and adds up what came of it."""

    def __init__(self, policy: Any, capacity: int) -> None:
        super().__init__(policy, capacity)
        self.since: dict[int, float] = {}
        self.used = self.lost = 0.0
        self.hits = 0

    def request(self, path: Sequence[int], sizes: Any, tokens: Any, now: float) -> Any:
        for block in takewhile(self.__contains__, path):
            self.used += now - self.since[block]
            self.hits += 1
        served = super().request(path, sizes, tokens, now)
        for block in served.evicted:
            if block in self.since and block not in path:
                self.lost += now - self.since[block]
        self.since |= dict.fromkeys(path, now)
        return served


@examples("normal")
@given(paths=forests(40), capacity=st.integers(1, 20), data=st.data())
def test_waste_is_what_no_hit_followed(paths: list[list[int]], capacity: int, data: Any) -> None:
    gap = data.draw(st.floats(0.1, 10))
    study = Study(packed(paths, gap=gap), block_bytes=1_000_000_000)
    witness: list[Witness] = []

    def make(policy: Any, size: int) -> Witness:
        witness.append(Witness(policy, size))
        return witness[-1]

    served = serve(study.trace, LRU(), capacity, shadow=make)
    seen = witness[0]
    seen.check()
    counting = Counting(10**9, study.line)
    outcome = count(study.trace, served, study.future, counting, policy="lru", capacity=capacity)
    end = gap * (len(paths) - 1)
    left = sum(end - seen.since[block] for block in seen.since if block in seen)
    assert outcome.block_hit * max(1, sum(map(len, paths))) == pytest.approx(seen.hits)
    assert outcome.waste_gbs == pytest.approx(seen.lost + left, abs=1e-6)
    assert outcome.cached_gbs == pytest.approx(seen.lost + left + seen.used, abs=1e-6)


def test_figures_of_a_small_trace() -> None:
    trace = packed([[1, 2], [3], [1, 2], [3]], gap=2.0)
    study = Study(trace, block_bytes=100, line=Line(1.0, 0.5))
    endless, belady, lru = study.run(["lru"], [200])
    assert (endless.policy, belady.policy, lru.policy) == ("infinite", "belady", "lru")
    assert endless.block_hit == endless.token_hit == 0.5
    # Eight tokens of the first context: 8 + 0.5 * 64 / 2; four of the second.
    assert endless.seconds_saved == 24 + 8
    assert endless.seconds == 2 * (24 + 8)
    assert (endless.bytes_read, endless.bytes_written) == (300, 300)
    assert endless.cached_gbs == pytest.approx((2 + 3 + 3) * 2 * 100 / 1e9)
    assert endless.waste_gbs == pytest.approx(2 * 2 * 100 / 1e9)  # what the third request left
    # Two of three blocks fit: Belady keeps the first context's, LRU loses one of them to the second context.
    assert belady.block_hit == pytest.approx(2 / 6)
    assert belady.waste_gbs is None
    assert lru.block_hit == pytest.approx(1 / 6)
    assert lru.bytes_written == 500
    assert "lru saves" in sentence([endless, belady, lru])
    assert "not the limit" not in sentence([endless, belady, lru])
    said = sentence(list(study.run(["lru", "lfu"], [200, 300, 400])))
    assert said.endswith("From 300B on capacity is not the limit: an endless store would save no more.")


def test_only_the_window_is_counted() -> None:
    trace = packed([[1, 2], [1, 2], [3], [1, 2]])
    outcome = next(iter(Study(trace, block_bytes=1, window=(2, 4)).run([], [])))
    assert (outcome.first, outcome.last, outcome.block_hit) == (2, 4, 2 / 3)
    # Of the memory held, too: from the third request to the fourth.
    assert outcome.cached_gbs == pytest.approx(3e-9)
    assert outcome.waste_gbs == pytest.approx(1e-9)


def test_policies_are_told_why_turns_stopped_and_when() -> None:
    told: list[tuple[int, int, float, int]] = []

    class Marked(LRU[int]):
        requests = 0

        def access(self, path: Sequence[int], now: float) -> None:
            self.requests += 1
            super().access(path, now)

        def on_pause(self, tip: int, label: int, now: float) -> None:
            told.append((tip, label, now, self.requests))

    trace = packed([[1], [2], [1], [3]], gap=10.0, stop=[1, 2, 0, 1], busy=[15.0, 2.0, 1.0, 5.0])
    serve(trace, Marked(), 10)
    # The first answer ends while the second is made; the last one ends after the trace.
    assert told == [(1, 2, 12.0, 2), (0, 1, 15.0, 2), (0, 0, 21.0, 3)]


def test_part_filled_blocks() -> None:
    seen: list[tuple[Any, Any]] = []

    class Watched(Shadow[int]):
        def request(self, path: Sequence[int], sizes: Any, tokens: Any, now: float) -> Any:
            seen.append((sizes, list(tokens)))
            return super().request(path, sizes, tokens, now)

    trace = packed([[1, 2], [3]])
    trace.tokens[:] = [7, 9]
    serve(trace, LRU(), 10, block_bytes=50, shadow=Watched)
    assert seen == [(50, [4, 3]), (50, [4])]


def test_bounds_need_no_policy() -> None:
    trace = packed([[1, 2], [1, 2]])
    study = Study(trace, block_bytes=1)
    assert bound(trace, "infinite", study.future, 0).cached.tolist() == [2, 2]
    with pytest.raises(ConfigError, match="belady is a bound"):
        list(study.run(["belady"], [10]))
    with pytest.raises(ConfigError, match="no eviction policy 'fifi'"):
        list(study.run(["fifi"], [10]))
    with pytest.raises(ConfigError, match="less than a block"):
        list(Study(trace, block_bytes=100).run(["lru"], [99]))


@examples("heavy")
@given(paths=forests(60), capacity=st.integers(1, 15))
def test_native_twins_serve_the_same(paths: list[list[int]], capacity: int) -> None:
    study = Study(packed(paths), block_bytes=100)
    for name in NATIVE:
        twin = study.replay(name, capacity * 100)
        plain = serve(study.trace, make_policy(name, capacity * 100), capacity, block_bytes=100)
        assert twin.bytes_read == int(plain.hits.sum()) * 100, name


def test_other_experts() -> None:
    paths = [[1, 2], [3], [1, 2], [4], [5], [1, 2]] * 5
    outcome = Study(packed(paths), block_bytes=1).replay("adaptive:lru+s3fifo", 3)
    assert 0 <= outcome.block_hit < 1
    # Coins are thrown with a seed: a study is the same again.
    assert Study(packed(paths), block_bytes=1).replay("adaptive:lru+s3fifo", 3).block_hit == outcome.block_hit


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4e9), ("1Mtok", 1e8), ("2.5mtok", 2.5e8), ("500ktok", 5e7), ("10 tok", 1e3), ("64 tokens", 6.4e3)],
)
def test_capacities(text: str, size: float) -> None:
    assert parse_capacity(text, 100) == size


@pytest.mark.parametrize("text", ["", "x", "tok", "-1Mtok", "1e999tok", "4GBtok", "nantok"])
def test_no_capacities(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_capacity(text, 100)


def test_default_capacities_are_where_policies_differ() -> None:
    trace = packed([list(range(1000))])
    sizes = default_capacities(trace, 1000)
    assert sizes == sorted(set(sizes))
    assert 10_000 <= sizes[0] < sizes[-1] <= 250_000
    assert default_capacities(packed([[1]]), 7) == [7]


def test_the_price_of_policies_is_that_of_the_figures() -> None:
    line = Line(0.5, 0.25)
    assert line.rebuild(0, 8) == line.saved(np.array([8]))[0]
    assert line.rebuild(8, 4) == pytest.approx(line.rebuild(0, 12) - line.rebuild(0, 8))


def test_side_by_side_is_the_same() -> None:
    rng = np.random.default_rng(5)
    paths = [list(range(k * 10, k * 10 + 6)) for k in rng.zipf(1.4, 700) % 40]
    study = Study(packed(paths, stop=[1] * 700, busy=[0.5] * 700), block_bytes=10)
    told: list[tuple[str, int, int]] = []
    ask = (["lru", "adaptive"], [300, 900])
    alone = list(study.run(*ask, lambda *at: told.append(at)))
    assert told[-1] == ("adaptive", 900, 4 * 700)
    assert [at[2] for at in told] == sorted(at[2] for at in told)
    together = list(study.run(*ask, lambda *at: told.append(at), jobs=2))
    assert told[-1] == ("adaptive", 900, 4 * 700)
    same = [(o.policy, o.capacity, o.token_hit, o.waste_gbs) for o in alone]
    assert [(o.policy, o.capacity, o.token_hit, o.waste_gbs) for o in together] == same


def test_who_leaves_early_leaves_no_process_behind() -> None:
    before = set(multiprocessing.active_children())
    rows = [list(range(n % 50 * 100, n % 50 * 100 + 100)) for n in range(4000)]
    found = Study(packed(rows), block_bytes=1).run(["lru"], [1000, 2000, 3000], jobs=2)
    assert next(found).policy == "infinite"
    assert next(found).policy == "belady"
    assert next(found).policy == "lru"
    found.close()  # type: ignore[attr-defined]
    assert set(multiprocessing.active_children()) <= before


def ends_its_process(name: str, capacity: int, line: Line) -> Any:
    if multiprocessing.parent_process() is not None:
        os._exit(9)
    return LRU()


def test_a_process_that_dies_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    # Found by its module's name in the processes, too.
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import test_study

    study = Study(packed([[1], [2]]), block_bytes=1, make=test_study.ends_its_process)
    with pytest.raises(CtxReuseError, match=r"died.*fewer --jobs"):
        list(study.run(["a", "b"], [10], jobs=2))
