"""The page's feed: only what changes is sent, nothing is computed unwatched, and no text of others becomes markup."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.daemon.access import Access
from ctxreuse.daemon.client import Client
from ctxreuse.daemon.key_file import KeyFile
from ctxreuse.daemon.keys import Keys
from ctxreuse.daemon.openai import ApiError
from ctxreuse.daemon.page import panels as made
from ctxreuse.daemon.page.feed import Feed, Rows
from ctxreuse.daemon.page.panels import ContextPanel, KnownUse, shown_text
from ctxreuse.daemon.page.routes import EVENTS, FILES, page_routes
from ctxreuse.store.tiered import TieredStore
from ctxreuse.testing.store import Context
from support.waiting import async_until, patient, until

FAST = 0.01


async def following(events: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The messages of a feed, as JSON."""
    async for event in events:
        if event.startswith(b"data: "):
            assert event.endswith(b"\n\n")
            assert event.count(b"\n") == 2
            yield json.loads(event[6:])


def applied(state: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """A state after a message, as the page does it."""
    state = {} if message.get("full") else state
    state |= message["set"]
    for name, change in message["rows"].items():
        rows = {} if change.get("all") else state.get(name, {})
        state[name] = {one: row for one, row in rows.items() if one not in change["drop"]} | change["put"]
    return state


def test_a_reader_gets_all_and_then_what_changes() -> None:
    value, rows = {"n": 0}, {"t": Rows(a=[1], b=[2])}

    async def run() -> list[dict[str, Any]]:
        feed = Feed({"one": lambda: dict(value), "same": lambda: 7, "t": lambda: rows["t"]}, interval=FAST)
        events = feed.events()
        messages = following(events)
        found = [await anext(messages)]
        value["n"], rows["t"] = 1, Rows(b=[2], c=[3])
        while "t" not in found[-1]["rows"] or found[-1].get("full"):
            found.append(await anext(messages))
        late = following(feed.events())
        found.append(await anext(late))
        return found

    first, *more, late = asyncio.run(run())
    whole = {"t": {"all": True, "put": {"a": [1], "b": [2]}, "drop": []}}
    assert first == {"full": True, "set": {"one": {"n": 0}, "same": 7}, "rows": whole}
    assert all("same" not in one["set"] and not one.get("full") for one in more)
    assert more[-1]["rows"] == {"t": {"put": {"c": [3]}, "drop": ["a"]}}
    assert applied({}, late) == {"one": {"n": 1}, "same": 7, "t": {"b": [2], "c": [3]}}


@given(
    st.lists(st.dictionaries(st.integers(0, 9).map(str), st.integers(0, 3), max_size=8), min_size=1, max_size=12),
    st.data(),
)
def test_whoever_reads_seldom_ends_in_the_same_state(states: list[dict[str, int]], data: st.DataObject) -> None:
    """A slow reader gets one message for many rounds, never a queue of them."""
    feed = Feed({})
    seen, state = 0, dict[str, Any]()
    for rows in states:
        feed._take({"t": Rows(rows), "v": len(rows)})
        if data.draw(st.booleans()):
            state, seen = applied(state, json.loads(feed._message(seen))), feed._version
    state = applied(state, json.loads(feed._message(seen)))
    assert state == {"t": states[-1], "v": len(states[-1])}


def test_a_reader_that_missed_more_than_is_known_gets_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxreuse.daemon.page.feed._DROPPED", 4)
    feed = Feed({})
    feed._take({"t": Rows({str(n): n for n in range(9)})})
    state, seen = applied({}, json.loads(feed._message(0))), feed._version
    feed._take({"t": Rows({"8": 8})})
    message = json.loads(feed._message(seen))
    assert message["rows"]["t"]["all"] is True
    assert applied(state, message) == {"t": {"8": 8}}


def test_nothing_is_computed_while_nobody_watches() -> None:
    calls, ended = [], []

    async def run() -> None:
        feed = Feed({"one": lambda: calls.append(1) or len(calls)}, interval=FAST, idle=lambda: ended.append(1))
        await asyncio.sleep(5 * FAST)
        assert not calls
        events = feed.events()
        await anext(events)
        await events.aclose()  # type: ignore[attr-defined]
        await async_until(lambda: bool(ended))
        before = len(calls)
        await asyncio.sleep(5 * FAST)
        assert len(calls) == before
        assert not feed._values
        again = json.loads((await anext(feed.events()))[6:])  # and it begins again, from the start
        assert (again["full"], again["set"]) == (True, {"one": before + 1})

    asyncio.run(run())


def test_a_panel_that_fails_or_takes_long_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    slow = []

    def busy() -> int:
        slow.append(time.thread_time())
        while time.thread_time() < slow[-1] + 0.02:
            pass
        return len(slow)

    async def run() -> dict[str, Any]:
        feed = Feed({"bad": lambda: 1 / 0, "busy": busy, "good": lambda: feed.rounds}, interval=FAST)
        messages = following(feed.events())
        first = await anext(messages)
        while feed.rounds < 20:
            await anext(messages)
        return first

    assert asyncio.run(run())["set"].keys() == {"busy", "good"}
    assert len(slow) == 1  # 20 ms of computing are paid for by seconds of pause
    assert "the page's panel bad is not up to date: division by zero" in caplog.text


def test_readers_are_bounded() -> None:
    async def run() -> None:
        feed = Feed({"one": lambda: 1}, interval=FAST, most=2)
        events = [feed.events() for _ in range(2)]
        for one in events:
            await anext(one)
        with pytest.raises(ApiError, match="2 pages watch this daemon already") as refused:
            feed.events()
        assert refused.value.status == 429
        await events[0].aclose()  # type: ignore[attr-defined]
        await anext(feed.events())

    asyncio.run(run())


def test_the_files_need_no_key_and_nothing_from_elsewhere(serve: Callable[..., Client]) -> None:
    client = serve(*page_routes(Feed({"one": lambda: 1})), keys=("k",))
    total = 0
    with httpx.Client(base_url=client.url, timeout=patient(10)) as http:
        for path, (name, media) in FILES.items():
            answer = http.get(path)
            assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, media)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.content == files("ctxreuse.daemon.page").joinpath(name).read_bytes()
            again = http.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            total += len(answer.content)
            assert not re.search(
                r"innerHTML|outerHTML\s*=|insertAdjacent|document\.write|\beval\(|new Function", answer.text
            )
            assert not re.search(r"(src|href|from|import)\s*=?\s*[\"'](?!/page/|\./)", answer.text)
        page = http.get("/").text
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", page)
        assert http.get(EVENTS).status_code == 401
        assert http.get("/page/nothing.js").status_code == 401
    assert total <= 150_000


