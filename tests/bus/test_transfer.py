"""Order and fairness of what is sent; checks, books and waiting of what is received."""

from __future__ import annotations

import gc
import threading
import weakref
from itertools import pairwise

import numpy as np
import pytest

from ctxreuse.block.format import Layout, Plane, block_layout, parse
from ctxreuse.bus.protocol.messages import LevelRequest, Payload, Piece
from ctxreuse.bus.protocol.wire import decode
from ctxreuse.bus.remote import Fetch, FetchRequest
from ctxreuse.bus.transfer import receive
from ctxreuse.bus.transfer.receive import FetchBuffer, part_offsets
from ctxreuse.bus.transfer.send import SHARE, ChangedError, PayloadMemory, SendPlan, SendScheduler, SendTransfer
from ctxreuse.errors import LinkDownError, ProtocolError
from ctxreuse.identity.model import LayerSpec, ModelSpace
from support.memory_link import BlockWriter, DictSource, blocks_of, space_of, state_of, tokens_of
from support.waiting import patient

SPACE = space_of(heads=4, dim=32)
TOKENS = tokens_of(5 * 4)
BLOCKS = blocks_of(SPACE, TOKENS)
KEYS = [key for key, _ in BLOCKS]
DATA = [data for _, data in BLOCKS]
OFFSETS = part_offsets(parse(DATA[0]))


def transfer_of(source: DictSource, owner: object = "a", number: int = 1, **options: object) -> SendTransfer:
    own = {name: options.pop(name) for name in ("credit", "wake", "memory", "tenant") if name in options}
    return SendTransfer(owner, number, 1, SendPlan(source, **options), **own)


def outgoing(owner: object = "a", *, blocks: int = 5, number: int = 1, **options: object) -> SendTransfer:
    options = {"order": "layers", "payload": 4096, "credit": 10_000, **options}
    return transfer_of(DictSource(list(DATA[:blocks])), owner, number, **options)


def drained(transfer: SendTransfer) -> list[tuple[tuple[Piece, ...], bytes]]:
    sent = []
    while (frames := transfer.take()) is not None:
        message, payload = decode(frames)
        assert isinstance(message, Payload)
        assert payload is not None
        sent.append((message.pieces, bytes(payload)))
        transfer.check()
    return sent


def buffer(**options: object) -> FetchBuffer:
    levels, refine = LevelRequest(tuple(options.pop("levels", ()))), options.pop("refine", False)
    return FetchBuffer(FetchRequest(SPACE, TOKENS, **options, levels=levels), KEYS, refine=refine)


def test_what_remains_is_known_though_the_first_item_is_there_and_the_second_not_made() -> None:
    source = DictSource([None, None, None])
    transfer = transfer_of(source, order="front", payload=4096, have=[(0, len(DATA[0]), DATA[0][24:32])], credit=9)
    source.make(0, DATA[0])
    assert transfer.take() is None
    transfer.check()
    assert transfer.remaining == 2 * len(DATA[0])


def test_parts_are_the_head_and_one_run_a_layer() -> None:
    view = parse(DATA[0])
    layers = len(SPACE.layers)
    assert len(OFFSETS) == layers + 2
    assert OFFSETS[0] == 0
    assert OFFSETS[-1] == len(DATA[0])
    assert OFFSETS[1:-1] == tuple(view.offset(layer, "k") for layer in range(layers))
    assert part_offsets(parse(DATA[1])) == OFFSETS
    assert parse(DATA[1]).layout.layer_offsets is view.layout.layer_offsets  # made once for all that look alike


def test_layouts_of_what_came_are_not_kept() -> None:
    """Lossy blocks all have another layout, and one of a hostile peer takes megabytes."""
    seen = []
    for size in range(1, 101):
        view = parse(resealed(DATA[0], layout=Layout((Plane(0, "k", "uint8", (size,)),))))
        assert len(part_offsets(view)) == 3
        seen.append(weakref.ref(view.layout))
    del view
    gc.collect()
    assert sum(ref() is not None for ref in seen) <= 32


