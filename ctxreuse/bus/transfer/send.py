"""The sending side of transfers: which bytes go over a link next.

**Between tenants: in turn by bytes**, see `ctxreuse.fair`. **Between transfers of a tenant: fewest remaining bytes
first.** That gives the least mean time to completion, and a fetch of one block does not wait behind a whole document.
**Ageing:** every `SHARE`-th payload of a tenant goes to its ready transfer that has waited longest, so each of n large
ones moves at least one payload in ``n * SHARE``. **Inside a transfer: the order its receiver requested**, see
`ctxreuse.bus.protocol.wire`.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ctxreuse.bus.protocol.base import SendPlan
from ctxreuse.bus.protocol.messages import MAX_PIECES, Payload, Piece
from ctxreuse.bus.protocol.wire import Frame, encode
from ctxreuse.fair import Turns

__all__ = ["SHARE", "ChangedError", "PayloadMemory", "SendPlan", "SendScheduler", "SendTransfer"]

#: Of every so many payloads of a tenant, one goes by age.
SHARE = 16
#: Of so many tenants the payloads are counted while they have no transfers.
_MOST_TENANTS = 1024

# From so many bytes of one item on, a payload holds no other (unless it must, layer by layer): one run of memory is
# sent as it is, two would have to be joined, which takes longer than another message.
_ALONE = 256 << 10

_Span: TypeAlias = tuple[int, int, int]
_T = TypeVar("_T")
_Spans: TypeAlias = Generator[_Span | None, None, _T]


class ChangedError(LookupError):
    """An item is no longer the one of which the receiver has the beginning."""


_LEAST = 16  # binary logarithm of the smallest size that is made


class PayloadMemory:
    """A pool of payload memory; each piece returns by itself when the last reference to it goes.

    One thread takes; any may release (ZeroMQ does in its own). At most ``kept`` free bytes are kept for reuse: fresh
    memory costs a page fault for every 4 KiB, which takes longer than to fill it.
    """

    def __init__(self, kept: int = 32 << 20) -> None:
        self._most = kept
        self._free: list[deque[npt.NDArray[np.uint8]]] = [deque() for _ in range(64)]  # by logarithm of their size
        self._out: dict[int, tuple[weakref.ref[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]] = {}

    @property
    def kept(self) -> int:
        """Free bytes kept for reuse."""
        return sum(len(free) << power for power, free in enumerate(self._free) if free)

    @property
    def out(self) -> int:
        """Payloads whose memory is still referenced."""
        return len(self._out)

    def take(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` writable bytes of any content, exclusive until the last view of them is gone."""
        power = max(_LEAST, (nbytes - 1).bit_length())
        try:
            room = self._free[power].pop()
        except IndexError:
            room = np.empty(1 << power, np.uint8)
        view = room[:nbytes]
        watch = weakref.ref(view, self._back)
        self._out[id(watch)] = (watch, room)
        return view.data

    def _back(self, watch: weakref.ref[npt.NDArray[np.uint8]]) -> None:
        _, room = self._out.pop(id(watch))
        if self.kept + room.nbytes <= self._most:
            self._free[room.nbytes.bit_length() - 1].append(room)


