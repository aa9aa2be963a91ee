"""Memory without an engine: every verb on text, limits, hostile input, size."""

from __future__ import annotations

from pathlib import Path

import pytest
from ctxreuse_agents import Memory, NewTurn, Session

from ctxreuse.errors import (
    ConfigError,
    EngineError,
    LinkDownError,
    SessionError,
    StoreError,
    StoreOwnedError,
    StoreReadOnlyError,
)
from support.examples import scale


def contents(session: Session) -> list[str]:
    return [turn.content for turn in session.turns()]


def test_turns_come_back_with_role_meta_and_order(memory: Memory) -> None:
    session = memory.create("notes")
    session.system("Be kind.")
    session.user("Which tea?", lang="en", tags=["drink"], score=0.5)
    session.assistant("Green.")
    session.tool('{"price": 3}', name="shop")
    turns = session.turns()
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "tool"]
    assert turns[1].meta == {"lang": "en", "tags": ["drink"], "score": 0.5}
    assert [turn.depth for turn in turns] == [1, 2, 3, 4]
    assert session.head == turns[-1].id
    assert session.messages()[3].name == "shop"
    assert [message.content for message in session.messages()] == contents(session)


def test_sessions_are_found_by_id_and_name_and_made_on_demand(memory: Memory) -> None:
    made = memory.session("plans")
    assert memory.session("plans").id == made.id == memory.session(made.id).id
    with pytest.raises(SessionError):
        memory.session("plens", create=False)
    with pytest.raises(SessionError):
        memory.session("0123456789abcdef" * 2)
    with pytest.raises(SessionError):
        memory.create("plans")
    made.rename("ideas")
    assert made.name == "ideas"
    assert memory.session("ideas", create=False).id == made.id
    unnamed = memory.create()
    assert unnamed.name
    assert {session.id for session in memory.sessions()} == {made.id, unnamed.id}


def test_a_fork_shares_what_was_and_nothing_after(memory: Memory) -> None:
    trunk = memory.create("trunk")
    first = trunk.user("one")
    trunk.assistant("two")
    whole, early = trunk.fork("whole"), trunk.fork("early", at=first)
    trunk.user("three")
    whole.user("III")
    assert contents(trunk) == ["one", "two", "three"]
    assert contents(whole) == ["one", "two", "III"]
    assert contents(early) == ["one"]
    diff = whole.diff(trunk)
    assert [turn.content for turn in diff.here] == ["III"]
    assert [turn.content for turn in diff.there] == ["three"]
    assert diff.common == trunk.turns()[1].id
    memory.delete("trunk")
    assert contents(whole) == ["one", "two", "III"]
    with pytest.raises(SessionError):
        trunk.user("gone")
    other = memory.create()
    other.user("x")
    with pytest.raises(SessionError):
        whole.fork(at=other.head)


def test_a_fork_starts_empty_from_an_empty_session(memory: Memory) -> None:
    trunk = memory.create()
    fork = trunk.fork()
    fork.user("alone")
    assert contents(trunk) == []
    assert fork.diff(trunk).common == 0
    assert contents(fork.commit()) == ["alone"]


def test_commit_moves_the_origin_forward(memory: Memory) -> None:
    trunk = memory.create("trunk")
    trunk.user("base")
    fork = trunk.fork("fork")
    fork.user("idea")
    assert fork.commit().id == trunk.id
    assert trunk.head == fork.head
    fork.user("more")
    fork.commit()
    assert contents(trunk) == ["base", "idea", "more"]
    with pytest.raises(SessionError, match="not a fork"):
        trunk.commit()


def test_commit_onto_a_moved_origin_appends_only_what_it_lacks(memory: Memory) -> None:
    trunk = memory.create("trunk")
    trunk.user("base")
    fork = trunk.fork("fork")
    fork.user("a", kept=True)
    fork.commit()
    trunk.user("meanwhile")
    fork.user("b")
    with pytest.raises(SessionError, match="has new turns"):
        fork.commit()
    assert contents(trunk) == ["base", "a", "meanwhile"]
    fork.commit(onto=True)
    assert contents(trunk) == ["base", "a", "meanwhile", "b"]
    assert fork.head == trunk.head
    fork.user("c")
    fork.commit()
    assert contents(trunk)[-2:] == ["b", "c"]