def test_a_model_without_blocked_layers_has_a_head_and_one_part() -> None:
    space = ModelSpace("w" * 64, "t", "t" * 64, "float32", (LayerSpec("linear"),), "{}", 10, 100, block_tokens=4)
    (key, data), *_ = blocks_of(space, TOKENS[:4])
    offsets = part_offsets(parse(data))
    assert len(offsets) == 3
    into = FetchBuffer(FetchRequest(space, TOKENS[:4]), [key])
    fetch: Fetch = into
    assert fetch.count == 1
    into.write([(0, 0, len(data))], memoryview(data))
    into.wait_layer(0, 0)
    assert into.ended == ""


def test_layer_order_sends_all_heads_then_layer_after_layer() -> None:
    order = []
    for pieces, _ in drained(outgoing(payload=max(b - a for a, b in pairwise(OFFSETS)))):
        order += [(start, item) for item, start, _ in pieces]
    assert order == sorted(order)
    assert {start for start, _ in order} == set(OFFSETS[:-1])


def test_the_state_comes_after_the_heads() -> None:
    state = state_of(SPACE, TOKENS, KEYS)
    transfer = transfer_of(DictSource([*DATA, state]), order="layers", payload=1 << 20, credit=99, state=True)
    (pieces, payload), *_ = drained(transfer)
    items = [item for item, _, _ in pieces]
    assert items[:6] == [0, 1, 2, 3, 4, 5]
    assert pieces[5] == (5, 0, len(state))
    into = buffer(state=True)
    into.write(pieces, memoryview(payload))
    into.check()
    held = into.state(0)
    assert held is not None
    assert bytes(held.buffer) == state


@pytest.mark.parametrize(("order", "first"), [("tail", 4), ("front", 0)])
def test_whole_items_from_one_end(order: str, first: int) -> None:
    seen: list[int] = []
    for pieces, _ in drained(outgoing(order=order)):
        seen += [item for item, _, _ in pieces if not seen or seen[-1] != item]
    assert seen == (list(range(5)) if first == 0 else list(reversed(range(5))))


def test_a_payload_holds_whole_parts_and_only_a_larger_part_is_split() -> None:
    part = OFFSETS[2] - OFFSETS[1]
    for pieces, payload in drained(outgoing(payload=3 * part + 100)):
        assert len(payload) <= 3 * part + 100
        for _, start, nbytes in pieces:
            assert start in OFFSETS
            assert start + nbytes in OFFSETS
    assert all(len(payload) <= 4096 for _, payload in drained(outgoing(payload=4096)))


def test_credit_is_never_exceeded() -> None:
    transfer = outgoing(credit=3)
    assert len(drained(transfer)) == 3
    assert not transfer.ready
    transfer.credit = 5
    assert transfer.ready
    assert len(drained(transfer)) == 2


def test_what_the_receiver_has_is_not_sent() -> None:
    check = DATA[1][24:32]
    have = ((0, len(DATA[0]), DATA[0][24:32]), (1, OFFSETS[2] + 100, check), (999, 1 << 33, b"nonsense"))
    transfer = outgoing(have=have)
    assert transfer.remaining == sum(map(len, DATA)) - len(DATA[0]) - OFFSETS[2] - 100
    sent = [piece for pieces, _ in drained(transfer) for piece in pieces]
    assert min(start for item, start, _ in sent if item == 1) == OFFSETS[2] + 100
    assert all(item in (1, 2, 3, 4) for item, _, _ in sent)
    assert outgoing(have=[(i, len(data), data[24:32]) for i, data in enumerate(DATA)]).finished
    with pytest.raises(ChangedError):
        outgoing(have=((0, 100, b"another!"),))
    with pytest.raises(ChangedError):
        outgoing(have=((0, len(DATA[0]) + 1, DATA[0][24:32]),))


def test_an_item_that_goes_ends_the_transfer_after_what_was_good() -> None:
    source = DictSource([DATA[0], b""])
    transfer = transfer_of(source, order="front", payload=1 << 20, credit=9)
    assert transfer.take() is not None
    assert transfer.ready
    with pytest.raises(LookupError):
        transfer.take()


def test_items_in_the_making_are_sent_as_they_come() -> None:
    woken = []
    source = DictSource([None, None])
    transfer = transfer_of(source, order="front", payload=1 << 20, credit=9, wake=lambda: woken.append(1))
    assert transfer.waits
    assert not transfer.ready
    source.make(0, DATA[0])
    assert woken == [1]
    assert transfer.ready
    assert [pieces for pieces, _ in drained(transfer)] == [((0, 0, len(DATA[0])),)]
    assert transfer.waits
    source.make(1, DATA[1])
    assert len(drained(transfer)) == 1
    assert transfer.finished


