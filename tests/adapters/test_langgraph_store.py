"""LangGraph's store: the same answers as its in-memory one, expiry, search by words, threads and tasks."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import Memory
from ctxreuse_agents.adapters import LangGraphStore
from langgraph.store.base import InvalidNamespaceError, PutOp, SearchOp
from langgraph.store.memory import InMemoryStore

from ctxreuse.clock import SteadyClock
from ctxreuse.errors import CtxReuseError
from ctxreuse.store.items import Items, item_key
from ctxreuse.testing.clock import FakeClock

NAMES = ["a", "b", "ab", "*x", "ü"]


def plain(item: Any) -> Any:
    return None if item is None else (item.namespace, item.key, item.value)


def test_it_answers_as_the_store_in_memory_does(memory: Memory) -> None:
    ours, theirs, dice = LangGraphStore(memory), InMemoryStore(), random.Random(7)
    filters = [None, {"n": 3}, {"n": {"$gt": 4}}, {"n": {"$ne": 2}, "deep": {"x": 1}}, {"tags": ["a", "b"]}, {"no": 1}]
    for _ in range(400):
        namespace = tuple(dice.choice(NAMES) for _ in range(dice.randint(1, 3)))
        key, kind = dice.choice("kln"), dice.randrange(6)
        if kind < 3:
            value = {
                "n": dice.randint(0, 8),
                "deep": {"x": dice.randint(0, 1)},
                "tags": ["a", "b"][: dice.randint(0, 2)],
            }
            ours.put(namespace, key, value)
            theirs.put(namespace, key, value)
        elif kind == 3:
            ours.delete(namespace, key)
            theirs.delete(namespace, key)
        elif kind == 4:
            assert plain(ours.get(namespace, key)) == plain(theirs.get(namespace, key))
        else:
            prefix, wanted = namespace[: dice.randint(0, 2)], dice.choice(filters)
            found = [plain(one) for one in ours.search(prefix, filter=wanted, limit=1000)]
            others = [plain(one) for one in theirs.search(prefix, filter=wanted, limit=1000)]
            assert sorted(found, key=repr) == sorted(others, key=repr)
            assert [plain(one) for one in ours.search(prefix, filter=wanted, limit=3, offset=2)] == found[2:5]
            suffix, depth = dice.choice([None, ("a",), ("*", "b")]), dice.choice([None, 1, 2])
            wanted = {"prefix": prefix or None, "suffix": suffix, "max_depth": depth, "limit": 1000}
            here, there = ours.list_namespaces(**wanted), theirs.list_namespaces(**wanted)
            alive = {one.namespace[:depth] for one in theirs.search((), limit=1000)}  # it lists empty ones, too
            assert here == [one for one in there if one in alive and one in here]
            assert {one for one in there if one in alive and depth is None} <= {*here}


def test_values_survive_and_times_are_kept(tmp_path: Path) -> None:
    clock = [1000.0]
    with Memory.open(tmp_path / "m") as memory:
        LangGraphStore(memory, clock=lambda: clock[0]).put(("users", "anna"), "pets", {"dogs": 2})
    clock[0] = 2000.0
    with Memory.open(tmp_path / "m") as memory:
        store = LangGraphStore(memory, clock=lambda: clock[0])
        store.put(("users", "anna"), "pets", {"dogs": 3})
        item = store.get(("users", "anna"), "pets")
        assert (item.value, item.created_at.timestamp(), item.updated_at.timestamp()) == ({"dogs": 3}, 1000.0, 2000.0)


def test_values_expire_and_reading_keeps_them(memory: Memory) -> None:
    clock = [1_000_000.0]
    store = LangGraphStore(memory, ttl={"default_ttl": 10}, clock=lambda: clock[0])
    store.put(("a",), "short", {"x": 1})
    store.put(("a",), "long", {"x": 2}, ttl=100)
    store.put(("a",), "always", {"x": 3}, ttl=None)
    clock[0] += 9 * 60
    assert store.get(("a",), "short").value == {"x": 1}  # which makes it last 10 minutes more
    clock[0] += 9 * 60
    assert store.get(("a",), "short", refresh_ttl=False).value == {"x": 1}
    clock[0] += 2 * 60
    assert store.get(("a",), "short") is None
    assert [one.key for one in store.search(("a",), refresh_ttl=False)] == ["always", "long"]
    clock[0] += 100 * 60
    store.put(("b",), "other", {"x": 4})  # a write takes away what has expired
    with Items(memory.ledger).read() as table:
        assert len(table.keys(item_key("langgraph", "store"))) == 2
        assert len(table.keys(item_key("langgraph", "expiry"))) == 1
    clock[0] -= 1e6  # a clock that was wrong
    assert store.get(("a",), "always").value == {"x": 3}
    assert store.get(("b",), "other").value == {"x": 4}


def test_a_clock_that_is_set_ends_no_values_life(memory: Memory) -> None:
    clock = FakeClock()
    memory._state.keeper.clock = SteadyClock(clock=clock)
    store = LangGraphStore(memory, ttl={"default_ttl": 10})
    store.put(("a",), "k", {"x": 1})
    for year in (3e7, -6e7, 0):  # right or wrong
        clock.jump(1_700_000_000.0 + year)
        store.put(("b",), "other", {"x": 2}, ttl=None)
        assert store.get(("a",), "k", refresh_ttl=False) is not None
    clock.advance(601)
    assert store.get(("a",), "k") is None


def test_a_query_puts_what_has_its_words_first(memory: Memory) -> None:
    store = LangGraphStore(memory)
    store.put(("n",), "1", {"text": "The cat sleeps."})
    store.put(("n",), "2", {"text": "Two dogs bark at a dog."})
    store.put(("n",), "3", {"text": "A dog and a cat."})
    store.put(("n",), "4", {"text": "dog", "secret": "dog"}, index=False)
    store.put(("n",), "5", {"text": "nothing", "more": ["running dogs"]}, index=["more[0]"])
    found = store.search(("n",), query="dogs")
    assert [one.key for one in found if one.score is not None] == ["2", "3", "5"] or found[0].key in ("2", "5")
    assert {one.key for one in found if one.score is None} == {"1", "4"}
    assert [one.key for one in store.search(("n",), query="dogs", limit=1, offset=4)] == [found[4].key]


@pytest.mark.parametrize("namespace", [(), ("a.b",), ("",), ("langgraph",), (5,), ("a\0b",)])
def test_namespaces_that_cannot_be_are_refused(memory: Memory, namespace: Any) -> None:
    with pytest.raises(InvalidNamespaceError):
        LangGraphStore(memory).put(namespace, "k", {"x": 1})


def test_what_cannot_be_stored_is_refused_and_nothing_of_the_batch_stays(memory: Memory) -> None:
    store = LangGraphStore(memory)
    with pytest.raises(CtxReuseError):
        store.batch([PutOp(("a",), "k", {"x": 1}), PutOp(("a",), "l", {"x": object()})])
    assert store.batch([SearchOp(("a",))]) == [[]]
    with pytest.raises(CtxReuseError):
        store.put(tuple("x" * 90 for _ in range(9)), "k", {"x": 1})


def test_threads_and_tasks_use_two_stores_on_one_memory(memory: Memory) -> None:
    stores = [LangGraphStore(memory), LangGraphStore(memory)]

    def work(number: int) -> None:
        for turn in range(5):
            stores[turn % 2].put(("t", str(number)), str(turn), {"n": number})

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))

    async def task(number: int) -> None:
        for turn in range(5):
            await stores[turn % 2].aput(("t", str(number)), f"a{turn}", {"n": number})

    async def tasks() -> None:
        await asyncio.gather(*(task(number) for number in range(6)))

    asyncio.run(tasks())
    assert len(stores[0].search(("t",), limit=1000)) == 60
    assert len(stores[1].list_namespaces(prefix=("t",))) == 6
