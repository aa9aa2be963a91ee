"""Answers over a link in memory: drafts, verdicts, peers that know nothing of them, and those that break the rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ctxreuse.bus.protocol import messages
from ctxreuse.bus.protocol.base import Grant
from ctxreuse.bus.protocol.verify import PendingVerify
from ctxreuse.errors import LinkRefusedError, ProtocolError
from support.counting import SPACE
from support.memory_link import NODE, SALT, DictNode
from support.session_pair import client_of, said, server_of, tell


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


class ByHand:
    """A `VerifySource` whose verdicts come when the test says so."""

    def __init__(self) -> None:
        self.ended: str | None = None
        self.waiting: list[messages.Verdict] = []
        self.drafts: list[tuple[int, list[int]]] = []
        self.closed = 0

    def draft(self, start: int, tokens: Any) -> None:
        self.drafts.append((start, tokens.tolist()))

    def verdicts(self) -> list[messages.Verdict]:
        found, self.waiting = self.waiting, []
        return found

    def close(self) -> None:
        self.closed += 1


class Node(DictNode):
    def __init__(self, refuse: str = "") -> None:
        super().__init__()
        self.sourced: list[ByHand] = []
        self.why = refuse

    def admit(self, user: str, node: bytes, spaces: Any) -> Grant:
        return Grant(f"tenant-{user}", SALT, (SPACE.digest,), (SPACE,))

    def open_verify(self, tenant: str, request: messages.Verify, wake: Any) -> ByHand:
        if self.why:
            raise LinkRefusedError("not now", where=self.why)
        self.sourced.append(ByHand())
        return self.sourced[-1]


def verify_of(number: int = 1, count: int = 8) -> messages.Verify:
    return messages.Verify(number, SPACE.digest, ids(1, 2), count)


def begun(count: int = 8) -> tuple[Any, PendingVerify]:
    """A client with an answer under way."""
    client, answer = client_of(), PendingVerify(verify_of(count=count))
    client.verify(answer)
    assert [type(message) for message in said(client)] == [messages.Verify]
    return client, answer


def test_a_cloud_says_its_verdicts_and_the_end() -> None:
    node = Node()
    server = server_of(node)
    tell(server, verify_of())
    tell(server, messages.Draft(1, 3, ids(7, 8)))
    tell(server, messages.Draft(2, 0, ids(7)))  # of an answer that is not open
    (source,) = node.sourced
    assert source.drafts == [(3, [7, 8])]
    source.waiting = [messages.Verdict(9, 0, ids(4, 5), 2, 1)]
    assert not server.drained
    server.collect()
    assert said(server) == [messages.Verdict(1, 0, ids(4, 5), 2, 1)]
    source.waiting, source.ended = [messages.Verdict(9, 2, ids(6))], ""
    server.collect()
    assert said(server) == [messages.Verdict(1, 2, ids(6)), messages.Done(1, 1)]
    assert source.closed == 1
    assert server.drained


def test_a_cloud_that_does_not_verify_refuses_and_the_link_stays() -> None:
    """As a peer of this version does; one that is older was never asked, as its welcome named no space."""
    server = server_of(DictNode())
    tell(server, verify_of())
    (refused,) = said(server)
    assert isinstance(refused, messages.Refused)
    assert (refused.id, refused.code) == (1, "space")
    tell(server, messages.Ping(1))
    assert said(server) == [messages.Pong(1)]
    for code in ("tokens", "busy", "space"):
        server = server_of(Node(code))
        tell(server, verify_of())
        assert said(server) == [messages.Refused(1, code, "not now")]


def test_a_failed_engine_a_cancel_a_cut_and_too_many() -> None:
    node = Node()
    server = server_of(node)
    for number in range(1, 18):
        tell(server, verify_of(number))
    assert [message.code for message in said(server) if isinstance(message, messages.Refused)] == ["busy"]
    node.sourced[0].ended = "the engine process died"
    server.collect()
    assert said(server) == [messages.Refused(1, "failed", "the engine process died")]
    tell(server, messages.Cancel(2))
    assert node.sourced[1].closed == 1
    server.drain()
    tell(server, verify_of(40))
    assert messages.Refused(40, "drain", "drain") in said(server)
    server.lost(0.0)
    assert all(source.closed == 1 for source in node.sourced)


def test_an_edge_takes_verdicts_in_order_and_the_reason_of_an_early_end() -> None:
    client, answer = begun()
    tell(client, messages.Verdict(1, 0, cached=64))
    tell(client, messages.Verdict(1, 0, ids(4, 5)))
    first = answer.take(0.0)
    assert first is not None
    assert first.tokens == ids(4, 5)  # the one that only said there is progress gave way
    answer.on_draft = lambda start, tokens: client.draft(answer, start, tokens)
    answer.draft(2, np.array([6, 7]))
    assert said(client) == [messages.Draft(1, 2, ids(6, 7))]
    tell(client, messages.Done(1, 1))
    assert (answer.take(0.0), answer.ended) == (None, "")
    answer.draft(2, np.array([6]))
    assert said(client) == []
    for end, reason in (
        (lambda client: tell(client, messages.Refused(1, "busy")), "busy"),
        (lambda client: client.lost(0.0), "cut"),
        (lambda client: client.close(), "down"),
    ):
        client, answer = begun()
        end(client)
        assert (answer.take(0.0), answer.ended) == (None, reason)
        client.check()
    client, answer = begun()
    client.stop_answer(answer)
    assert said(client) == [messages.Cancel(1)]
    tell(client, messages.Verdict(1, 0, ids(4)))  # it was on its way
    down, answer = client_of(), PendingVerify(verify_of())
    down.lost(0.0)
    down.verify(answer)
    assert answer.ended == "down"


@pytest.mark.parametrize(
    "verdict",
    [
        messages.Verdict(1, 1, ids(4)),
        messages.Verdict(1, 0, ids(*range(9))),
        messages.Verdict(1, 0, ids(4), 1, 2),
        messages.Verdict(1, 0, b"", 1, 1),
    ],
    ids=["a gap", "more than was asked for", "more right than drafted", "right ones without tokens"],
)
def test_verdicts_that_cannot_be(verdict: messages.Verdict) -> None:
    client, _ = begun()
    with pytest.raises(ProtocolError):
        tell(client, verdict)


def test_no_peer_fills_memory_with_verdicts_that_say_nothing() -> None:
    client, answer = begun()
    for _ in range(1000):
        tell(client, messages.Verdict(1, 0))
    assert len(answer._verdicts) == 1


def test_a_silent_cloud_is_given_up() -> None:
    stopped = []
    _, answer = begun()
    answer.on_stop = lambda: stopped.append(1)
    assert answer.take(0.01) is None
    assert (answer.ended, stopped) == ("stalled", [1])


def test_descriptions_that_cannot_be_read_are_left_out() -> None:
    from ctxreuse.bus.transport.client import _described

    good = messages.Welcome(1, NODE, 7, SALT)
    for raw in ("text", {"a": 1}, [b"no model", 3, None, b"\xc1"], 7):
        assert list(_described(messages.Welcome(1, NODE, 7, SALT, verifies=raw))) == []
    assert list(_described(good)) == list(_described(None)) == []
    server = server_of(Node())
    server.opened(0.0)
    tell(server, messages.Hello(1, 1, NODE))
    welcome = said(server)[0]
    assert isinstance(welcome, messages.Welcome)
    assert list(_described(welcome)) == [SPACE]