def test_only_a_key_for_status_opens_the_feed(tmp_path: Any, serve: Callable[..., Client]) -> None:
    file = KeyFile(tmp_path / "keys.json")
    keys = {name: file.add(name, (name,)) for name in ("answers", "status", "metrics", "admin")}  # type: ignore[arg-type]
    client = serve(*page_routes(Feed({"one": lambda: 1})), access=Access(keys=Keys(tmp_path / "keys.json")))
    found = {}
    for name, key in keys.items():
        with httpx.stream("GET", client.url + EVENTS, headers={"authorization": f"Bearer {key}"}) as answer:
            found[name] = answer.status_code
            if answer.status_code == 200:
                assert answer.headers["content-type"].startswith("text/event-stream")
                assert next(answer.iter_lines()).startswith('data: {"full":true')
    assert found == {"answers": 403, "status": 200, "metrics": 403, "admin": 200}


def test_a_page_of_another_host_reads_nothing(serve: Callable[..., Client]) -> None:
    client = serve(*page_routes(Feed({"one": lambda: 1})))
    for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}, {"x-forwarded-for": "10.0.0.1"}):
        assert httpx.get(client.url + EVENTS, headers=headers).status_code == 403


@given(st.text())
def test_any_text_is_one_line_of_valid_json(text: str) -> None:
    feed = Feed({})
    feed._take({"t": Rows({"x": [shown_text(text)]}), "v": shown_text(text, 20)})
    raw = feed._message(0)
    assert b"\n" not in raw
    assert b"\r" not in raw
    assert json.loads(raw)["rows"]["t"]["put"]["x"][0].startswith(text[:60].encode("utf-8", "replace").decode())


def test_lone_surrogates_and_endless_names_are_made_harmless() -> None:
    assert shown_text("a\ud800b") == "a?b"
    assert len(shown_text("x" * 10**6)) == 120
    assert shown_text("x" * 10**6).endswith("…")


