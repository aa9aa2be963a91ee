"""mem0's own Memory on our vector store and embedder; the store beside mem0's default one; threads, restarts."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ctxreuse_agents import Memory
from ctxreuse_agents.adapters import Mem0Embedder, Mem0VectorStore
from mem0 import AsyncMemory
from mem0 import Memory as Mem0
from mem0.configs.base import MemoryConfig
from mem0.vector_stores.qdrant import Qdrant
from qdrant_client import QdrantClient

from ctxreuse.errors import ConfigError, SessionError

#: Nothing listens there: who calls a model fails.
LLM = {"provider": "openai", "config": {"openai_base_url": "http://127.0.0.1:9/v1", "api_key": "none"}}
ANN, BOB = {"user_id": "ann"}, {"user_id": "bob"}


def config(memory: Memory, folder: Path) -> MemoryConfig:
    made = MemoryConfig(llm=LLM, history_db_path=str(folder / "history.db"))
    made.vector_store, made.embedder = Mem0VectorStore.config(memory), Mem0Embedder.config()
    return made


def texts(found: Any) -> list[str]:
    return [one["memory"] for one in found["results"]]


def test_mem0_adds_finds_changes_and_deletes(memory: Memory, tmp_path: Path) -> None:
    facts = Mem0(config(memory, tmp_path))
    dogs = facts.add("I keep two dogs in Paris.", **ANN, metadata={"topic": "pets"}, infer=False)["results"][0]["id"]
    facts.add("Rain makes me sad.", **ANN, metadata={"topic": "weather"}, infer=False)
    facts.add("My dogs are old.", **BOB, infer=False)
    assert texts(facts.search("puppy", filters=ANN))[0] == "I keep two dogs in Paris."
    assert texts(facts.search("dog", filters={**ANN, "topic": {"ne": "pets"}}, threshold=0.0)) == ["Rain makes me sad."]
    found = facts.search("dog", filters=ANN, explain=True)["results"][0]
    assert found["score_details"]["bm25_score"] > 0, "words count as well"
    either = {**ANN, "OR": [{"topic": "pets"}, {"topic": {"in": ["cars"]}}]}
    assert texts(facts.search("anything", filters=either, threshold=0.0)) == ["I keep two dogs in Paris."]
    facts.update(dogs, data="I keep three dogs in Rome.")
    assert facts.get(dogs)["memory"] == "I keep three dogs in Rome."
    assert len(texts(facts.get_all(filters=ANN))) == 2
    facts.delete(dogs)
    assert facts.get(dogs) is None
    facts.delete_all(**ANN)
    assert texts(facts.get_all(filters=ANN)) == []
    assert texts(facts.get_all(filters=BOB)) == ["My dogs are old."]
    facts.reset()
    assert texts(facts.get_all(filters=BOB)) == []


def test_facts_are_there_after_a_restart(tmp_path: Path) -> None:
    for known in ([], ["I keep two dogs."]):
        with Memory.open(tmp_path / "notes") as memory:
            facts = Mem0(config(memory, tmp_path))
            assert texts(facts.search("dogs", filters=ANN)) == known
            if not known:
                facts.add("I keep two dogs.", **ANN, infer=False)


def test_tasks_add_and_search_at_once(memory: Memory, tmp_path: Path) -> None:
    async def story() -> list[str]:
        facts = AsyncMemory(config(memory, tmp_path))
        await asyncio.gather(*(facts.add(f"Boat {n} is red.", **ANN, infer=False) for n in range(12)))
        return texts(await facts.search("boat", filters=ANN, top_k=20))

    assert sorted(asyncio.run(story())) == sorted(f"Boat {n} is red." for n in range(12))


def reference(size: int) -> Any:
    store = Qdrant("r", size, client=QdrantClient(":memory:"))
    store._has_bm25_slot = False  # words are another test's
    return store


FILTERS: list[dict[str, Any]] = [
    {},
    {"user_id": "a"},
    {"user_id": "a", "n": 3},
    {"n": {"gt": 2, "lte": 5}},
    {"n": {"ne": 3}},
    {"user_id": {"in": ["a", "c"]}},
    {"user_id": {"nin": ["a"]}},
    {"user_id": ["a", "b"]},
    {"tags": "x"},
    {"at": {"gte": "2026-01-05"}},
    {"text": {"contains": "one"}},
    {"$or": [{"user_id": "a"}, {"n": {"lt": 2}}]},
    {"$not": [{"user_id": "a"}, {"n": {"lt": 2}}]},
    {"AND": [{"user_id": "a"}, {"OR": [{"n": 1}, {"n": 2}]}]},
    {"no": 1},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_it_finds_what_the_default_store_finds(memory: Memory, filters: dict[str, Any]) -> None:
    ours, theirs, dice = Mem0VectorStore(memory), reference(8), random.Random(7)
    rows = np.random.default_rng(7).normal(size=(60, 8)).tolist()
    payloads = [
        {
            "user_id": dice.choice("abc"),
            "tags": dice.sample(["x", "y", "z"], 2),
            "at": f"2026-01-{dice.randint(1, 9):02}",
            "text": dice.choice(["one", "two", "one two"]),
            **({"n": dice.randint(0, 6)} if dice.random() < 0.8 else {}),
        }
        for _ in rows
    ]
    ids = [f"{number:032x}" for number in range(60)]
    names = [f"{one[:8]}-{one[8:12]}-{one[12:16]}-{one[16:20]}-{one[20:]}" for one in ids]
    ours.insert(rows, payloads, names)
    theirs.insert(rows, payloads, names)
    for id in names[::7]:
        ours.delete(id)
        theirs.delete(id)
    ours.update(names[1], vector=[1.0] * 8)
    theirs.update(names[1], vector=[1.0] * 8, payload=payloads[1])
    for query in rows[:5]:
        here = ours.search("", query, top_k=50, filters=filters)
        there = theirs.search("", query, top_k=50, filters=filters)
        positive = [one for one in there if one.score > 0]
        assert [one.id for one in here[: len(positive)]] == [one.id for one in positive]
        assert [one.score for one in here[: len(positive)]] == pytest.approx([one.score for one in positive], abs=1e-5)
        assert {one.id for one in here} == {one.id for one in there}
        assert [one.payload for one in here[:3]] == [payloads[names.index(one.id)] for one in here[:3]]
    found = {one.id for one in ours.list(filters=filters)[0]}
    assert found == {one.id for one in theirs.list(filters=filters, top_k=100)[0]}


def test_a_rare_row_is_found_by_a_filter(memory: Memory) -> None:
    store = Mem0VectorStore(memory)
    rows = np.random.default_rng(1).normal(size=(2000, 16))
    store.insert(rows.tolist(), [{"user_id": "rare" if n == 1234 else "often"} for n in range(2000)])
    found = store.search("", (-rows[1234]).tolist(), top_k=1, filters={"user_id": "rare"})
    assert [one.payload for one in found] == [{"user_id": "rare"}]


def test_two_stores_on_one_collection_see_each_other(memory: Memory) -> None:
    first, second = Mem0VectorStore(memory, "c"), Mem0VectorStore(memory, "c")
    for n in range(6):
        (first if n % 2 else second).insert([[1.0, n]], [{"data": f"word{n}"}], [str(n)])
    assert [one.id for one in first.list()[0]] == [one.id for one in second.list()[0]] == list("543210")
    assert [one.id for one in second.keyword_search("word3")] == ["3"]
    first.delete("3")
    assert second.keyword_search("word3") == []
    first.reset()
    assert second.col_info()["count"] == 0
    assert first.list_cols() == ["c"]


def test_threads_insert_and_delete(memory: Memory) -> None:
    store = Mem0VectorStore(memory)

    def one(number: int) -> None:
        for n in range(10):
            store.insert([[number, n + 1.0]], [{"n": n}], [f"{number}/{n}"])
            store.search("", [1.0, 1.0], top_k=3)
        for n in range(0, 10, 2):
            store.delete(f"{number}/{n}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(8)))
    kept = sorted(f"{number}/{n}" for number in range(8) for n in range(1, 10, 2))
    assert sorted(one.id for one in store.list()[0]) == kept
    assert sorted(one.id for one in Mem0VectorStore(memory).search("", [1.0, 1.0], top_k=100)) == kept


def test_many_deletions_leave_no_room_behind(memory: Memory) -> None:
    store = Mem0VectorStore(memory)
    for n in range(300):
        store.insert([[1.0, n]], ids=[str(n)])
        if n >= 10:
            store.delete(str(n - 10))
        store.search("", [1.0, 1.0])
    assert len(store._loaded._ids) < 100
    assert {one.id for one in store.search("", [1.0, 1.0], top_k=50)} == {str(n) for n in range(290, 300)}


@pytest.mark.parametrize(
    ("what", "error"),
    [
        (lambda store: store.insert([[1.0, 2.0, 3.0]]), "have 2 numbers, not 3"),
        (lambda store: store.search("", [1.0]), "have 2 numbers, not 1"),
        (lambda store: store.insert([[1.0, float("nan")]]), "not finite"),
        (lambda store: store.insert([["x", "y"]]), "no vectors"),
        (lambda store: store.insert([[1.0, 2.0]], [{}], []), "1 payloads and 0 ids"),
        (lambda store: store.insert([[1.0, 2.0]], [{"x": object()}]), "cannot be stored"),
        (lambda store: store.update("nobody", vector=[1.0, 2.0]), "no vector 'nobody'"),
        (lambda store: store.search("", [1.0, 2.0], filters={"data": {"like": 1}}), "no comparison 'like'"),
        (lambda store: store.search("", [1.0, 2.0], filters={"OR": {"a": 1}}), "no list of filters"),
        (lambda store: store.create_col("x", 2, "euclid"), "compared by cosine"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(memory: Memory, what: Any, error: str) -> None:
    store = Mem0VectorStore(memory)
    store.insert([[1.0, 2.0]], [{"data": "here"}], ["../../etc/passwd\x1b"])
    with pytest.raises((ConfigError, SessionError), match=error):
        what(store)
    assert [one.id for one in store.list()[0]] == ["../../etc/passwd\x1b"]


def test_what_was_deleted_leaves_the_file(tmp_path: Path) -> None:
    with Memory.open(tmp_path / "notes") as memory:
        store = Mem0VectorStore(memory)
        store.insert([[1.0, 2.0]] * 2, [{"data": "a-secret-of-mine"}, {"data": "something else"}], ["a", "b"])
        store.delete("a")
        memory.compact()
    files = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(b"a-secret-of-mine" in content for content in files)
    assert any(b"something else" in content for content in files)
