"""Ledger: what callers may give, what they are told, and that it stays quick with many sessions."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ctxreuse.errors import SessionError, StoreError
from ctxreuse.store import Ledger, NewTurn, Session
from ctxreuse.store.ledger.records import decode_session, encode_session
from ctxreuse.store.recall import Filters, Recall

SPACE = bytes(32)


@pytest.fixture
def ledger(tmp_path: Path):
    with Ledger.open(tmp_path) as opened:
        yield opened


def test_texts_come_back_exactly(ledger: Ledger) -> None:
    session = ledger.create("日本語 sessions 🚀").id
    texts = ["", "\0", "line\r\nline\n", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u202e rtl", "é" + "e\u0301", "x" * 100_000]
    turns = ledger.append(session, [NewTurn("user", text, {"n": i, "raw": b"\0\xff"}) for i, text in enumerate(texts)])
    assert [turn.content for turn in ledger.turns(turns[-1].id)] == texts
    assert ledger.turn(turns[3].id).meta == {"n": 3, "raw": b"\0\xff"}


@pytest.mark.parametrize(
    "turn",
    [
        NewTurn("user", "lone \ud800 surrogate"),
        NewTurn("us\udfffer", "x"),
        NewTurn("user", b"bytes"),  # type: ignore[arg-type]
        NewTurn("user", "x", {"f": print}),
        NewTurn("user", "x", {"big": 1 << 80}),
        NewTurn("user", "x", {"s": "\ud800"}),
        NewTurn("user", "x", {1: 2}),  # type: ignore[dict-item]
        NewTurn("user", "x", {}, b"\0\0\0", SPACE),
        NewTurn("user", "x", {}, b"\0\0\0\0", b"short"),
        NewTurn("user", "x", {}, b"\0\0\0\0"),
    ],
)
def test_what_cannot_be_stored_is_refused_whole(ledger: Ledger, turn: NewTurn) -> None:
    session = ledger.create("s").id
    with pytest.raises(SessionError):
        ledger.append(session, [NewTurn("user", "good"), turn])
    assert ledger.session("s").head == 0
    assert ledger.stats().turns == 0
    ledger.check()


def test_a_loop_in_meta_is_refused(ledger: Ledger) -> None:
    loop: dict[str, object] = {}
    loop["self"] = loop
    with pytest.raises(SessionError, match="meta"):
        ledger.append(ledger.create("s").id, [NewTurn("user", "x", loop)])


@pytest.mark.parametrize("name", ["", " padded ", "line\nbreak", "x" * 481, "é" * 241, "\ud800", "tab\t"])
def test_names_that_cannot_be(ledger: Ledger, name: str) -> None:
    ledger.create("fine")
    with pytest.raises(SessionError):
        ledger.create(name)
    with pytest.raises(SessionError):
        ledger.rename("fine", name)
    with pytest.raises(SessionError):
        ledger.session(name)
    assert [session.name for session in ledger.sessions()] == ["fine"]
    ledger.check()


def test_names_that_can(ledger: Ledger) -> None:
    for name in ("x" * 480, "ünï cödé", "a/b:c", "0" * 32):
        assert ledger.session(ledger.create(name).id).name == name
        assert ledger.session(name).name == name
    auto = ledger.create()
    assert auto.name == f"session-{auto.id[:8]}"


def test_unknown_sessions_get_near_names(ledger: Ledger) -> None:
    ledger.create("planning")
    with pytest.raises(SessionError, match="Did you mean 'planning'"):
        ledger.session("plannning")
    for call in (
        ledger.delete,
        ledger.fork,
        lambda name: ledger.set_head(name, 0),
        lambda name: ledger.rename(name, "x"),
    ):
        with pytest.raises(SessionError, match="there is no session 'nothing'"):
            call("nothing")


@pytest.mark.parametrize("id", [-1, 5, 1 << 64])
def test_unknown_turns(ledger: Ledger, id: int) -> None:
    ledger.create("s")
    for call in (
        ledger.turn,
        ledger.turns,
        lambda id: ledger.set_head("s", id),
        lambda id: ledger.fork("s", "t", id),
        lambda id: ledger.create("t", id),
        lambda id: ledger.ancestor(0, id),
        lambda id: ledger.common(id, 0),
        lambda id: ledger.put_tokens(SPACE, {id: b""}),
    ):
        with pytest.raises(SessionError, match="no turn"):
            call(id)
    assert ledger.count() == 1


def test_fork_only_from_its_own_history(ledger: Ledger) -> None:
    ledger.append(ledger.create("a").id, [NewTurn("user", "1"), NewTurn("user", "2")])
    one = ledger.fork("a", "b", 1)
    assert (one.head, one.forked_at, one.origin) == (1, 1, ledger.session("a").id)
    ledger.append("b", [NewTurn("user", "3")])
    with pytest.raises(SessionError, match="turn 3 is not in session 'a'"):
        ledger.fork("a", "c", 3)
    assert ledger.set_head("a", 3).head == 3
    assert [turn.content for turn in ledger.turns(3)] == ["1", "3"]
    assert ledger.fork("a", "c", 0).head == 0


def test_ids_are_never_used_twice(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.append(ledger.create("a").id, [NewTurn("user", "x")] * 3)
        ledger.delete("a")
        assert ledger.gc() == 3
    with Ledger.open(tmp_path) as ledger:
        assert ledger.append(ledger.create("a").id, [NewTurn("user", "y")])[0].id == 4
        ledger.check()


def test_tokens_by_space(ledger: Ledger) -> None:
    other = bytes(range(32))
    ledger.append(ledger.create("a").id, [NewTurn("user", "x", {}, b"\1\0\0\0", SPACE), NewTurn("user", "y")])
    ledger.put_tokens(other, {1: b"\2\0\0\0"})
    assert (ledger.tokens(1, SPACE), ledger.tokens(1, other), ledger.tokens(2, SPACE)) == (
        b"\1\0\0\0",
        b"\2\0\0\0",
        None,
    )
    assert ledger.spaces(1) == [SPACE, other]
    assert ledger.spaces(2) == []


@pytest.mark.parametrize("table", ["turns", "sessions", "info"])
def test_a_damaged_record_is_a_store_error(ledger: Ledger, table: str) -> None:
    session = ledger.create("name")
    ledger.append("name", [NewTurn("role", "hello")])
    key = {"turns": (1).to_bytes(8, "big"), "sessions": bytes.fromhex(session.id), "info": b"next"}[table]

    def wreck(txn: Any) -> None:
        db = ledger._env.tables[table]
        # 0xff begins nothing in UTF-8, 0xc1 nothing in MessagePack.
        raw = bytes(txn.get(key, db=db)).replace(b"role", b"\xffole").replace(b"name", b"\xffame")
        txn.put(key, b"\xc1" if table == "info" else raw, db=db)

    ledger._env.write(wreck)
    with pytest.raises(StoreError, match="damaged"):
        ledger.turn(ledger.append("name", [NewTurn("role", "more")])[0].parent)


def test_appends_from_many_threads_keep_order(ledger: Ledger) -> None:
    session, failed = ledger.create("s").id, []

    def work(n: int) -> None:
        for i in range(10):
            while True:
                head = ledger.session(session).head
                try:
                    ledger.append(session, [NewTurn("user", f"{n}.{i}")], expected_head=head)
                    break
                except SessionError:
                    failed.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    turns = [turn.content for turn in ledger.turns(ledger.session(session).head)]
    assert len(turns) == 40
    for n in range(4):
        assert [turn for turn in turns if turn.startswith(f"{n}.")] == [f"{n}.{i}" for i in range(10)]
    ledger.check()


def test_a_long_history_is_walked_in_few_steps(ledger: Ledger) -> None:
    head = ledger.append(ledger.create("a").id, [NewTurn("user", "x")] * 20_000)[-1].id
    ledger.fork("a", "b", 5)
    other = ledger.append("b", [NewTurn("user", "y")] * 3000)[-1].id
    reads = 0
    with ledger._read() as (_, history):
        plain = history.links

        def counted(id: int):
            nonlocal reads
            reads += 1
            return plain(id)

        history.links = counted
        assert history.ancestor(7, head)
        assert not history.ancestor(7, other)
        assert history.common(head, other) == 5
    assert reads < 400


def test_ten_thousand_sessions(ledger: Ledger) -> None:
    """Made in one transaction, because it is the reading that is asked for."""
    root = ledger.append(ledger.create("root").id, [NewTurn("user", "shared root")])[0].id

    def work(txn, history) -> None:
        for i in range(10_000):
            ledger._create(txn, f"session {i}", root, None)

    ledger._write(work)
    assert ledger.count() == 10_001
    assert len(ledger.sessions(limit=50, offset=100)) == 50
    assert len(ledger.sessions()) == 10_001
    assert ledger.session("session 7777").head == root
    ledger.append("session 5", [NewTurn("user", "a needle")])
    assert ledger.sessions(limit=1)[0].name == "session 5"
    recall = Recall(ledger)
    assert [hit.session.name for hit in recall.search("needle", Filters(), 9)] == ["session 5"]
    assert len(recall.search("shared", Filters(), 9)) == 1
    recall.close()
    with pytest.raises(SessionError, match="Did you mean"):
        ledger.session("sesion 12")
    ledger.check()


def written_as_before(ledger: Ledger, work: Callable[[Any, dict[str, Any]], None]) -> None:
    """Write as a program that does not know the order of sessions."""
    ledger._env.write(lambda txn: work(txn, ledger._env.tables))


def renamed_as_before(ledger: Ledger, name: str, updated: float) -> None:
    session = msgspec.structs.replace(ledger.session(name), updated=updated)
    raw = encode_session(session)
    written_as_before(ledger, lambda txn, tables: txn.put(bytes.fromhex(session.id), raw, db=tables["sessions"]))


def test_sessions_are_listed_in_pages_and_by_the_start_of_their_names(tmp_path: Path) -> None:
    now = 0.0
    with Ledger.open(tmp_path, clock=lambda: now) as ledger:
        for name, now in (("b1", -5.0), ("a", -7.0), ("b", 0.0), ("ba", 3.0), ("é", 3.0), ("c", 1e9)):  # noqa: B007
            ledger.create(name)
        every = ledger.sessions()
        assert [session.updated for session in every] == [1e9, 3.0, 3.0, 0.0, -5.0, -7.0]
        assert [ledger.sessions(2, offset)[0] for offset in range(6)] == every
        assert ledger.sessions(2, 5) == every[5:]
        assert ledger.sessions(3, 6) == ledger.sessions(0) == []
        assert [session.name for session in ledger.sessions(prefix="b")] == ["b", "b1", "ba"]
        assert [session.name for session in ledger.sessions(1, 1, prefix="b")] == ["b1"]
        assert ledger.sessions(prefix="bb") == []
        assert [session.name for session in ledger.sessions(prefix="é")] == ["é"]


def test_a_page_reads_what_it_lists(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger._write(lambda txn, _: [ledger._create(txn, f"s{i}", 0, None) for i in range(500)])
    read: list[bytes] = []

    def counting(id: bytes, raw: Any) -> Session:
        read.append(id)
        return decode_session(id, raw)

    monkeypatch.setattr("ctxreuse.store.ledger.recent.decode_session", counting)
    assert len(ledger.sessions(20, 100)) == 20
    assert len(read) == 20


def test_an_older_program_may_write_between(tmp_path: Path) -> None:
    """Such a program does not know the order; lists are right at once, and quick again after the next opening."""
    with Ledger.open(tmp_path) as ledger:
        for name in "abc":
            ledger.create(name)
        assert ledger._recent_is_current()
        renamed_as_before(ledger, "a", 2e9)
        assert not ledger._recent_is_current()
        assert [session.name for session in ledger.sessions()] == ["a", "c", "b"]
        ledger.check()
    with Ledger.open(tmp_path, readonly=True) as reader:
        assert [session.name for session in reader.sessions(1, 1)] == ["c"]
    with Ledger.open(tmp_path) as ledger:
        assert ledger._recent_is_current()
        assert [session.name for session in ledger.sessions()] == ["a", "c", "b"]
        renamed_as_before(ledger, "b", 3e9)
        ledger.delete("c")  # any change fills it again first
        assert ledger._recent_is_current()
        assert [session.name for session in ledger.sessions()] == ["b", "a"]
        ledger.check()


def test_a_ledger_without_the_order_of_sessions(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        for name in "abc":
            ledger.create(name)
        written_as_before(ledger, lambda txn, tables: txn.drop(tables["recent"]))
    with Ledger.open(tmp_path, readonly=True) as reader:
        assert [session.name for session in reader.sessions()] == ["c", "b", "a"]
        reader.check()
    with Ledger.open(tmp_path) as ledger:
        assert ledger._recent_is_current()
        ledger.check()


@pytest.mark.parametrize("id", [True, False, 1.0, "1", None, -1, 1 << 64])
def test_what_is_no_turn_id_never_becomes_a_head(ledger: Ledger, id: Any) -> None:
    """A head of True was written as such, and then neither it nor any list could be read."""
    ledger.append(ledger.create("s").id, [NewTurn("user", "x")])
    for attempt in (ledger.set_head, lambda name, head: ledger.create("t", head)):
        with pytest.raises(SessionError, match="no turn"):
            attempt("s", id)
    if id is not None:  # the head is meant
        with pytest.raises(SessionError, match="no turn"):
            ledger.fork("s", at=id)
    assert [session.name for session in ledger.sessions()] == ["s"]
    ledger.check()


def test_a_longer_name_is_not_the_session_whose_name_it_begins_with(ledger: Ledger) -> None:
    ledger.create("x" * 480)
    for name in ("x" * 481, "x" * 5000, "", None, 7):
        with pytest.raises(SessionError):
            ledger.delete(name)  # type: ignore[arg-type]
    assert ledger.session("x" * 480).name == "x" * 480


@pytest.mark.parametrize("again", [False, True])
def test_what_goes_into_a_deleted_file_is_not_called_durable(tmp_path: Path, again: bool) -> None:
    with Ledger.open(tmp_path / "s") as ledger:
        ledger.append(ledger.create("s").id, [NewTurn("user", "x")])
        shutil.rmtree(tmp_path / "s")
        if again:
            Ledger.open(tmp_path / "s").close()
        with pytest.raises(StoreError, match="deleted or replaced"):
            ledger.append("s", [NewTurn("user", "y")])
        assert [turn.content for turn in ledger.turns(ledger.session("s").head)] == ["x"]