class SendTransfer:
    """Items on their way to one peer. Owned by the thread of the sockets; only `wake` is for any.

    ``remaining``: bytes still to be sent, as far as known: all items are taken to be as large as the first ready one.
    The constructor and `take` raise LookupError if an item is gone, ChangedError if it is another one.

    Args:
        owner: Whose transfer it is (a session).
        tenant: The owner's.
        number: Id of the request.
        turn: Its round.
        plan: What to send.
        credit: Payloads granted so far.
        wake: Called when another item is ready.
        memory: For payloads gathered from several pieces (the scheduler's, so that all transfers share it).
    """

    def __init__(
        self,
        owner: object,
        number: int,
        turn: int,
        plan: SendPlan,
        *,
        credit: int = 0,
        wake: Callable[[], None] | None = None,
        memory: PayloadMemory | None = None,
        tenant: str = "",
    ) -> None:
        self.tenant = tenant
        self.owner, self.id, self.round, self.source = owner, number, turn, plan.source
        self.order, self.payload, self.credit = plan.order, plan.payload, credit
        self.items = range(plan.source.count) if plan.items is None else plan.items
        self.sent = 0  # payloads
        self.bytes = self.last_bytes = 0  # in all, and of the last payload
        self.last = 0  # the scheduler's payload number when this one was served, or added
        self.finished = False
        self._state = plan.state
        runs = (self.items[: plan.first], self.items[plan.first :] if plan.first is not None else ())
        self._runs = [run for run in runs if run]
        here = set(self.items)
        self._have = {item: (nbytes, check) for item, nbytes, check in plan.have if item in here}
        self._skipped = sum(nbytes for nbytes, _ in self._have.values())
        self.remaining = self._size = 0  # of all items, and of one, once known
        self._memory = memory or PayloadMemory()
        self._wake = wake
        self._woken, self._waits = False, False
        self._failed: LookupError | None = None  # found ahead, raised when what is good was sent
        self._spans = self._plan()
        self.source.prepare(plan.payload if plan.order != "layers" else 0, self._memory.take)
        self.source.watch(self.wake)
        self._next: _Span | None = self._ahead()
        if self._failed is not None:
            raise self._failed
        self._count()

    @property
    def ready(self) -> bool:
        """True if the peer's credit and the items made so far may allow another payload."""
        return self.credit > self.sent and not self.finished and (self._woken or not self._waits)

    @property
    def waits(self) -> bool:
        """True while the next item is still being made."""
        return self._waits and not self._woken

    def granted(self, upto: int, bandwidth: int = 0) -> None:
        """Raise the credit to ``upto`` payloads in all; the receiver measures ``bandwidth`` (bytes/s, 0: unknown)."""
        self.credit = max(self.credit, upto)
        if bandwidth:
            self.source.on_bandwidth(bandwidth)

    def wake(self) -> None:
        """Another item may be ready. Any thread."""
        self._woken = True
        if self._wake is not None:
            self._wake()

    def take(self) -> list[Frame] | None:
        """Return the next payload message, None if nothing is ready; ``finished`` after the last.

        Raises LookupError if an item is gone.
        """
        if self.credit <= self.sent or self.finished:
            return None
        pieces: list[Piece] = []
        room = self.payload
        while len(pieces) < MAX_PIECES:
            self._next = span = self._next or self._ahead()
            if span is None or span[2] - span[1] > room:
                break
            item, start, stop = span
            if pieces and item != pieces[-1][0] and self.order != "layers" and self.payload - room >= _ALONE:
                break
            self._next = None
            room -= stop - start
            if pieces and pieces[-1][0] == item and pieces[-1][1] + pieces[-1][2] == start:
                pieces[-1] = (item, pieces[-1][1], pieces[-1][2] + stop - start)
            else:
                pieces.append((item, start, stop - start))
        if not pieces:
            if self._failed is not None:
                raise self._failed
            self._count()  # the size may be known only now: of an item that the receiver has already
            return None
        data = self.source.gather(pieces, self._memory.take)
        self.sent += 1
        self.last_bytes = self.payload - room
        self.bytes += self.last_bytes
        if self._next is None:  # so that the end is known with the last payload
            self._next = self._ahead()
        self._count()
        return encode(Payload(self.id, self.round, tuple(pieces), self.source.pace()), data)

    def close(self) -> None:
        """Close the source."""
        self.finished = True
        self._spans.close()
        self.source.close()

    def _ahead(self) -> _Span | None:
        """Return the next span; None if its item is not ready or gone, and at the end (``finished``)."""
        self._woken = False
        span = None
        try:
            span = next(self._spans)
            self._waits = span is None
        except StopIteration:
            self.finished = self._failed is None
        except LookupError as error:
            self._failed, self._waits = error, False
        return span

    def _count(self) -> None:
        self.remaining = max(0, self._size * len(self.items) - self._skipped - self.bytes)

    def _plan(self) -> _Spans[None]:
        """Yield spans of at most one payload in the order of sending; None while an item is not ready."""
        for i, run in enumerate(self._runs):
            if self.order == "layers" and len(run) > 1:
                yield from self._by_layer(run, self._state and i == 0)
            else:
                yield from self._whole(run)

    def _whole(self, items: Sequence[int]) -> _Spans[None]:
        for item in items if self.order == "front" else reversed(items):
            offsets = yield from self._offsets(item)
            start = self._have.get(item, (0, b""))[0]
            while offsets and start < offsets[-1]:
                # As many whole parts as a payload takes, else a payload's worth of one that is larger.
                stop = offsets[bisect_right(offsets, start + self.payload) - 1]
                stop = stop if stop > start else start + self.payload
                yield item, start, stop
                start = stop

    def _by_layer(self, items: Sequence[int], state: bool) -> _Spans[None]:
        known: dict[int, tuple[int, ...]] = {}
        for item in items:
            known[item] = yield from self._offsets(item)
            yield from self._part(item, known[item], 0)
        if state:  # it is needed before any layer can be computed
            last = items[-1]
            offsets = known.pop(last)
            for part in range(1, len(offsets) - 1):
                yield from self._part(last, offsets, part)
        for part in range(1, max(map(len, known.values()), default=0) - 1):
            for item, offsets in known.items():
                yield from self._part(item, offsets, part)

    def _offsets(self, item: int) -> _Spans[tuple[int, ...]]:
        while (offsets := self.source.parts(item)) is None:
            yield None
        if not offsets:
            return offsets
        self._size = self._size or offsets[-1]
        nbytes, check = self._have.get(item, (0, b""))
        if 0 < nbytes != offsets[-1] and (nbytes > offsets[-1] or self.source.read(item, 24, 32) != check):
            raise ChangedError(item)
        return offsets

    def _part(self, item: int, offsets: tuple[int, ...], part: int) -> _Spans[None]:
        if part >= len(offsets) - 1:
            return
        start, end = max(offsets[part], self._have.get(item, (0, b""))[0]), offsets[part + 1]
        while start < end:
            stop = min(end, start + self.payload)
            yield item, start, stop
            start = stop

    def check(self) -> None:
        """Raise AssertionError if more was sent than granted."""
        assert self.sent <= self.credit
        assert self.bytes <= self.sent * self.payload
        assert self.remaining == max(0, self._size * len(self.items) - self._skipped - self.bytes)