def test_commit_does_not_bring_back_what_the_origin_took_back(memory: Memory) -> None:
    trunk = memory.create("trunk")
    trunk.user("base")
    trunk.user("regretted")
    fork = trunk.fork("fork")
    fork.user("own")
    trunk.rollback()
    with pytest.raises(SessionError, match="has new turns"):
        fork.commit()
    fork.commit(onto=True)
    assert contents(trunk) == ["base", "own"]


def test_rollback_by_turn_by_number_and_to_nothing(memory: Memory) -> None:
    session = memory.create()
    one, two, three = (session.user(text) for text in ("1", "2", "3"))
    assert session.rollback(two) == two
    assert session.rollback(-1) == one
    with pytest.raises(SessionError, match="not in the history"):
        session.rollback(three)
    with pytest.raises(SessionError, match="cannot go back 2"):
        session.rollback(-2)
    session.user("again")
    assert contents(session) == ["1", "again"]
    assert session.rollback(0) is None
    assert contents(session) == []
    assert memory.gc() == 4
    memory.check()


def test_several_turns_are_added_at_once_or_not_at_all(memory: Memory) -> None:
    session = memory.create()
    session.extend([NewTurn("user", "a"), NewTurn("assistant", "b")])
    with pytest.raises(SessionError):
        session.extend([NewTurn("user", "c"), NewTurn("user", "\ud800")])
    assert contents(session) == ["a", "b"]


def test_search_finds_words_in_reachable_turns(memory: Memory) -> None:
    session = memory.create("cook")
    session.user("Red CURRY with rice")
    session.user("rice pudding")
    hits = memory.search("curry RICE")
    assert [hit.turn.content for hit in hits] == ["Red CURRY with rice", "rice pudding"]
    assert len(memory.search("rice", limit=1)) == 1
    assert memory.search("spaceship") == []
    session.rollback(0)
    assert memory.search("rice") == []


@pytest.mark.parametrize("content", [b"caf\xe9", bytearray(b"x"), memoryview(b"x")])
def test_bytes_are_refused_with_the_way_to_decode_them(memory: Memory, content: bytes) -> None:
    session = memory.create()
    with pytest.raises(SessionError, match=r"decode\('utf-8'"):
        session.user(content)  # type: ignore[arg-type]
    assert contents(session) == []


def test_text_that_utf8_cannot_hold_is_refused(memory: Memory) -> None:
    session = memory.create()
    with pytest.raises(SessionError, match="lone surrogate at character 2"):
        session.user("ab\udc80")
    with pytest.raises(SessionError, match="role"):
        session.append("\ud800", "x")
    with pytest.raises(SessionError, match="role is empty"):
        session.append("", "x")
    with pytest.raises(SessionError, match="not text"):
        session.user({"a": 1})  # type: ignore[arg-type]
    with pytest.raises(SessionError):
        session.user("x", bad=object())
    session.user("\U0001f9ed \x00 ﷽ ok")
    assert contents(session) == ["\U0001f9ed \x00 ﷽ ok"]


def test_without_an_engine_asking_says_what_to_do_and_changes_nothing(memory: Memory) -> None:
    session = memory.create()
    session.user("kept")
    assert memory.engine is None
    for call in (lambda: session.ask("?"), session.complete, session.tokens, session.warm, session.evict):
        with pytest.raises(EngineError, match=r"no engine.*text can be read.*Memory\.open\(path, engine="):
            call()
    assert contents(session) == ["kept"]


def test_an_unknown_model_is_named_before_the_memory_is_touched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Memory.open(tmp_path / "m", engine=str(tmp_path / "no-such-model"))
    assert not (tmp_path / "m").exists()


