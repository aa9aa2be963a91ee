"""The parts of the proxy that need no socket: breaker, routing, budget, bodies, headers, keys, streams' ends."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_cloud.proxy.admission import Admission
from ctxreuse_cloud.proxy.backends import Backends, choose
from ctxreuse_cloud.proxy.breaker import Breaker
from ctxreuse_cloud.proxy.http import answer_headers, request_headers
from ctxreuse_cloud.proxy.reported import usage_of
from ctxreuse_cloud.proxy.request import parse_request
from ctxreuse_cloud.proxy.retry import Budget, pause, retry_after, retry_status
from ctxreuse_cloud.proxy.tenants import Tenants
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.config import BackendConfig
from ctxreuse.daemon.key_file import KeyFile
from ctxreuse.daemon.middleware import request_id
from ctxreuse.errors import ConfigError, FormatError


@given(st.lists(st.tuples(st.floats(0, 40), st.sampled_from(["ok", "fail", "gone"])), max_size=60), st.integers(0, 99))
def test_a_breaker_lets_one_through_after_a_pause(steps: list[tuple[float, str]], seed: int) -> None:
    breaker, now, row = Breaker(limit=3, pause=1.0, longest=30.0, rng=random.Random(seed)), 0.0, 0
    for wait, end in steps:
        now += wait
        if not breaker.allows(now):
            assert breaker.state(now) == "open"
            assert 0 < breaker.wait(now) <= 30
            continue
        half = breaker.state(now) == "half-open"
        breaker.begin(now)
        assert breaker.allows(now) is not half  # a trial is alone
        if end == "ok":
            breaker.succeeded()
            row = 0
            assert breaker.state(now) == "closed"
        elif end == "fail":
            breaker.failed(now)
            row += 1
            assert (breaker.state(now) == "open") == (half or row >= 3)
        else:
            breaker.gave_up()
            assert breaker.allows(now)
        breaker.check()


class Place:
    def __init__(self, name: str, outstanding: int = 0) -> None:
        self.name, self.outstanding = name, outstanding


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.binary(min_size=1, max_size=8))
def test_a_context_keeps_its_place_unless_that_is_overloaded(loads: list[int], key: bytes) -> None:
    places = [Place(f"b{i}", n) for i, n in enumerate(loads)]
    idle = [Place(place.name) for place in places]
    home, now = choose(idle, key), choose(places, key)
    assert home is not None
    assert now is not None
    at_home = next(place for place in places if place.name == home.name)
    mean = (sum(loads) + 1) / len(loads)
    if at_home.outstanding < max(4, 1.25 * mean):
        assert now is at_home
    assert now.outstanding <= max(4, 1.25 * mean + 1)
    # Taking away another place moves nobody.
    if len(idle) > 1:
        rest = [place for place in idle if place.name == home.name or place is not idle[-1]]
        assert choose(rest, key) is home
    assert choose(places, key, lambda _: False) is None
    least = choose(places, b"")
    assert least is not None
    assert least.outstanding == min(loads)


@given(st.lists(st.booleans(), max_size=200))
def test_retries_are_a_share_of_the_requests(steps: list[bool]) -> None:
    budget, requests, taken = Budget(0.2, 10.0), 0, 0
    for request in steps:
        if request:
            budget.request()
            requests += 1
        else:
            taken += budget.take()
        budget.check()
    assert taken <= 10 + 0.2 * requests


def test_pauses_grow_and_statuses_are_sorted() -> None:
    rng = random.Random(1)
    assert [0.5 * 0.05 * 2**n <= pause(n + 1, rng) <= 0.05 * 2**n for n in range(4)] == [True] * 4
    assert max(pause(30, rng) for _ in range(50)) <= 1.0
    again = [status for status in (200, 400, 404, 408, 429, 500, 501, 502, 503, 504) if retry_status(status)]
    assert again == [408, 429, 500, 502, 503, 504]
    given = [retry_after({"Retry-After": text}) for text in ("3", "", "-1", "Wed, 21 Oct", "9" * 20, "٣")]
    assert given == [3.0, None, None, None, None, None]


def test_admission_counts_back() -> None:
    admission = Admission(1)
    with admission.enter("a") as one, admission.enter("b") as other, admission.enter("a") as more:
        assert (one, other, more, admission.running) == (True, True, False, 2)
        admission.check()
    assert admission.running == 0
    admission.check()


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["model", "messages", "prompt", "cache_salt", "n", "input"]), _values))
def test_bodies_are_read_or_refused_and_never_keep_a_salt(body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    try:
        asked = parse_request(raw, "t")
    except FormatError:
        assert not isinstance(body.get("model"), str | None) or not isinstance(body.get("messages"), list | None)
        return
    rest = {name: value for name, value in body.items() if name != "cache_salt"}
    assert json.loads(asked.body("")) == rest
    assert json.loads(asked.body("s")) == rest | {"cache_salt": "s"}
    assert asked.model == (body.get("model") or "")
    assert parse_request(raw, "t").context == asked.context
    assert not asked.context or parse_request(raw, "u").context != asked.context


@given(st.binary(max_size=200))
def test_no_body_does_anything_but_be_refused(raw: bytes) -> None:
    try:
        parse_request(raw, "t")
    except FormatError:
        return
    assert isinstance(json.loads(raw), dict)


def test_a_context_is_named_by_how_it_begins() -> None:
    def context(**body: Any) -> bytes:
        return parse_request(json.dumps({"model": "m"} | body).encode(), "t").context

    system = {"role": "system", "content": "s"}
    assert context(messages=[system, {"content": "a"}]) == context(messages=[system, {"content": "b"}])
    assert context(messages=[system]) != context(messages=[{"content": "a"}])
    assert context(prompt_cache_key="k", messages=[system]) == context(prompt_cache_key="k", prompt="p")
    assert context(prompt="x" * 5000) == context(prompt="x" * 6000)
    assert context(messages=[]) == context(prompt="") == context(input=None) == b""


def test_headers_of_a_hop_and_of_the_caller_stay_behind() -> None:
    sent = [
        (b"host", b"h"), (b"connection", b"keep-alive, X-Mine"), (b"x-mine", b"1"), (b"te", b"trailers"),
        (b"authorization", b"Bearer k"), (b"cookie", b"c"), (b"traceparent", b"t"), (b"accept-encoding", b"gzip"),
        (b"x-request-id", b"theirs"), (b"content-type", b"application/json"),
    ]  # fmt: skip
    assert request_headers(sent, "id", "") == [
        ("traceparent", "t"),
        ("content-type", "application/json"),
        ("accept-encoding", "identity"),
        ("x-request-id", "id"),
    ]
    assert ("authorization", "Bearer own") in request_headers(sent, "id", "own")
    came = [(b"Content-Type", b"x"), (b"Transfer-Encoding", b"chunked"), (b"Set-Cookie", b"c"), (b"X-Request-Id", b"o")]
    assert answer_headers(came, "id") == [(b"content-type", b"x"), (b"x-request-id", b"id")]
    assert request_id(b"abc-1") == "abc-1"
    assert all(request_id(given).startswith("req-") for given in (b"", b"a b", b"x\r\ny", b"a" * 200))


@pytest.mark.parametrize(
    ("tail", "events", "found"),
    [
        (b'data: {"usage": null}\n\ndata: {"usage": {"prompt_tokens": 3}}\n\ndata: [DONE]\n\n', True, 3),
        (b'oken"}}]}\n\ndata: {"usage":{"prompt_tokens":4,"x":[{}]}}\n\n', True, 4),
        (b'data: {"usage": {"prompt_tokens": -3}}\n\n', True, None),
        (b'data: {"usage": {"prompt_tokens": "many"}}\n\n', True, None),
        (b'data: {"usage": ', True, None),
        (b'{"usage": {"prompt_tokens": 5}}', False, 5),
        (b'\xff{"usage"', False, None),
        (b"", True, None),
    ],
)
def test_usage_at_the_end(tail: bytes, events: bool, found: int | None) -> None:
    usage = usage_of(tail, events=events)
    assert (usage.prompt_tokens if usage else None) == found


def test_key_files(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "deep" / "keys.json")
    first, second = file.add("a", clock=lambda: 1.0), file.add("a", clock=lambda: 2.0)
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert first not in file.path.read_text()
    table = Tenants(file)
    found = [table.find([(b"authorization", f"bearer {key}".encode())]) for key in (first, second, "", "x" * 600)]
    assert [key and key.tenant for key in found] == ["a", "a", None, None]
    assert table.find([]) is None
    assert table.keys is not None
    assert table.salt("a") != table.salt("b")
    assert file.revoke(file.read().keys[0].id) == 1
    assert table.keys.refresh()
    assert not table.keys.refresh()
    assert [table.keys.find(key) is not None for key in (first, second)] == [False, True]
    for name in ("", "../x", "a b", "x" * 65):
        with pytest.raises(ConfigError, match="called"):
            file.add(name)
    with pytest.raises(ConfigError, match="nobody"):
        file.revoke("nobody")
    file.path.chmod(0o644)
    with pytest.raises(ConfigError, match="other users may access"):
        file.read()
    file.path.write_bytes(b"{")
    file.path.chmod(0o600)
    with pytest.raises(ConfigError, match="cannot be read"):
        table.keys.refresh()
    assert table.keys.find(second) is not None


def test_backends_are_checked(tmp_path: Path) -> None:
    for url in ("127.0.0.1:8000", "ftp://x", "http://", "http://x?y=1"):
        with pytest.raises(ConfigError, match="not the address"):
            Backends([BackendConfig(url=url)])
    with pytest.raises(ConfigError, match="no password") as refused:
        Backends([BackendConfig(url="http://me:secret@x:1")])
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match="two backends"):
        Backends([BackendConfig(url="http://x:1"), BackendConfig(url="http://x:1/v1")])
    with pytest.raises(ConfigError, match="API key file"):
        Backends([BackendConfig(url="http://x", api_key_file=str(tmp_path / "none"))])
    full = Backends([BackendConfig(url="http://x:1", max_inflight=1)])
    with full.all[0].request():
        assert full.choose("m", b"c") is None
    assert full.choose("m", b"c", tried=full.all) == (full.all[0], None)