# ---- the tree of contexts ----


def filled(contexts: int, blocks: int = 3) -> tuple[TieredStore, list[Context]]:
    """A store in memory of contexts that share their first block."""
    store = TieredStore(1 << 30)
    ones = [Context(blocks, branch=number, fork=1) for number in range(contexts)]
    for one in ones:
        for block in range(blocks):
            store.put(one.keys[block], one.block(block))
    return store, ones


def test_the_tree_has_who_used_what_and_where_it_lies() -> None:
    store, (one, two) = filled(2)
    store.pin(two.keys)
    uses = [KnownUse(20.04, "mine", b"".join(key[:8] for key in one.keys)), KnownUse(10, "old", one.keys[-1][:8])]
    panel = ContextPanel(store, lambda: uses, lambda: [two.keys])
    rows = panel.rows()
    root, mine, other = (
        rows[made.block_id(one.keys[0])],
        rows[made.block_id(one.keys[1])],
        rows[made.block_id(two.keys[1])],
    )
    size = one.size
    assert root[:4] == ["", 0, size, 1]
    assert mine[:4] == [made.block_id(one.keys[0]), size, 2 * size, 2]
    assert (root[5], mine[5], other[5]) == ("device", "host", "device")
    assert (mine[7], other[7]) == (0, 1)
    assert mine[9:] == [20.0, "mine"]
    assert panel.run_of(uses[0].keys) == made.block_id(one.keys[1])
    assert panel.run_of(b"nothing!") == ""


def test_the_tree_is_made_again_only_when_something_changed() -> None:
    store, (one,) = filled(1)
    panel = ContextPanel(store)
    rows = panel.rows()
    assert panel.rows() is rows
    store.put(one.keys[0], one.block(0), replace=True)
    assert panel.rows() is not rows
    panel.close()
    panel.close()
    assert len(panel.rows()) == 1
    store.drop(one.keys[0], "test")
    assert panel.rows() == {}
    panel.close()


def test_a_tree_of_too_many_contexts_is_cut_where_least_is_lost() -> None:
    store, _ = filled(40)
    long = Context(9, branch=99, fork=1)
    for block in range(9):
        store.put(long.keys[block], long.block(block))
    rows = ContextPanel(store, most=5).rows()
    assert len(rows) == 5
    root = rows[made.block_id(long.keys[0])]
    assert made.block_id(long.keys[1]) in rows
    assert root[7] & 4
    shown = sum(row[2] for row in rows.values())
    assert shown + root[8] == store.stats().tokens == (1 + 40 * 2 + 8) * long.size
    assert all(row[0] in rows or not row[0] for row in rows.values())


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=60), st.integers(1, 30))
def test_what_is_cut_adds_up_for_every_tree(steps: list[tuple[int, int]], most: int) -> None:
    from ctxreuse.store.runs import tree_runs
    from ctxreuse.tree import ContextTree

    tree, names = ContextTree(), [bytes(32)]
    for number, (parent, tokens) in enumerate(steps, start=1):
        names.append(number.to_bytes(32, "little"))
        tree.insert(names[-1], names[parent] if parent < number else bytes(32), tokens, 1)
    table = tree_runs(tree)[0].rows
    kept, hidden = made._largest(table, most)
    assert len(kept) == min(most, len(table))
    tokens = table["tokens"]
    assert (
        int(tokens[kept].sum())
        + sum(hidden[at] for at in kept)
        + sum(int(tokens[at]) + hidden[at] for at in range(len(table)) if at not in kept and _is_top(table, at))
        == tree.tokens
    )
    for place, at in enumerate(kept):
        parent = int(table["parent"][at])
        assert parent == 0xFFFFFFFF or parent in kept[:place]


def _is_top(table: np.ndarray[Any, Any], at: int) -> bool:
    return int(table["parent"][at]) == 0xFFFFFFFF


def test_a_drain_ends_feeds(serve: Callable[..., Client]) -> None:
    ended = []
    feed = Feed({"one": lambda: time.time()}, ended=lambda: bool(ended), interval=FAST)
    client = serve(*page_routes(feed))
    with httpx.stream("GET", client.url + EVENTS) as answer:
        lines = answer.iter_lines()
        next(lines)
        ended.append(1)
        for _ in lines:  # it ends by itself
            pass
    until(lambda: feed._watching == 0)