def test_one_owner_many_readers(tmp_path: Path) -> None:
    with Memory.open(tmp_path / "m") as memory:
        memory.create("a").user("hello")
        with pytest.raises(StoreOwnedError):
            Memory.open(tmp_path / "m")
    with Memory.open(tmp_path / "m", readonly=True) as reader:
        session = reader.session("a")
        assert contents(session) == ["hello"]
        with pytest.raises(StoreReadOnlyError):
            session.user("no")
        with pytest.raises(StoreReadOnlyError):
            reader.create()
        reader.check()


def test_a_closed_memory_says_so(tmp_path: Path) -> None:
    memory = Memory.open(tmp_path / "m")
    session = memory.create()
    memory.close()
    memory.close()
    with pytest.raises(StoreError):
        session.user("late")


def test_the_default_place_is_the_users_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    with Memory.open() as memory:
        memory.create("here")
    assert (tmp_path / "share" / "ctxreuse" / "store" / "ledger").is_dir()
    monkeypatch.setenv("CTXREUSE_STORE__PATH", str(tmp_path / "elsewhere" / "deep"))
    with Memory.open() as memory:
        assert memory.sessions() == []
        memory.create("there")
    assert (tmp_path / "elsewhere" / "deep" / "ledger").is_dir()


@pytest.mark.slow
def test_many_sessions_are_listed_in_pages(tmp_path: Path) -> None:
    count, page = scale(10_000), scale(10_000) // 4
    with Memory.open(tmp_path / "m") as memory:
        trunk = memory.create("trunk")
        trunk.user("shared by all")
        names = {trunk.fork(f"s{i}").name for i in range(count)}
        assert memory.stats().text.sessions == count + 1
        pages = [memory.sessions(page, offset) for offset in range(0, count + 1, page)]
        assert [len(each) for each in pages] == [page] * 4 + [1]
        listed = {session.id for each in pages for session in each}
        assert len(listed) == count + 1
        assert names == {f"s{i}" for i in range(count)}
        assert contents(memory.session("s1711", create=False)) == ["shared by all"]
        memory.delete("s1711")
        memory.check()
    with Memory.open(tmp_path / "m", readonly=True) as again:
        assert again.stats().text.sessions == count


def test_two_hundred_thousand_tokens_of_text_need_no_engine(tmp_path: Path) -> None:
    page = "The quick brown fox jumps over the lazy dog. " * 50  # about 500 tokens
    with Memory.open(tmp_path / "m") as memory:
        session = memory.create("book")
        session.extend([NewTurn("user", f"{i} {page}") for i in range(400)])
        one = session.user("x" * 2_000_000)
        fork = session.fork("branch")
        fork.user("end")
    with Memory.open(tmp_path / "m") as memory:
        fork = memory.session("branch", create=False)
        assert len(fork.turns()) == 402
        assert fork.turns()[400] == one
        assert memory.search("399 lazy")[0].turn.content[:3] == "399"


@pytest.mark.parametrize("name", ["two\nlines", " ", "", "x" * 481])
def test_a_name_that_cannot_be_says_so(memory: Memory, name: str) -> None:
    """Asked for by such a name, a session was said not to exist, as if it could."""
    with pytest.raises(SessionError, match="cannot name a session"):
        memory.session(name)


def test_a_role_of_any_length_is_exported_and_imported(memory: Memory) -> None:
    session = memory.create()
    session.append("r" * 1000, "x")
    assert memory.import_json(memory.export_json(session), "again").turns()[0].role == "r" * 1000


@pytest.mark.parametrize("address", ["https://127.0.0.1:1", "HTTP://127.0.0.1:1"])
def test_an_address_of_any_case_and_scheme_is_no_folder(tmp_path: Path, address: str) -> None:
    with pytest.raises(LinkDownError, match="no daemon answers"):
        Memory.open(tmp_path, engine=address)


def test_an_address_of_another_scheme_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the address of a daemon"):
        Memory.open(tmp_path, engine="ftp://127.0.0.1:1")


def test_reprs_are_short(memory: Memory) -> None:
    turn = memory.create("s").user("word " * 10_000)
    assert repr(turn) == f"Turn({turn.id}, 'user', '{'word ' * 12}…')"
    assert len(repr(memory)) < 200
    assert "text only" in repr(memory)