class SendScheduler:
    """All transfers of a node. Owned by the thread of the sockets."""

    def __init__(self) -> None:
        self.memory = PayloadMemory()
        self._transfers: dict[str, dict[object, list[SendTransfer]]] = {}  # by tenant and owner
        self._turns = Turns[str]()
        self._payloads = 0
        self._by_tenant: Counter[str] = Counter()  # payloads

    def __len__(self) -> int:
        return sum(len(own) for owners in self._transfers.values() for own in owners.values())

    def add(self, transfer: SendTransfer) -> None:
        """Schedule a transfer from now on."""
        transfer.last = self._payloads
        self._transfers.setdefault(transfer.tenant, {}).setdefault(transfer.owner, []).append(transfer)

    def remove(self, transfer: SendTransfer) -> None:
        """Forget a transfer, if it is there."""
        owners = self._transfers.get(transfer.tenant, {})
        own = owners.get(transfer.owner, [])
        if transfer in own:
            own.remove(transfer)
        if not own:
            owners.pop(transfer.owner, None)
        if not owners:
            self._transfers.pop(transfer.tenant, None)
            if len(self._by_tenant) > _MOST_TENANTS:
                self._by_tenant.pop(transfer.tenant, None)

    def turn(self, blocked: Container[object] = ()) -> object | None:
        """Return the owner whose ``next`` is to be called now, None if nothing can be sent. Those in ``blocked`` (their
        transport takes no more now) are skipped."""
        for tenant in self._turns.order(self._transfers):
            owners = self._transfers[tenant]
            best = self._best(tenant, (own for owner, own in owners.items() if owner not in blocked))
            if best is not None:
                return best.owner
        return None

    def pick(self, owner: object) -> SendTransfer | None:
        """Return the ready transfer of ``owner`` that goes first."""
        tenant = next((tenant for tenant, owners in self._transfers.items() if owner in owners), None)
        return self._best(tenant, [self._transfers[tenant][owner]]) if tenant is not None else None

    def served(self, transfer: SendTransfer) -> None:
        """Note that a payload of ``transfer`` was handed to the transport."""
        self._payloads += 1
        transfer.last = self._payloads
        self._by_tenant[transfer.tenant] += 1
        self._turns.charge(transfer.tenant, transfer.last_bytes)
        if transfer.finished:
            self.remove(transfer)

    def _best(self, tenant: str, groups: Iterable[list[SendTransfer]]) -> SendTransfer | None:
        by_age = self._by_tenant[tenant] % SHARE == SHARE - 1
        best: SendTransfer | None = None
        least = last = 0
        for group in groups:
            for transfer in group:
                if not transfer.ready:
                    continue
                size = 0 if by_age else transfer.remaining
                if best is None or size < least or (size == least and transfer.last < last):
                    best, least, last = transfer, size, transfer.last
        return best

    def check(self) -> None:
        """Raise AssertionError if a transfer's state is inconsistent."""
        assert all(self._transfers.values())
        for tenant, owners in self._transfers.items():
            for owner, own in owners.items():
                assert own
                for transfer in own:
                    transfer.check()
                    assert (transfer.tenant, transfer.owner) == (tenant, owner)
                    assert transfer.last <= self._payloads
