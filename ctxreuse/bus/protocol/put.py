"""Both sides of one put: an edge sends blocks to a cloud, one block in the cloud's memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import Buffer
from ctxreuse.bus.protocol import messages
from ctxreuse.bus.protocol.base import BlockReceiver, BlockSource, PutResult
from ctxreuse.bus.protocol.messages import Credit, Piece
from ctxreuse.bus.protocol.session import Request
from ctxreuse.bus.transfer.send import SendPlan, SendScheduler, SendTransfer
from ctxreuse.errors import CtxReuseError, ProtocolError

__all__ = ["PutReceiver", "PutSender"]

#: Payloads of a put that may be on their way.
_WINDOW = 4


class _OfferedBlocks(BlockSource):
    """The offered blocks: each is one part, read whole and kept until its last byte was sent."""

    def __init__(self, sizes: Sequence[int], read: Callable[[int], Buffer]) -> None:
        self.count = len(sizes)
        self._sizes, self._read = sizes, read
        self._near: dict[int, memoryview] = {}
        self.skipped: list[int] = []

    def parts(self, item: int) -> tuple[int, ...]:
        try:
            data = self._read(item)
        except LookupError:
            data = b""
        view = (data.data if isinstance(data, np.ndarray) else memoryview(data)).cast("B")
        if len(view) != self._sizes[item]:
            self.skipped.append(item)
            return (0,)
        self._near[item] = view
        return (0, len(view))

    def read(self, item: int, start: int, stop: int) -> memoryview:
        view = self._near[item]
        if stop == len(view):
            del self._near[item]
        return view[start:stop]

    def close(self) -> None:
        self._near.clear()


class PutSender:
    """The edge's side. Owned by a `ClientSession`."""

    def __init__(
        self, request: Request[PutResult], message: messages.Put, read: Callable[[int], Buffer], payload: int
    ) -> None:
        self.request, self.payload = request, payload
        self.round, self.open = 0, False
        self._message, self._read = message, read
        self._results: dict[int, str] = {}
        self._wanted: set[int] = set()
        self._sending: SendTransfer | None = None
        self._source: _OfferedBlocks | None = None

    @property
    def blocks(self) -> int:
        """Blocks that are offered."""
        return len(self._message.sizes)

    def offer(self) -> messages.Put:
        """Return the message that opens the put on this connection."""
        self.round, self.open = self.round + 1, True
        return msgspec.structs.replace(self._message, round=self.round)

    def take(
        self,
        message: messages.Want | messages.Credit | messages.Stored,
        owner: object,
        scheduler: SendScheduler,
        payload: int,
    ) -> list[int]:
        """Act on a message about this put; returns items that turned out to be gone."""
        match message:
            case messages.Want():
                self._want(message, owner, scheduler, payload)
            case messages.Credit():
                if self._sending is not None:
                    self._sending.credit = max(self._sending.credit, message.upto)
            case messages.Stored():
                if message.item not in self._wanted:
                    raise ProtocolError(f"stored block {message.item}, which was not sent", where="put")
                self._results[message.item] = message.reason
        return self.skipped()

    def _want(self, message: messages.Want, owner: object, scheduler: SendScheduler, payload: int) -> None:
        if self._sending is not None:
            return
        if any(item >= len(self._message.sizes) for item in message.items):
            raise ProtocolError(f"wants block {message.items[-1]} of {len(self._message.sizes)}", where="put")
        self._wanted = set(message.items)
        for item in self._wanted:
            self._results.pop(item, None)
        self._source = _OfferedBlocks(self._message.sizes, self._read)
        plan = SendPlan(self._source, "front", payload, items=message.items)
        self._sending = SendTransfer(
            owner, self._message.id, self.round, plan, credit=message.credit, memory=scheduler.memory
        )
        scheduler.add(self._sending)

    def skipped(self) -> list[int]:
        """Return items that turned out to be gone since the last call."""
        if self._source is None or not self._source.skipped:
            return []
        skipped, self._source.skipped = self._source.skipped, []
        self._results.update(dict.fromkeys(skipped, "gone"))
        return skipped

    def stop(self, scheduler: SendScheduler) -> None:
        """Suspend until the next connection."""
        self.open = False
        if self._sending is not None:
            scheduler.remove(self._sending)
            self._sending.close()
        self._sending = self._source = None

    def finish(self, scheduler: SendScheduler) -> None:
        """Complete the request: the cloud is done with it."""
        self.stop(scheduler)
        results = self._results
        self.request.succeed(
            PutResult(
                tuple(sorted(item for item, reason in results.items() if not reason)),
                tuple(item for item in range(len(self._message.sizes)) if item not in results),
                {item: reason for item, reason in sorted(results.items()) if reason},
            )
        )


class PutReceiver:
    """The cloud's side: wanted blocks arrive one after another. Owned by a `ServerSession`."""

    def __init__(self, message: messages.Put, receiver: BlockReceiver, max_payload: int) -> None:
        self.id, self.round = message.id, message.round
        self.items = tuple(receiver.wanted)
        self.got, self.upto = 0, _WINDOW if self.items else 0
        self._sizes, self._receiver, self._max_payload = message.sizes, receiver, max_payload
        self._left = list(reversed(self.items))
        self._data: npt.NDArray[np.uint8] | None = None
        self._filled = 0

    @property
    def finished(self) -> bool:
        """True when every wanted block was stored, rejected or skipped."""
        return not self._left

    def write(self, pieces: Sequence[Piece], payload: memoryview) -> list[tuple[int, str]]:
        """Take one payload; returns the blocks that it completed and why each was rejected ("": it was stored).

        Raises ProtocolError for more payloads than were granted and for bytes out of turn.
        """
        self.got += 1
        if self.got > self.upto or len(payload) > self._max_payload:
            raise ProtocolError(f"payload {self.got} of {len(payload)} bytes with credit for {self.upto}", where="put")
        at, stored = 0, []
        for item, start, nbytes in pieces:
            if not self._left or self._left[-1] != item or start != self._filled:
                raise ProtocolError(f"block {item} comes out of turn at byte {start}", where="put")
            size, stop = self._sizes[item], start + nbytes
            if stop > size:
                raise ProtocolError(f"block {item} of {size} bytes gets some at {stop}", where="put")
            if self._data is None:
                self._data = np.empty(size, np.uint8)
            self._data[start:stop] = payload[at : at + nbytes]
            at, self._filled = at + nbytes, stop
            if stop == size:
                data = self._data.data.toreadonly()
                self._left.pop()
                self._data, self._filled = None, 0
                stored.append((item, self._put(item, data)))
        return stored

    def _put(self, item: int, data: memoryview) -> str:
        try:
            return self._receiver.put(item, data)
        except CtxReuseError:
            return "failed"

    def skip(self, item: int) -> None:
        """Leave out a block that the peer no longer has. Raises ProtocolError if it has begun to send it."""
        if item not in self._left or (item == self._left[-1] and self._filled):
            raise ProtocolError(f"block {item} cannot be skipped", where="put")
        self._left.remove(item)

    @property
    def owes(self) -> bool:
        """True when half of the credit is used up and more is to come."""
        return not self.finished and self.upto - self.got <= _WINDOW // 2

    def grant(self) -> Credit:
        """Extend the credit to the full window."""
        self.upto = self.got + _WINDOW
        return Credit(self.id, self.round, self.upto)

    def close(self) -> None:
        """End the put."""
        self._data = None
        self._receiver.close()

    def check(self) -> None:
        """Raise AssertionError if more is in memory than one block."""
        assert self.got <= self.upto
        assert (self._data is not None) == (self._filled > 0)
