"""The record of requests: reasons, bounds, restarts, forgetting, and files that are not what they should be."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.errors import FormatError, SessionError
from ctxreuse.identity.keys import prefix_keys, tenant_salt
from ctxreuse.identity.model import LayerSpec, ModelSpace
from ctxreuse.runtime import Request
from ctxreuse.store.removals import Removal, RemovalLog
from ctxreuse.testing.clock import FakeClock
from ctxreuse.usage import TokenUsage, Usage
from ctxreuse.why import FILE, REASONS, OpenRequest, PromptPart, RequestInfo, RequestLog, explain, read_requests
from ctxreuse.why.records import MissSpan

SPACE = ModelSpace("w", "tiny", "t", "float32", (LayerSpec("full", 1, 4, 4),), "{}", 1000, 4096, 16)
SALT = tenant_salt("a")


def ids_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype("<i4")


def ask(
    book: RequestLog,
    text: str,
    cached: int = 0,
    missed: str = "absent",
    *,
    about: RequestInfo | None = None,
    space: ModelSpace = SPACE,
    salt: bytes = SALT,
    gone: Callable[[bytes], Removal | None] = lambda _: None,
    keep: bool = True,
    answer: str = "",
) -> tuple[str, str, OpenRequest]:
    ids = ids_of(text)
    keys = prefix_keys(space.digest, salt, ids, space.block_tokens)
    request = Request(ids, keys, about=about or RequestInfo())
    spent = Usage(TokenUsage(len(ids), cached), miss_reason=missed)
    opened = book.note(request, spent, [MissSpan(cached, len(ids), "")], space=space, salt=salt, removal=gone)
    if keep:
        whole = ids_of(text + answer)
        book.kept(opened, whole, prefix_keys(space.digest, salt, whole, space.block_tokens))
    book.check()
    return opened.entry.request, opened.entry.why, opened


def words(ids: object) -> str:
    return bytes(np.asarray(ids).astype(np.uint8).tolist()).decode("latin-1")


LONG = "The quick brown fox jumps over the lazy dog, and then it rests. " * 3


def test_reasons_are_found_at_once() -> None:
    clock = FakeClock()
    book, gone = RequestLog(clock=clock.now), RemovalLog(clock=clock.now)
    keys = prefix_keys(SPACE.digest, SALT, ids_of(LONG), 16)
    assert ask(book, LONG)[1] == "new"
    assert ask(book, LONG, len(LONG) // 16 * 16 - 16, "")[1] == ""
    assert ask(book, LONG, gone=gone.removal)[1] == "lost"
    clock.advance(1)
    gone.add(keys, "evicted", "lru", keys[0])
    clock.advance(1)
    name, why, _ = ask(book, LONG, gone=gone.removal)
    assert why == "evicted"
    found = explain(book, name)
    assert (found.spans[0].at, found.spans[0].rule) == (clock.now() - 1, "lru")
    gone.add(keys[2:], "dropped", "corrupt")
    found = explain(book, ask(book, LONG, 32, gone=gone.removal)[0])
    assert [(span.start, span.end, span.reason) for span in found.spans] == [
        (0, 32, ""),
        (32, 176, "dropped"),
        (176, 192, "tail"),
    ]
    for reason in ("slow", "link", "level", "card", "state", "corrupt"):
        found = explain(book, ask(book, LONG + f"and more words {reason} " * 2, 16, reason, gone=gone.removal)[0])
        assert [span.reason for span in found.spans] == ["", reason, "new", "tail"]
        assert found.reason == reason
    assert ask(book, LONG, missed="no store")[1] == "no store"
    assert ask(book, "quite another" * 3, missed="no store")[1] == "new"


def test_a_request_beside_another() -> None:
    book = RequestLog()
    _, _, opened = ask(book, LONG, keep=False)
    name, why, _ = ask(book, LONG + "and something new at the end", keep=True)
    assert why == "running"
    assert [span.reason for span in explain(book, name).spans] == ["running", "new", "tail"]
    del opened
    assert ask(book, "x" + LONG)[1] == "new"


def test_what_leaves_later_does_not_count() -> None:
    clock = FakeClock()
    book, gone = RequestLog(clock=clock.now), RemovalLog(clock=clock.now)
    ask(book, LONG)
    clock.advance(1)
    name, why, opened = ask(book, LONG, keep=False, gone=gone.removal)
    clock.advance(1)
    gone.add(prefix_keys(SPACE.digest, SALT, ids_of(LONG), 16), "evicted", "lru")
    assert {span.reason for span in explain(book, name).spans} == {"lost", "tail"}
    assert why == "lost"
    del opened


def test_other_spaces_and_tenants() -> None:
    book = RequestLog()
    ask(book, LONG)
    other = ModelSpace("w2", "tiny", "t", "float32", SPACE.layers, '{"theta": 2}', 1000, 4096, 16)
    name, why, _ = ask(book, LONG, space=other)
    assert why == "space"
    assert [field.name for field in explain(book, name).fields] == ["weights", "RoPE"]
    name, why, _ = ask(book, LONG, salt=tenant_salt("b"))
    theirs = book.tenant(tenant_salt("b"))
    # One who may not know hears what he would hear if nobody had asked.
    assert why == "new"
    alone = explain(book, name, tenant=theirs, decode=words)
    assert (alone.reason, alone.difference, alone.fields) == ("new", None, ())
    told = explain(book, name, tenant=theirs, decode=words, others=True)
    assert (told.reason, told.difference) == ("tenant", None)
    with pytest.raises(SessionError):
        explain(book, book.entries()[0].request, tenant=theirs)
    # Another tokenizer: the ids differ, the text of the first part is the same.
    strange = ModelSpace("w", "tiny", "t3", "float32", SPACE.layers, "{}", 1000, 4096, 16)
    ask(book, "one two " * 20, about=RequestInfo(first_message="You are kind."))
    assert ask(book, "other ids " * 20, space=strange, about=RequestInfo(first_message="You are kind."))[1] == "space"


def test_the_nearest_is_the_one_of_the_same_kind() -> None:
    book = RequestLog()
    poem = " a poem about the sea, in four lines, with a rhyme in each of them, please, and no title at all" * 2
    bill = " the sum of all bills of this year, in a table of three columns, with a total at the end of it" * 2
    first = ask(book, "12:00" + poem)[0]
    ask(book, "12:01" + bill)
    found = explain(book, ask(book, "12:02" + poem)[0], decode=words)
    assert found.difference is not None
    assert found.difference.request == first
    assert (found.difference.here_tokens, found.difference.alike) == (1, len(poem))
    by_session = ask(book, "y" * 100, about=RequestInfo(session="s"))[0]
    ask(book, "z" * 100)
    latest = explain(book, ask(book, "w" * 100, about=RequestInfo(session="s"))[0])
    assert latest.difference is not None
    assert latest.difference.request == by_session


def test_names_and_sessions() -> None:
    book = RequestLog()
    ask(
        book,
        LONG,
        about=RequestInfo("r1", "chatcmpl-1", "s1", (PromptPart("system", 20), PromptPart("user", len(LONG)))),
    )
    ask(book, LONG + "!", about=RequestInfo("r2", session="s2"))
    assert explain(book, "chatcmpl-1").request == "r1"
    assert explain(book).request == "r2"
    assert explain(book, session="s1").request == "r1"
    with pytest.raises(SessionError, match="no request 'r3'"):
        explain(book, "r3")
    assert book.forget_session("s1") == 1
    assert book.get("r1") is None


def test_it_stays_within_its_bounds() -> None:
    book = RequestLog(most=8, limit=20_000)
    for i in range(40):
        ask(book, f"{i} " * (400 if i % 7 == 0 else 20), answer="more " * 30)
        assert len(book) <= 8
    huge = ask(book, "x" * 30_000)[0]
    assert [entry.request for entry in book.entries()] == [huge]


def test_it_is_kept_over_restarts(tmp_path: Path) -> None:
    file = tmp_path / FILE
    book = RequestLog(file).open()
    ask(book, LONG, about=RequestInfo("r1"))
    ask(book, LONG.replace("quick", "slow"), about=RequestInfo("r2"))
    before = explain(book, "r2", decode=words)
    ask(book, "under way" * 9, about=RequestInfo("r3"), keep=False)
    book.close()
    again = RequestLog(file).open()
    assert explain(again, "r2", decode=words) == before
    assert again.get("r3") is not None
    assert ask(again, LONG)[1] == "lost"  # seen before the restart
    assert explain(read_requests(tmp_path), "r2", decode=words) == before
    assert again.forget(ids_of(LONG)) == 2
    assert LONG[:32].encode() not in bytes(
        np.frombuffer(file.read_bytes()[: len(file.read_bytes()) // 4 * 4], "<i4") & 255
    )
    assert file.stat().st_mode & 0o077 == 0
    again.close()


def test_what_is_forgotten_while_it_runs_stays_forgotten(tmp_path: Path) -> None:
    book = RequestLog(tmp_path / FILE).open()
    _, _, running = ask(book, LONG, about=RequestInfo("r1"), keep=False)
    assert book.forget(ids_of(LONG)) == 1
    book.kept(running, ids_of(LONG + "an answer"), [])
    with pytest.raises(SessionError, match="Deleting a context or session forgets its requests"):
        explain(book, "r1")
    book.close()
    assert read_requests(tmp_path).get("r1") is None


def test_a_file_never_outgrows_its_limit(tmp_path: Path) -> None:
    book = RequestLog(tmp_path / FILE, limit=200_000).open()
    for i in range(300):
        ask(book, f"{i:04} " * 100)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert 50_000 < sum(sizes) <= 200_000
    book.close()
    again = RequestLog(tmp_path / FILE, limit=200_000).open()
    assert again.last() is not None
    assert again.space(SPACE.digest) == SPACE
    again.close()


@given(st.data())
def test_no_file_is_a_crash(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("why")
    book = RequestLog(folder / FILE).open()
    ask(book, LONG)
    ask(book, LONG + "more")
    book.close()
    raw = bytearray((folder / FILE).read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw[at] ^= data.draw(st.integers(1, 255))
    else:
        raw = raw[:at] + data.draw(st.binary(max_size=40))
    (folder / FILE).write_bytes(bytes(raw))
    with contextlib.suppress(FormatError):
        assert len(read_requests(folder)) <= 2
    again = RequestLog(folder / FILE).open()  # a daemon goes on
    ask(again, LONG, about=RequestInfo("new"))
    again.close()
    assert explain(read_requests(folder), "new").request == "new"


def test_a_record_of_nonsense_is_refused(tmp_path: Path) -> None:
    import msgspec

    from ctxreuse.store.journal import Journal

    good = [
        "request",
        "r",
        "",
        "",
        1.0,
        b"t",
        b"s",
        16,
        40,
        0,
        {},
        "new",
        None,
        [["p", 40]],
        [[0, 40, "new"]],
        b"",
        b"",
    ]
    for i, bad in (
        (4, float("nan")),
        (7, 0),
        (9, 41),
        (13, [["p", 40], ["q", 7]]),
        (14, [[0, 99, "new"]]),
        (15, b"xy"),
    ):
        record = good if i < 0 else [*good[:i], bad, *good[i + 1 :]]
        journal = Journal(tmp_path / FILE, 1 << 20)
        journal.open(lambda _: None)
        journal.rewrite([msgspec.msgpack.encode(record)])
        journal.close()
        if i < 0:
            assert len(read_requests(tmp_path)) == 1
            continue
        with pytest.raises(FormatError, match="record of requests is wrong") as refused:
            read_requests(tmp_path)
        assert "Delete the file" in refused.value.fix


def test_every_reason_has_its_sentence() -> None:
    from ctxreuse.metrics.table import METRICS

    counted = next(row for row in METRICS if row.name == "ctxreuse_misses_total").labels[0].values
    assert set(counted) == set(REASONS) - {"tail", "tenant"}


def test_what_was_moved_is_remembered_over_restarts(tmp_path: Path) -> None:
    file = tmp_path / FILE
    with contextlib.closing(RequestLog(file).open()) as book:
        ids = ids_of(LONG)
        tokens = TokenUsage(len(ids), 100, relocated=90, recomputed=10)
        spent = Usage(tokens, miss_reason="gate", gate_decision="kl-0.020 by first-8")
        keys = prefix_keys(SPACE.digest, SALT, ids, 16)
        lacks = [MissSpan(10, 60, ""), MissSpan(60, 102, "probe")]
        book.note(Request(ids, keys, max_kl=0.05), spent, lacks, space=SPACE, salt=SALT, removal=lambda _: None)
        newest = book.last()
        assert newest is not None
        assert book.missed_tokens(newest.request)["probe"] == 42
    with contextlib.closing(RequestLog(file).open()) as book:
        found = explain(book)
        assert (found.relocated, found.recomputed, found.gate_decision) == (90, 10, "kl-0.020 by first-8")
        assert "90 of these were relocated from other positions; 10 more were recomputed (kl-0.020" in found.text
        assert "Tokens 60 to 101 were computed: they are stored at another position, and deviated there" in found.text
