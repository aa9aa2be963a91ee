"""Search by BM25 over an index that follows the ledger, namespaces, and what is recalled as documents of a prompt."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import AsyncMemory, Memory, NewTurn

from ctxreuse.errors import ConfigError, SessionError
from ctxreuse.store.recall.terms import MOST_PASSAGES, passages


def contents(memory: Memory, query: str, **limits: Any) -> list[str]:
    return [hit.turn.content for hit in memory.search(query, **limits)]


def test_words_are_found_in_all_their_forms_the_rarer_first(memory: Memory) -> None:
    memory.create("a").extend([NewTurn("user", text) for text in ("my dog barks", "a cat and a dog", "the cats sleep")])
    assert contents(memory, "dogs") == ["my dog barks", "a cat and a dog"]
    assert contents(memory, "barking cat dog")[0] == "my dog barks"
    assert contents(memory, '"cat and a dog"') == ["a cat and a dog"]
    assert contents(memory, '"dog cat"') == []
    first = memory.search("BARKS", explain=True)[0]
    assert (first.session.name, first.snippet, first.explain["words"]["terms"]) == ("a", "my dog barks", ["barks"])


def test_a_long_turn_is_found_by_its_best_passage_and_once(memory: Memory) -> None:
    talk = [f"On day {n} we went to the market and bought bread, rice and some fruit for the week." for n in range(60)]
    talk[30] = "The lighthouse keeper lost his key near the boiler."
    long = memory.create("long").user("\n".join(talk))
    memory.create("short").extend([NewTurn("user", f"a keeper of house number {n}") for n in range(30)])
    assert contents(memory, "keeper key")[0] == long.content
    assert [hit.turn.id for hit in memory.search("market bread", 50)] == [long.id]
    for query in ('"fruit for the week. On day 17 we went"', '"week. The lighthouse keeper lost his"'):
        assert contents(memory, query) == [long.content], "passages have what a phrase goes on with"
    memory.delete("long")
    assert contents(memory, "market") == []


@pytest.mark.parametrize("namespace", [None, "birds"])
def test_a_long_turn_hides_no_others(memory: Memory, namespace: str | None) -> None:
    """However many of its passages are better than theirs."""
    session = memory.create("s", namespace="birds")
    session.user("A kestrel, a kestrel, and a kestrel. " * 6000)
    others = {session.user(f"On day {day} there was, among many other birds, one kestrel.").content for day in range(3)}
    assert others < set(contents(memory, "kestrel", limit=4, namespace=namespace))


@pytest.mark.parametrize("text", ["", "x", "x" * 5000, "word " * 900, "one. " * 900, "é\n" * 700, "果。" * 999])
def test_passages_are_the_whole_text_in_pieces_of_bounded_length(text: str) -> None:
    found = passages(text)
    assert all(len(one) <= 600 for one in found)
    assert len(passages(text * 300)) < MOST_PASSAGES
    at = 0
    for one in found:
        start = text.find(one, max(at - 100, 0))
        assert start <= at
        at = start + len(one)
    assert at == len(text)


@pytest.mark.parametrize(
    "query", ["", '"', "NEAR(a b)", "a AND", "x:y -z ^q*", "\0", "(" * 9000, "'; DROP TABLE turns;"]
)
def test_a_query_is_words_whatever_signs_are_in_it(memory: Memory, query: str) -> None:
    memory.create("a").user("some words and near things")
    assert len(memory.search(query)) <= 1


def test_chinese_words_are_found_inside_of_a_text(memory: Memory) -> None:
    memory.create("a").user("我喜欢吃苹果")
    assert contents(memory, "苹果") == ["我喜欢吃苹果"]
    assert contents(memory, "果苹") == []


def test_limits_of_a_search(memory: Memory) -> None:
    one = memory.create("one", namespace="ann/cook/1")
    one.user("rice with beans", topic="food", stars=5)
    one.extend([NewTurn("assistant", "rice is fine", {"topic": "food"}, created=1000.0)])
    memory.create("two", namespace="ann-other").user("rice of another")
    fork = one.fork("fork")
    fork.user("rice of the fork")
    assert len(contents(memory, "rice")) == 4
    assert contents(memory, "rice", namespace="ann-other") == ["rice of another"]
    assert len(contents(memory, "rice", namespace="ann")) == len(contents(memory, "rice", namespace="ann/cook")) == 3
    assert contents(memory, "rice", namespace="ann/co") == []
    assert len(contents(memory, "rice", session="fork")) == 3
    assert len(contents(memory, "rice", session=one.id)) == 2
    assert contents(memory, "rice", beside="fork") == ["rice of another"]
    assert contents(memory, "rice", role="assistant") == ["rice is fine"]
    assert "rice is fine" not in contents(memory, "rice", since=datetime(2001, 1, 1, tzinfo=UTC))
    assert contents(memory, "rice", where={"topic": "food", "stars": 5}) == ["rice with beans"]
    assert contents(memory, "rice", where={"stars": "5"}) == []
    assert memory.sessions(namespace="ann")[0].record.namespace == "ann/cook/1"
    assert [session.name for session in memory.sessions(1, 1, namespace="ann")] == ["one"]


@pytest.mark.parametrize(
    "limits",
    [
        {"session": "nowhere"},
        {"namespace": "/a"},
        {"namespace": "a//b"},
        {"namespace": "a\nb"},
        {"where": {"a": [1]}},
        {"where": "a"},
        {"since": "yesterday"},
        {"role": 3},
    ],
)
def test_limits_that_cannot_be_are_refused(memory: Memory, limits: dict[str, Any]) -> None:
    with pytest.raises(SessionError):
        memory.search("x", **limits)


def test_a_session_stays_in_its_namespace(memory: Memory) -> None:
    memory.session("a", namespace="ann")
    assert memory.session("a").record.namespace == "ann"
    with pytest.raises(SessionError, match="not in namespace"):
        memory.session("a", namespace="bob")


def test_the_index_has_what_sessions_reach_after_any_changes(memory: Memory) -> None:
    chance = random.Random(7)
    sessions = [memory.create("root")]
    for step in range(150):
        session = chance.choice(sessions)
        what = chance.choice(["add", "add", "add", "fork", "back", "delete", "edit", "gc"])
        turns = session.turns()
        if what == "add":
            session.user(f"word step{step}")
        elif what == "fork":
            sessions.append(session.fork(at=chance.choice(turns) if turns else None))
        elif what == "back" and turns:
            session.rollback(chance.choice(turns))
        elif what == "edit" and turns:
            session.edit(chance.choice(turns), f"word changed{step}")
        elif what == "delete" and len(sessions) > 1:
            sessions.remove(session)
            memory.delete(session)
        elif what == "gc":
            memory.gc()
        if step % 4 == 0:
            reached = {turn.id for one in sessions for turn in one.turns()}
            hits = memory.search("word", 1000)
            assert {hit.turn.id for hit in hits} == reached, what
            assert all(hit.turn in memory.session(hit.session.id).turns() for hit in hits)


def _empty(folder: Path) -> None:
    (folder / "index.sqlite").write_bytes(b"")


def _damage(folder: Path) -> None:
    (folder / "index.sqlite").write_bytes(b"SQLite format 3\0" + b"\xff" * 9000)


def _older(folder: Path) -> None:
    with sqlite3.connect(folder / "index.sqlite") as db:
        db.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize("harm", [shutil.rmtree, _empty, _damage, _older])
@pytest.mark.parametrize("beside", [False, True], ids=["closed", "open"])
def test_an_index_that_cannot_be_used_is_made_again(tmp_path: Path, harm: Any, beside: bool) -> None:
    with Memory.open(tmp_path) as memory:
        memory.create("a").user("blue bird")
        assert contents(memory, "birds") == ["blue bird"]
        if beside:
            for file in (tmp_path / "recall").glob("*-*"):
                file.unlink()
            copy = tmp_path / "recall" / "index.sqlite"
            copy.rename(tmp_path / "recall" / "before")
            shutil.copy(tmp_path / "recall" / "before", copy)
            harm(tmp_path / "recall")
            assert contents(memory, "birds") == ["blue bird"]
    if not beside:
        harm(tmp_path / "recall")
        with Memory.open(tmp_path) as memory:
            assert contents(memory, "birds") == ["blue bird"]


def test_an_index_of_another_ledger_is_made_again(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with Memory.open(tmp_path / name) as memory:
            memory.create("a").user(f"bird {name}")
            memory.search("bird")
    shutil.rmtree(tmp_path / "two" / "recall")
    shutil.copytree(tmp_path / "one" / "recall", tmp_path / "two" / "recall")
    with Memory.open(tmp_path / "two") as memory:
        assert contents(memory, "bird") == ["bird two"]


def test_a_place_that_cannot_be_written_leaves_the_index_in_memory(tmp_path: Path) -> None:
    with Memory.open(tmp_path) as memory:
        (tmp_path / "recall").write_text("in the way")
        memory.create("a").user("blue bird")
        assert contents(memory, "birds") == ["blue bird"]


def test_a_reader_searches_and_writes_nothing(tmp_path: Path) -> None:
    with Memory.open(tmp_path) as memory:
        memory.create("a").user("blue bird")
    with Memory.open(tmp_path, readonly=True) as reader:
        assert contents(reader, "birds") == ["blue bird"]
        assert not (tmp_path / "recall").exists()


def test_no_file_has_what_was_deleted_after_compaction(tmp_path: Path) -> None:
    with Memory.open(tmp_path) as memory:
        memory.create("a").user("the secret xylophone")
        memory.create("b").user("a drum")
        assert memory.search("xylophone")
        memory.delete("a")
        assert memory.search("xylophone") == []
        memory.compact()
        assert contents(memory, "drums") == ["a drum"]
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        assert any(b"drum" in file.read_bytes() for file in files), "the search finds what is stored"
        assert not [file for file in files if b"xyloph" in file.read_bytes()]


def test_recalled_documents_keep_to_their_tokens(memory: Memory) -> None:
    memory.create("a").extend(
        [NewTurn("user", "bird " * 100, created=0.0), NewTurn("user", "a bird", created=0.0), NewTurn("user", "fish")]
    )
    found = memory.recall("birds", 20)
    assert found.documents == ("[user, 1970-01-01]\na bird",)
    assert found.tokens == 7 == -(-len(found.documents[0]) // 4)
    assert len(memory.recall("birds", 400).documents) == 2
    cut = memory.recall("birds fishes", 3)
    assert cut.tokens == 3
    assert len(cut.documents[0]) == 12
    assert memory.recall("nothing").documents == ()
    with pytest.raises(ConfigError, match="tokens is 0"):
        memory.recall("bird", 0)


def test_what_is_recalled_enters_the_prompt_as_documents(asked: Memory) -> None:
    asked.create("past", namespace="ann").user("my dog is called Rex")
    session = asked.create("now", namespace="ann")
    found = asked.recall("dog's name", 64, namespace="ann", beside=session.id)
    assert len(found.documents) == 1
    assert found.tokens == len(asked.runtime.text.encode(found.documents[0]))  # type: ignore[union-attr]
    assert session.ask("What is my dog called?", documents=found.documents, max_tokens=2).text is not None
    turn = session.turns()[0]
    assert turn.content.startswith(found.documents[0])
    assert turn.meta["cuts"] == [len(found.documents[0]) + 2]


def test_recall_in_coroutines(tmp_path: Path) -> None:
    async def story() -> None:
        async with await AsyncMemory.open(tmp_path) as memory:
            await (await memory.create("a", namespace="x")).user("blue bird")
            assert (await memory.recall("birds")).tokens
            assert len(await memory.search("birds", namespace="x")) == 1
            assert len(await memory.sessions(namespace="x")) == 1

    asyncio.run(story())
