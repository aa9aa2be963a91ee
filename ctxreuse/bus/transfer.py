"""Which bytes go over a link next: the sending side of transfers, and the order between and inside them.

**Between transfers: fewest remaining bytes first.** It gives the least mean time to completion, and a fetch of one
block does not wait behind a whole document. **Ageing:** every `SHARE`-th payload of a node goes to the ready transfer
that has waited longest since its last one, so each of n large transfers moves at least one payload in ``n * SHARE``,
whatever else arrives. **Inside a transfer: the order its receiver asked for**, see `ctxreuse.bus.wire`.

The receiving side, `Assembly`, has its own module.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from typing import Literal, TypeAlias, TypeVar

from ctxreuse.bus.base import Gather, Supply
from ctxreuse.bus.transfer_assembly import Assembly, part_offsets
from ctxreuse.bus.transfer_memory import PayloadMemory
from ctxreuse.bus.wire import MAX_PIECES, Frame, Have, Pace, Payload, Piece, encode

__all__ = ["SHARE", "Assembly", "ChangedError", "Outgoing", "Outlet", "SendOrder", "part_offsets"]

SendOrder: TypeAlias = Literal["layers", "tail", "front"]
#: Every so many payloads, one goes by age.
SHARE = 16

# From so many bytes of one item on, a payload holds no other (unless it must, layer by layer): one run of memory is
# sent as it is, two would have to be joined, which takes longer than another message.
_ALONE = 256 << 10

_Span: TypeAlias = tuple[int, int, int]
_T = TypeVar("_T")
_Spans: TypeAlias = Generator[_Span | None, None, _T]


class ChangedError(LookupError):
    """An item is not the one any more of which the receiver has the beginning."""


class Outgoing:
    """Items of one `Supply` on their way to one peer. Owned by the thread of the sockets; only `wake` is for any.

    ``owner``: whose transfer it is (a session). ``items``: which items to send, ascending (all by default). The
    ``first`` so many of them go before all others (all by default); with ``state`` the last of those is a state.
    ``payload``: bytes at most in one message. ``have``: what the receiver has already; it is skipped. ``remaining``:
    bytes still to be sent, as far as is known: all items are taken to be as large as the first that is ready.
    ``memory``: for payloads that are gathered from several pieces (the outlet's, so that all transfers share it).
    Making and `take` raise LookupError if an item is gone, ChangedError if it is another one.
    """

    def __init__(
        self,
        owner: object,
        number: int,
        turn: int,
        supply: Supply,
        *,
        order: SendOrder,
        payload: int,
        credit: int = 0,
        items: Sequence[int] | None = None,
        state: bool = False,
        first: int | None = None,
        have: Sequence[Have] = (),
        wake: Callable[[], None] | None = None,
        memory: PayloadMemory | None = None,
    ) -> None:
        self.owner, self.id, self.round, self.supply = owner, number, turn, supply
        self.order, self.payload, self.credit = order, payload, credit
        self.items = range(supply.count) if items is None else items
        self.sent = 0  # payloads
        self.bytes = 0
        self.last = 0  # the outlet's payload number when this one was served, or added
        self.finished = False
        self._state = state
        self._runs = [run for run in (self.items[:first], self.items[first:] if first is not None else ()) if run]
        here = set(self.items)
        self._have = {item: (nbytes, check) for item, nbytes, check in have if item in here}
        self._skipped = sum(nbytes for nbytes, _ in self._have.values())
        self.remaining = self._size = 0  # of all items, and of one, once known
        self._memory = memory or PayloadMemory()
        self._gather: Gather = getattr(supply, "gather", self._join)
        self._pace: Callable[[], Pace] = getattr(supply, "pace", tuple)
        self._wake = wake
        self._woken, self._waits = False, False
        self._failed: LookupError | None = None  # found out ahead, told when what was good is sent
        self._spans = self._plan()
        supply.watch(self.wake)
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
        """The receiver allows ``upto`` payloads in all, and sees ``bandwidth`` (bytes/s, 0: unknown)."""
        self.credit = max(self.credit, upto)
        told: Callable[[int], None] | None = getattr(self.supply, "told", None)
        if bandwidth and told is not None:
            told(bandwidth)

    def wake(self) -> None:
        """Another item may be ready. Any thread."""
        self._woken = True
        if self._wake is not None:
            self._wake()

    def take(self) -> list[Frame] | None:
        """The frames of the next payload message, None if nothing is ready; ``finished`` after the last.

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
            return None
        data = self._gather(pieces, self._memory.take)
        self.sent += 1
        self.bytes += self.payload - room
        if self._next is None:  # so that the end is known with the last payload
            self._next = self._ahead()
        self._count()
        return encode(Payload(self.id, self.round, tuple(pieces), self._pace()), data)

    def close(self) -> None:
        """Give up the supply."""
        self.finished = True
        self._spans.close()
        self.supply.close()

    def _ahead(self) -> _Span | None:
        """The next span; None if its item is not ready yet, at the end (``finished``), or if it is gone."""
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

    def _join(self, pieces: Sequence[Piece], room: Callable[[int], memoryview]) -> memoryview | bytes:
        """See `Gather`; one piece is sent as it was read."""
        read = self.supply.read
        if len(pieces) == 1:
            item, start, nbytes = pieces[0]
            return read(item, start, start + nbytes)
        data, at = room(sum(nbytes for _, _, nbytes in pieces)), 0
        for item, start, nbytes in pieces:
            data[at : at + nbytes] = read(item, start, start + nbytes)
            at += nbytes
        return data

    def _count(self) -> None:
        self.remaining = max(0, self._size * len(self.items) - self._skipped - self.bytes)

    def _plan(self) -> _Spans[None]:
        """Spans of at most one payload in the order of sending; None while an item is not ready."""
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
        while (offsets := self.supply.parts(item)) is None:
            yield None
        if not offsets:
            return offsets
        self._size = self._size or offsets[-1]
        nbytes, check = self._have.get(item, (0, b""))
        if 0 < nbytes != offsets[-1] and (nbytes > offsets[-1] or self.supply.read(item, 24, 32) != check):
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


class Outlet:
    """All transfers of a node on their way out. Owned by the thread of the sockets."""

    def __init__(self) -> None:
        self.memory = PayloadMemory()
        self._transfers: dict[object, list[Outgoing]] = {}  # by owner
        self._payloads = 0

    def __len__(self) -> int:
        return sum(map(len, self._transfers.values()))

    def add(self, transfer: Outgoing) -> None:
        """Schedule a transfer from now on."""
        transfer.last = self._payloads
        self._transfers.setdefault(transfer.owner, []).append(transfer)

    def remove(self, transfer: Outgoing) -> None:
        """Forget a transfer; nothing happens if it is not there."""
        own = self._transfers.get(transfer.owner, [])
        if transfer in own:
            own.remove(transfer)
        if not own:
            self._transfers.pop(transfer.owner, None)

    def turn(self, blocked: Container[object] = ()) -> object | None:
        """The owner whose ``next`` is to be called now, None if nothing can be sent; those in ``blocked`` (their
        transport takes no more at present) are passed over."""
        best = self._best(own for owner, own in self._transfers.items() if owner not in blocked)
        return best.owner if best is not None else None

    def pick(self, owner: object) -> Outgoing | None:
        """The ready transfer of ``owner`` that goes first."""
        return self._best([self._transfers.get(owner, [])])

    def served(self, transfer: Outgoing) -> None:
        """A payload of ``transfer`` was handed to the transport."""
        self._payloads += 1
        transfer.last = self._payloads
        if transfer.finished:
            self.remove(transfer)

    def _best(self, groups: Iterable[list[Outgoing]]) -> Outgoing | None:
        by_age = self._payloads % SHARE == SHARE - 1
        best: Outgoing | None = None
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
        """Raise AssertionError if a transfer is in a state that it cannot be in."""
        for owner, own in self._transfers.items():
            assert own
            for transfer in own:
                transfer.check()
                assert transfer.owner is owner
                assert transfer.last <= self._payloads
