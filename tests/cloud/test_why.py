"""What the sidecar says of a request that a backend computed anew: by message, from hashes, each tenant its own."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_cloud.proxy.request import parse_request
from ctxreuse_cloud.proxy.request_log import FILE, CloudWhy, ProxyRequestLog

from ctxreuse.daemon.key_file import KeyFile
from ctxreuse.testing.clock import FakeClock
from support.sidecar import Edge
from support.waiting import patient

SYSTEM = "You are the clerk of a harbour office. " * 40
TEXT = "The Aurora lies at berth nine, the Boreas at berth four, and the tide is high. " * 20


def ask(
    book: ProxyRequestLog,
    name: str,
    *texts: str,
    tenant: str = "a",
    backend: str = "one",
    tokens: tuple[int, int] = (1000, 0),
    model: str = "m",
) -> CloudWhy:
    roles = ("system", "user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts)]
    asked = parse_request(json.dumps({"model": model, "messages": messages}).encode(), tenant)
    book.note(name, tenant, asked.model, backend, tokens, asked.messages())
    found = book.explain(name, tenant)
    assert found is not None
    return found


def test_the_first_message_that_differs() -> None:
    book = ProxyRequestLog()
    first = ask(book, "r1", SYSTEM, TEXT)
    assert (first.reason, first.nearest) == ("new", "")
    found = ask(book, "r2", SYSTEM, TEXT.replace("nine", "ten", 12).replace("ten", "nine", 11), TEXT, "And now?")
    assert (found.reason, found.nearest, found.part, found.name) == ("backend", "r1", 2, "user")
    reused = ask(book, "r3", SYSTEM, TEXT[:-300] + "!" * 300, TEXT, "Hm?", tokens=(1000, 600))
    assert (reused.reason, reused.part, reused.name) == ("new", 2, "user")
    offset = reused.byte - len('{"role": "user", "content": "')
    assert 0 <= len(TEXT) - 300 - offset <= 256 + 32
    assert "Move what changes" in reused.advice
    same = ask(book, "r4", SYSTEM, TEXT, tokens=(1000, 990))
    assert (same.reason, same.advice) == ("", "")


def test_hashes_that_were_kept_of_a_common_beginning_are_those_of_the_request(tmp_path: Path) -> None:
    text = "".join(f"{n} " for n in range(6000))
    changed = text[:9_000] + "!" + text[9_001:]
    with_both, alone = ProxyRequestLog(tmp_path / FILE), ProxyRequestLog(tmp_path / FILE)  # with one secret
    for name, asked in (("r1", text), ("r2", text), ("r3", changed)):
        ask(with_both, name, asked)
    ask(alone, "r3", changed)
    first, second, third = (seen.keys for seen in with_both.newest(3))
    assert first == second
    assert third == alone.newest(1)[0].keys
    equal = next(n for n in range(len(third)) if third[n] != first[n]) // 8
    head = len('{"role": "system", "content": "')
    assert equal == (head + 9_000) // 256
    for book in (with_both, alone):
        book.close()


def test_another_backend_or_one_that_forgot() -> None:
    book = ProxyRequestLog()
    ask(book, "r1", SYSTEM, TEXT)
    assert ask(book, "r2", SYSTEM, TEXT, backend="two").reason == "routed"
    assert ask(book, "r3", SYSTEM, TEXT, backend="two").reason == "backend"
    silent = ask(book, "r4", SYSTEM, TEXT, tokens=(0, 0))
    assert silent.reason == ""
    assert "did not report" in silent.text
    assert ask(book, "r5", SYSTEM, TEXT, model="other").nearest == ""


def test_tenants_know_nothing_of_each_other(tmp_path: Path) -> None:
    clock = FakeClock()
    book = ProxyRequestLog(tmp_path / FILE, clock.now)
    ask(book, "r1", SYSTEM, TEXT)
    other = ask(book, "r2", SYSTEM, TEXT, tenant="b")
    assert (other.reason, other.nearest, other.shared) == ("new", "", 0.0)
    assert book.explain("r1", "b") is None
    assert book.explain("r1", None) is not None
    raw = (tmp_path / FILE).read_bytes()
    assert b"harbour" not in raw
    one, two = (seen.keys for seen in book._seen)
    assert not {one[i : i + 8] for i in range(0, len(one), 8)} & {two[i : i + 8] for i in range(0, len(two), 8)}
    book.close()
    again = ProxyRequestLog(tmp_path / FILE, clock.now)
    assert again.explain("r2", "b") == other
    assert ask(again, "r3", SYSTEM, TEXT).nearest == "r1"
    again.close()


@pytest.mark.parametrize("body", [b"{}", b'{"messages": [7]}', b'{"prompt": [1, 2]}', b'{"messages": [{"role": 3}]}'])
def test_whatever_is_asked(body: bytes) -> None:
    book = ProxyRequestLog()
    book.note("r", "a", "m", "one", (5, 0), parse_request(body, "a").messages())
    found = book.explain("r", "a")
    assert found is None or found.nearest == ""


def get(url: str, name: str, key: str = "") -> Any:
    request = urllib.request.Request(f"{url}/api/why/{name}", headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=patient(30)) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def post(url: str, key: str, name: str, text: str, model: str) -> None:
    body = {"model": model, "messages": [{"role": "system", "content": text}], "max_tokens": 2, "temperature": 0}
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json", "x-request-id": name}
    asked = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=patient(60)) as answer:
        assert answer.headers["x-request-id"] == name


def test_over_http_each_tenant_is_told_of_its_own(
    sidecar: Callable[..., Any], tiny_folder: Path, tmp_path: Path
) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    one, two = keys.add("one"), keys.add("two")
    edge = Edge(tmp_path, tiny_folder)
    try:
        where = {"CTXREUSE_CLOUD__KEYS_FILE": str(keys.path)}
        cloud = sidecar("--workers", "0", "--backend", edge.url, **where)
        post(cloud.url, one, "mine-1", SYSTEM + TEXT[:300], tiny_folder.name)
        post(cloud.url, one, "mine-2", SYSTEM + TEXT[300:600], tiny_folder.name)
        found = get(cloud.url, "mine-2", one)
        assert (found["reason"], found["nearest"], found["part"], found["name"]) == ("new", "mine-1", 1, "system")
        assert found["cached_tokens"] > 0
        assert get(cloud.url, "mine-2") == found  # whoever runs it
        assert get(cloud.url, "mine-2", two) == get(cloud.url, "nobodys", two) == 404
        assert get(cloud.url, "mine-2", "wrong") == 401
        assert cloud.stop() == 0
        assert b"harbour" not in (tmp_path / "store" / FILE).read_bytes()
    finally:
        edge.end()