def test_smallest_remaining_goes_first_whoever_asks() -> None:
    scheduler = SendScheduler()
    big, small = outgoing("a", blocks=5, number=1), outgoing("b", blocks=1, number=2)
    scheduler.add(big)
    scheduler.add(small)
    order = []
    while (owner := scheduler.turn()) is not None:
        transfer = scheduler.pick(owner)
        assert transfer is not None
        transfer.take()
        scheduler.served(transfer)
        scheduler.check()
        order.append(owner)
    few = order.index("a") if "a" in order else 0
    assert order[:few] == ["b"] * few
    assert few >= min(SHARE - 1, len(DATA[0]) // 4096)
    assert len(scheduler) == 0
    assert order.count("a") >= 5 * (len(DATA[0]) // 4096)


def test_blocked_owners_are_passed_over() -> None:
    scheduler = SendScheduler()
    scheduler.add(outgoing("a", blocks=1))
    assert scheduler.turn({"a"}) is None
    scheduler.add(outgoing("b", blocks=5))
    assert scheduler.turn({"a"}) == "b"
    assert scheduler.pick("c") is None


def test_tenants_send_in_turn_however_many_small_ones_one_asks_for() -> None:
    scheduler, sent, small = SendScheduler(), {"flood": 0, "other": 0}, 0
    large = outgoing("o", blocks=5, tenant="other")
    scheduler.add(large)
    while not large.finished:
        while len(scheduler) < 4:
            scheduler.add(outgoing(f"f{small}", number=small, blocks=1, tenant="flood"))
            small += 1
        owner = scheduler.turn()
        transfer = scheduler.pick(owner)
        assert transfer is not None
        transfer.take()
        scheduler.served(transfer)
        sent[transfer.tenant] += transfer.last_bytes
        scheduler.check()
        assert abs(sent["flood"] - sent["other"]) <= 2 * 4096
    assert sent["other"] == 5 * len(DATA[0])
    assert scheduler.turn({f"f{n}" for n in range(small)}) is None
    assert scheduler.turn() is not None


def test_large_transfers_always_move() -> None:
    scheduler = SendScheduler()
    large = [outgoing("large", number=i, blocks=5) for i in range(3)]
    for transfer in large:
        scheduler.add(transfer)
    small = outgoing("small", blocks=1)
    scheduler.add(small)
    for _ in range(3 * SHARE * 4):  # small ones arrive for ever
        owner = scheduler.turn()
        assert owner is not None
        best = scheduler.pick(owner) if owner == "small" else None
        turn = best or scheduler.pick("large")
        assert turn is not None
        turn.take()
        scheduler.served(turn)
        if small.finished:
            small = outgoing("small", blocks=1)
            scheduler.add(small)
    assert [transfer.sent for transfer in large] == [4, 4, 4]


def write(into: FetchBuffer, item: int, start: int, data: bytes) -> int:
    return into.write([(item, start, len(data))], memoryview(data))


def test_an_assembly_follows_the_parts() -> None:
    into = buffer()
    for i, data in enumerate(DATA):
        assert write(into, i, 0, data[: OFFSETS[2]]) == OFFSETS[2]
        into.check()
    heads = into.heads(0)
    assert [view.header.key for view in heads] == KEYS
    into.wait_layer(0, 0)
    into.wait_layer(77, 0)  # has no planes in blocks
    assert heads[2].array(0, "k").shape == (4, 4, 32)
    with pytest.raises(LinkDownError, match="did not arrive"):
        into.wait_layer(1, 0.01)
    assert into.tail() == 0
    write(into, 4, OFFSETS[2], DATA[4][OFFSETS[2] :])
    write(into, 2, OFFSETS[2], DATA[2][OFFSETS[2] :])
    assert into.tail() == 1
    write(into, 3, OFFSETS[2], DATA[3][OFFSETS[2] :])
    assert into.tail(3) == 3
    assert [bytes(view.buffer) for view in into.views(2)] == DATA[3:]
    with pytest.raises(ValueError, match="3 are complete"):
        into.views(4)
    assert into.ended is None
    into.end("gone")
    with pytest.raises(LinkDownError, match="gone"):
        into.wait_layer(1, 1)
    assert into.tail(5, patient(10)) == 3
    assert into.heads(0)[0].header.key == KEYS[0]
    assert write(into, 0, OFFSETS[2], DATA[0][OFFSETS[2] :]) == 0
    into.check()


def test_a_block_that_came_whole_stays_where_it_arrived() -> None:
    into, came = buffer(order="tail"), np.frombuffer(DATA[4] + DATA[3] + DATA[2][: OFFSETS[2]], np.uint8)
    pieces = [(4, 0, len(DATA[4])), (3, 0, len(DATA[3])), (2, 0, OFFSETS[2])]
    assert into.write(pieces, came.data) == len(came)
    into.check()
    write(into, 2, OFFSETS[2], DATA[2][OFFSETS[2] :])
    assert into.tail(3) == 3
    views = into.views(3)
    assert [bytes(view.buffer) for view in views] == DATA[2:]
    assert [np.shares_memory(np.frombuffer(view.buffer, np.uint8), came) for view in views] == [False, True, True]
    with pytest.raises(TypeError):
        views[2].buffer[0] = 0


def test_duplicates_are_harmless_and_gaps_are_lost_messages() -> None:
    into = buffer()
    write(into, 0, 0, DATA[0][:3000])
    assert write(into, 0, 0, DATA[0][:3000]) == 0
    assert write(into, 0, 1000, DATA[0][1000:4000]) == 1000
    assert into.duplicates == 5000
    assert into.have() == ((0, 4000, DATA[0][24:32]),)
    with pytest.raises(ProtocolError, match="100 bytes of item 0 are missing"):
        write(into, 0, 4100, b"x")
    assert into.ended is None  # a resume mends it
    with pytest.raises(ProtocolError, match="came twice and differs"):
        write(into, 0, 3990, b"something else")
    assert into.ended == "foreign"
    into.check()


def resealed(data: bytes, **changes: object) -> bytes:
    """A block with another header: sealed again by the writer of blocks."""
    view = parse(data)
    fields = {name: getattr(view.header, name) for name in ("kind", "space", "key", "parent", "end", "rope_at")}
    tokens = changes.pop("tokens", view.tokens)
    layout = changes.pop("layout", view.layout)
    writer = BlockWriter(layout, tokens=tokens, **{**fields, **changes})
    for plane in layout.planes:
        if (plane.layer, plane.role) in view.layout.index and writer.plane(plane.layer, plane.role).nbytes:
            source = view.plane(plane.layer, plane.role)
            writer.plane(plane.layer, plane.role)[:] = np.frombuffer(source, np.uint8)[
                : writer.plane(plane.layer, plane.role).nbytes
            ]
    return writer.seal().tobytes()


OTHER = space_of(layers=2, heads=4, dim=32)


@pytest.mark.parametrize(
    "lie",
    [
        resealed(DATA[0], key=KEYS[1]),
        resealed(DATA[0], parent=KEYS[1]),
        resealed(DATA[0], space=bytes(32)),
        resealed(DATA[0], end=8),
        resealed(DATA[0], rope_at=4),
        resealed(DATA[0], kind="state"),
        resealed(DATA[0], tokens=TOKENS[4:8]),
        resealed(DATA[0], layout=block_layout(OTHER)),
        DATA[1],
        DATA[0][:30] + b"\xff" + DATA[0][31:],
        DATA[0][:100] + b"\xff" + DATA[0][101:],
        DATA[0][:16] + (1 << 40).to_bytes(8, "little") + DATA[0][24:],
        DATA[0][:12] + (1 << 19).to_bytes(4, "little") + DATA[0][16:],
        DATA[0][:12] + bytes(4) + DATA[0][16:],
        DATA[0] + b"\0",
        DATA[0][:20],
        b"\0" * 4096,
    ],
)
def test_a_block_that_was_not_asked_for_ends_the_fetch(lie: bytes) -> None:
    into = buffer()
    with pytest.raises(ProtocolError, match="not requested"):
        write(into, 0, 0, lie)
    assert into.ended == "foreign"
    into.check()
    with pytest.raises(LinkDownError):
        into.heads(1)


def test_items_that_do_not_exist_and_states_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProtocolError, match="item 5 of 5"):
        write(buffer(), 5, 0, DATA[0])
    state = state_of(SPACE, TOKENS, KEYS)
    monkeypatch.setattr(receive, "_STATE_LIMIT", 10_000)
    with pytest.raises(ProtocolError, match="says it has"):
        write(buffer(state=True), 5, 0, state)
    monkeypatch.undo()
    with pytest.raises(ProtocolError, match="ends at 16"):
        write(buffer(state=True), 5, 0, state_of(SPACE, TOKENS, KEYS[:4]))
    with pytest.raises(ProtocolError, match="not requested"):
        write(buffer(state=True), 5, 0, DATA[4])
    into = buffer(state=True)
    write(into, 5, 0, state)
    for i, data in enumerate(DATA):
        assert into.ended is None
        write(into, i, 0, data)
    assert into.ended == ""
    assert buffer().state(0) is None


def test_a_fetch_from_the_middle_checks_positions_and_parents() -> None:
    into = FetchBuffer(FetchRequest(SPACE, TOKENS, first=2), KEYS)
    write(into, 0, 0, DATA[2])
    for keys, tokens, first in (([KEYS[0], KEYS[0], *KEYS[2:]], TOKENS, 2), (KEYS[1:], TOKENS[4:], 1)):
        with pytest.raises(ProtocolError, match="not requested"):
            write(FetchBuffer(FetchRequest(SPACE, tokens, first=first), keys), 0, 0, DATA[2])
    for keys, tokens in (([], TOKENS[:0]), (KEYS, TOKENS[:4]), ([b"short"], TOKENS[:4])):
        with pytest.raises(ValueError, match=r"blocks|keys"):
            FetchBuffer(FetchRequest(SPACE, tokens), keys)


def test_engine_threads_wait_for_what_the_link_brings() -> None:
    into = buffer()
    got: list[object] = []

    def engine() -> None:
        got.append(len(into.heads(10)))
        for layer in range(3):
            into.wait_layer(layer, 10)
            got.append(layer)
        got.append(into.tail(5, patient(10)))

    thread = threading.Thread(target=engine)
    thread.start()
    try:
        for pieces, payload in drained(outgoing(payload=4096)):
            into.write(pieces, memoryview(payload))
    finally:
        into.end("test over")
        thread.join(patient(20))
    assert got == [5, 0, 1, 2, 5]
    assert into.ended == ""
    assert into.received == sum(map(len, DATA))


def test_stop_tells_the_link_once() -> None:
    told: list[int] = []
    into = buffer()
    into.on_stop = lambda: told.append(1)
    into.stop()
    into.stop()
    assert told == [1]
    assert into.ended == "stopped"
    whole = buffer()
    whole.on_stop = lambda: told.append(2)
    for i, data in enumerate(DATA):
        write(whole, i, 0, data)
    whole.stop()
    assert told == [1]
    assert whole.ended == ""


def test_memory_of_payloads_is_used_again_only_when_nobody_refers_to_it() -> None:
    memory = PayloadMemory(kept=1 << 18)
    first = memory.take(100_000)
    first[:] = bytes([7]) * len(first)
    part = first[5:9]
    del first
    others = [memory.take(100_000) for _ in range(4)]
    for each in others:
        each[:] = bytes(len(each))
    assert bytes(part) == bytes([7]) * 4, "a slice keeps all of it"
    assert memory.out == 5
    assert memory.kept == 0
    places = {np.frombuffer(each, np.uint8).ctypes.data for each in others}
    del each, others, part
    assert memory.out == 0
    assert memory.kept == 1 << 18, "no more than it may keep"
    assert np.frombuffer(memory.take(100_001), np.uint8).ctypes.data in places
    assert memory.kept == 1 << 18


def test_payloads_of_several_pieces_do_not_share_memory_while_they_wait() -> None:
    transfer = outgoing(payload=1 << 16)
    waiting = drained(transfer)
    assert any(len(pieces) > 1 for pieces, _ in waiting)
    kept = []
    transfer = outgoing(payload=1 << 16)
    while (frames := transfer.take()) is not None:
        kept.append(frames[1])
    assert [bytes(data) for data in kept] == [data for _, data in waiting]
