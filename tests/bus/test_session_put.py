"""A client and a server session over a link in memory: blocks that are put, and prefill for others."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from ctxreuse.bus.protocol import messages
from ctxreuse.bus.protocol.base import PutRequest, PutResult
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transfer.receive import FetchBuffer
from support.memory_link import DictNode, link, state_of
from support.session_pair import BLOCKS, DATA, KEYS, SIZES, SPACE, TOKENS, buffer, node, whole


def test_put() -> None:
    service = DictNode(BLOCKS[:2])
    wires = link(service)
    request = wires.client.put(PutRequest(SPACE.digest, KEYS, SIZES), DATA.__getitem__)
    other = wires.client.put(PutRequest(SPACE.digest, KEYS, SIZES), DATA.__getitem__)
    wires.run()
    assert request.wait(0) == PutResult((2, 3, 4, 5), (0, 1), {})
    assert other.wait(0) == PutResult((), (0, 1, 2, 3, 4, 5), {})
    assert service.blocks == dict(BLOCKS)
    assert [receiver.closed for receiver in service.receivers] == [1, 1]


def test_many_small_blocks_share_a_payload_of_a_put() -> None:
    service = DictNode()
    wires = link(service, terms=messages.Terms(max_payload=1 << 20))
    request = wires.client.put(PutRequest(SPACE.digest, KEYS, SIZES), DATA.__getitem__)
    wires.run()
    assert request.wait(0).taken == (0, 1, 2, 3, 4, 5)
    assert wires.client.counts["payloads_out"] == 1
    assert service.blocks == dict(BLOCKS)


def test_a_put_keeps_few_blocks_in_memory() -> None:
    wires = link(DictNode())
    given: list[weakref.ref[Any]] = []

    def read(item: int) -> Any:
        block = np.frombuffer(DATA[item], np.uint8).copy()
        given.append(weakref.ref(block))
        return block

    request = wires.client.put(PutRequest(SPACE.digest, KEYS, SIZES), read)
    while wires.send(wires.client) or wires.send(wires.server):
        while wires.deliver(wires.client) or wires.deliver(wires.server):
            pass
        assert sum(block() is not None for block in given) <= 2
    assert request.done
    assert len(given) == 6


def test_a_state_is_put_alone() -> None:
    service, state = node(), state_of(SPACE, TOKENS, KEYS)
    wires = link(service)
    request = wires.client.put(
        PutRequest(SPACE.digest, KEYS[-1:], [len(state)], parent=KEYS[-2], state=True), lambda _: state
    )
    wires.run()
    assert request.wait(0).taken == (0,)
    assert service.states == {KEYS[-1]: state}


def test_a_put_survives_cuts_and_sends_no_whole_block_twice() -> None:
    service = DictNode()
    wires = link(service)
    request = wires.client.put(PutRequest(SPACE.digest, KEYS, SIZES), DATA.__getitem__)
    for step in range(200):
        if step % 9 == 8:
            assert step > 20 or not request.done
            wires.cut()
            wires.connect()
        wires.send(wires.client), wires.deliver(wires.server), wires.send(wires.server), wires.deliver(wires.client)
        wires.check()
    wires.run()
    result = request.wait(0)
    assert not result.refused
    assert sorted(result.taken + result.present) == list(range(6))
    assert service.blocks == dict(BLOCKS)
    assert wires.server.counts["opened"] > 4
    assert wires.server.counts["bytes_in"] <= sum(SIZES) + wires.server.counts["opened"] * SIZES[0]


def test_what_the_cloud_does_not_take_is_said() -> None:
    wires = link(DictNode(capacity=3))
    flipped = bytearray(DATA[1])
    flipped[SIZES[1] // 2] ^= 1

    def read(item: int) -> bytes:
        if item == 4:
            raise KeyError(item)
        return {1: bytes(flipped), 5: b"short"}.get(item, DATA[item])

    request = wires.client.put(PutRequest(SPACE.digest, KEYS, SIZES), read)
    wires.run()
    assert request.wait(0) == PutResult((0, 2, 3), (), {1: "corrupt", 4: "gone", 5: "gone"})
    request = wires.client.put(PutRequest(SPACE.digest, KEYS, SIZES), DATA.__getitem__)
    wires.run()
    assert request.wait(0).refused == {1: "full", 4: "full", 5: "full"}


def test_prefill_streams_blocks_as_they_are_made() -> None:
    service = DictNode()
    wires = link(service)
    fetch = FetchBuffer(FetchRequest(SPACE, TOKENS, first=2), KEYS)
    wires.client.fetch(fetch, compute=True)
    wires.run()
    (supply, tokens, first) = service.jobs[0]
    assert (list(tokens), first) == (list(TOKENS), 2)
    for i in range(4):
        assert fetch.received == sum(SIZES[2 : 2 + i])
        supply.make(i, DATA[2 + i])
        wires.run()
    assert whole(fetch)
    assert supply.closed == 1


def test_a_prefill_that_waits_is_not_stalled_and_may_fail() -> None:
    service = DictNode()
    wires = link(service)
    fetch = buffer()
    wires.client.fetch(fetch, compute=True)
    wires.run()
    for _ in range(200):
        wires.tick(1)
        wires.run()
    assert fetch.ended is None
    service.jobs[0][0].make(0, DATA[0])
    service.jobs[0][0].make(1, b"")
    wires.run()
    assert fetch.received == SIZES[0]
    assert fetch.ended == "gone"
