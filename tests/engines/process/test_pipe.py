"""Between a process and its child: frames, shared memory, errors, pauses before restarts."""

from __future__ import annotations

import random
import socket
import threading

import numpy as np
import pytest

from ctxreuse.engines.chunks import RelocationError
from ctxreuse.engines.process.child import Backoff
from ctxreuse.engines.process.memory import Region, SharedMemory
from ctxreuse.engines.process.pipe import FRAME
from ctxreuse.engines.process.wire import (
    INLINE,
    Call,
    Released,
    WireError,
    engine_pipe,
    pack_arrays,
    packed_size,
    unpack_arrays,
)
from ctxreuse.errors import ContextTooLongError, ProtocolError


def test_nothing_is_taken_that_is_no_message() -> None:
    for raw in (FRAME.pack(1 << 21, 0), FRAME.pack(3, 0) + b"\xc1\xc1\xc1", FRAME.pack(1, 1 << 40)):
        here, there = socket.socketpair()
        with here, there:
            there.sendall(raw)
            with pytest.raises(ProtocolError):
                engine_pipe(here).receive()


def test_messages_of_any_size_pass_and_end_with_the_other_side() -> None:
    here, there = socket.socketpair()
    with here, there:
        left, right = engine_pipe(here), engine_pipe(there)
        data = np.random.default_rng(0).integers(0, 255, 3 << 20).astype(np.uint8)
        sending = threading.Thread(target=lambda: (left.send(Call(7, "x"), data), left.send(Released(7)), left.shut()))
        sending.start()
        call = right.receive()
        assert call is not None
        assert call[0] == Call(7, "x")
        assert np.array_equal(call[1], data)
        assert right.receive() is not None
        assert right.receive() is None
        sending.join()


def test_shared_memory_gives_each_its_own_bytes_and_shrinks() -> None:
    rng, memory = random.Random(5), SharedMemory()
    other = SharedMemory(memory.fd)
    held: dict[Region, int] = {}
    for number in range(300):
        if held and rng.random() < 0.45:
            region = rng.choice(list(held))
            mark = held.pop(region)
            assert (other.view(region) == mark).all()
            memory.give_back(region)
        else:
            region = memory.take(rng.choice([1, 100, 5000, 3 << 20]))
            memory.view(region)[:] = held[region] = number % 256
        memory.check()
    for region in held:
        memory.give_back(region)
    large = memory.take(100 << 20)
    memory.view(large)[-1] = 1
    memory.give_back(large)
    memory.check()
    assert memory.view(memory.take(80 << 20))[-1] == 0
    memory.close()


def test_arrays_pass_in_the_pipe_or_in_shared_memory() -> None:
    memory = SharedMemory()
    for count in (0, 3, INLINE):
        arrays = [np.arange(count, dtype="<i4"), np.ones((2, count), np.float32), np.zeros(count, np.uint8)]
        for room in (None, memory.take(packed_size(arrays)), memory.take(64)):
            specs, payload = pack_arrays(arrays, memory, room)
            shared = count == INLINE and room is not None and room.size > 64
            assert all((spec.at >= 0) == shared for spec in specs)
            found = unpack_arrays(specs, np.frombuffer(payload, np.uint8), memory)
            assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(arrays, found, strict=True))
    memory.close()


def test_errors_arrive_as_they_were() -> None:
    class OwnError(ContextTooLongError):
        pass

    given = OwnError("too long", where="here", fix="shorten")
    found = WireError.of(given).error()
    assert (type(found), str(found)) == (ContextTooLongError, str(given))
    moved = WireError.of(RelocationError("other", index=3, key=b"k")).error()
    assert isinstance(moved, RelocationError)
    assert (moved.index, moved.key) == (3, b"k")
    assert isinstance(WireError.of(MemoryError("no room")).error(), RuntimeError)


def test_pauses_double_until_a_life_was_of_use() -> None:
    backoff = Backoff(random.Random(1), first=1.0, longest=8.0)
    pauses = [backoff.died(useful=False) for _ in range(6)]
    assert all(top / 2 <= pause <= top for pause, top in zip(pauses, (1, 2, 4, 8, 8, 8)))
    assert backoff.died(useful=True) == 0.0
    assert backoff.died(useful=False) <= 1.0
