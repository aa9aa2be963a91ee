"""Giving blocks to a cloud: the edge's side of one put."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from ctxreuse.bus import wire
from ctxreuse.bus.session import Request
from ctxreuse.bus.transfer import Outgoing, Outlet
from ctxreuse.errors import ProtocolError
from ctxreuse.store.base import Buffer

__all__ = ["Giving", "Stored"]


class Stored(msgspec.Struct, frozen=True):
    """What became of offered blocks, by index: ``taken`` were given, ``present`` were not wanted (held already, or no
    room), ``refused`` says why each other one was not taken (``gone``: it could not be read here any more)."""

    taken: tuple[int, ...]
    present: tuple[int, ...]
    refused: Mapping[int, str]


class _Offered:
    """The offered blocks as a `Supply`: each is one part, read whole and kept until its last byte was taken."""

    def __init__(self, sizes: Sequence[int], read: Callable[[int], Buffer]) -> None:
        self._sizes, self._read = sizes, read
        self._near: dict[int, memoryview] = {}
        self.skipped: list[int] = []

    @property
    def count(self) -> int:
        return len(self._sizes)

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

    def watch(self, wake: Callable[[], None]) -> None:
        """All are here from the start."""

    def close(self) -> None:
        self._near.clear()


class Giving:
    """One put on its way. Owned by a `ClientSession`."""

    def __init__(
        self, request: Request[Stored], message: wire.Put, read: Callable[[int], Buffer], payload: int
    ) -> None:
        self.request, self.payload = request, payload
        self.round, self.open = 0, False
        self._message, self._read = message, read
        self._results: dict[int, str] = {}
        self._wanted: set[int] = set()
        self._sending: Outgoing | None = None
        self._source: _Offered | None = None

    def offer(self) -> wire.Put:
        """The message that opens the put, on this connection."""
        self.round, self.open = self.round + 1, True
        return msgspec.structs.replace(self._message, round=self.round)

    def take(
        self, message: wire.Want | wire.Credit | wire.Stored, owner: object, outlet: Outlet, payload: int
    ) -> list[int]:
        """A message of the cloud about this put; items that cannot be given any more (to be skipped)."""
        match message:
            case wire.Want():
                self._want(message, owner, outlet, payload)
            case wire.Credit():
                if self._sending is not None:
                    self._sending.credit = max(self._sending.credit, message.upto)
            case wire.Stored():
                if message.item not in self._wanted:
                    raise ProtocolError(f"stored block {message.item}, which was not given", where="put")
                self._results[message.item] = message.reason
        return self.skipped()

    def _want(self, message: wire.Want, owner: object, outlet: Outlet, payload: int) -> None:
        if self._sending is not None:
            return
        if any(item >= len(self._message.sizes) for item in message.items):
            raise ProtocolError(f"wants block {message.items[-1]} of {len(self._message.sizes)}", where="put")
        self._wanted = set(message.items)
        for item in self._wanted:
            self._results.pop(item, None)
        self._source = _Offered(self._message.sizes, self._read)
        self._sending = Outgoing(
            owner,
            self._message.id,
            self.round,
            self._source,
            order="front",
            payload=payload,
            credit=message.credit,
            items=message.items,
            memory=outlet.memory,
        )
        outlet.add(self._sending)

    def skipped(self) -> list[int]:
        """Items that turned out to be gone since the last call."""
        if self._source is None or not self._source.skipped:
            return []
        gone, self._source.skipped = self._source.skipped, []
        self._results.update(dict.fromkeys(gone, "gone"))
        return gone

    def stop(self, outlet: Outlet) -> None:
        """This connection is over."""
        self.open = False
        if self._sending is not None:
            outlet.remove(self._sending)
            self._sending.close()
        self._sending = self._source = None

    def finish(self, outlet: Outlet) -> None:
        """The cloud is done with it."""
        self.stop(outlet)
        results = self._results
        self.request.succeed(
            Stored(
                tuple(sorted(item for item, reason in results.items() if not reason)),
                tuple(item for item in range(len(self._message.sizes)) if item not in results),
                {item: reason for item, reason in sorted(results.items()) if reason},
            )
        )
