"""The edge's side of a link: requests that outlive connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from ctxreuse.bus import wire
from ctxreuse.bus.base import Matched
from ctxreuse.bus.session import Limits, Request, Session
from ctxreuse.bus.session_get import Allow, Asking, Getting
from ctxreuse.bus.session_known import Known
from ctxreuse.bus.session_put import Giving, Stored
from ctxreuse.bus.transfer import Assembly, Outlet
from ctxreuse.bus.transfer_card import CardAssembly
from ctxreuse.bus.wire import Frame, Message, Welcome
from ctxreuse.errors import CtxReuseError, LinkDownError, LinkRefusedError, ProtocolError
from ctxreuse.keys import ROOT, Tokens
from ctxreuse.model import ModelSpace
from ctxreuse.store.base import Buffer

__all__ = ["ClientSession", "Stored"]


class ClientSession(Session):
    """One edge's link to one cloud. Requests may be made at any time; they are sent when the link is up, and again
    after a cut. One thread calls; `announced` is for any.

    ``node``: 16 bytes that name this edge; ``spaces``: digests of its models, of which ``models`` are told whole, so
    that the cloud can encode for them; ``on_up(welcome)`` is called when a cloud
    has accepted, before anything is opened again, ``on_epoch(welcome)`` before that if it is another life of the cloud
    than before (what it announced is void; open transfers are opened again and may be refused).
    """

    def __init__(
        self,
        *,
        node: bytes,
        spaces: Sequence[bytes] = (),
        models: Sequence[ModelSpace] = (),
        program: str = "ctxreuse",
        limits: Limits | None = None,
        on_up: Callable[[Welcome], None] | None = None,
        on_epoch: Callable[[Welcome], None] | None = None,
    ) -> None:
        super().__init__(limits or Limits())
        self.node, self.spaces, self.program = node, tuple(spaces), program
        self._models = tuple(map(msgspec.msgpack.encode, models))
        self.welcome: Welcome | None = None
        self.up = False
        self.refused: LinkRefusedError | None = None
        self.draining = ""
        self.rtt: float | None = None
        self._on_up, self._on_epoch = on_up, on_epoch
        self._known = Known(self.limits.announced)
        self._outlet = Outlet()
        self._last_id = 0
        self._live: dict[int, Asking | Getting | Giving] = {}
        self._leaving = False
        self._ping, self._pinged, self._answered = 0, 0.0, True

    # ---- requests ----

    def match(self, space: bytes, keys: Sequence[bytes], request: Request[Matched] | None = None) -> Request[Matched]:
        """Ask how many leading blocks of ``keys`` (at most 8,192) are held."""
        request = request or Request()
        message = wire.Match(self._last_id + 1, space, wire.joined(keys))
        if self._admit(request.fail):
            self._start(Asking(request, message))
        return request

    def fetch(self, assembly: Assembly, *, payload: int = 0, window: int = 8, allow: Allow | None = None) -> None:
        """Get the blocks of ``assembly``; what happens is told to it alone.

        ``payload``: bytes a message at most (0: the most that both sides allow); smaller ones let others through sooner
        on a slow link. ``window``: payloads that may be on their way. ``allow``: at which levels they may come.
        """
        if assembly.ended is not None:
            return
        if len(assembly.keys) > wire.MAX_KEYS:
            assembly.end("too many blocks")
        elif self._admit(lambda error: assembly.end(error.what)):
            self._start(Getting(assembly, None, payload, window, allow))

    def card(self, assembly: CardAssembly, *, payload: int = 0, window: int = 8) -> None:
        """Get a card that the cloud has named in its welcome."""
        if self.welcome is None or (assembly.space, assembly.digest) not in self.welcome.cards:
            assembly.end("not offered")
        elif self._admit(lambda error: assembly.end(error.what)):
            self._start(Getting(assembly, None, payload, window))

    def prefill(
        self, assembly: Assembly, tokens: Tokens, *, payload: int = 0, window: int = 8, allow: Allow | None = None
    ) -> None:
        """Let the cloud compute the blocks of ``assembly`` and send them as they are made. ``tokens``: int32 [n], at
        most 2^18, the ids of the context from its start to the end of the last block."""
        row = np.ascontiguousarray(tokens, "<i4").tobytes()
        if not 4 <= len(row) <= 4 * wire.MAX_TOKENS:
            assembly.end("tokens")
        elif self._admit(lambda error: assembly.end(error.what)):
            self._start(Getting(assembly, row, payload, window, allow))

    def put(
        self,
        space: bytes,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        read: Callable[[int], Buffer],
        *,
        parent: bytes = ROOT,
        state: bool = False,
        payload: int = 0,
        request: Request[Stored] | None = None,
    ) -> Request[Stored]:
        """Offer consecutive blocks after ``parent`` and give those that the cloud wants; with ``state`` one item, the
        state at the end of the block of the one key (whose parent is ``parent``).
        ``read(i)`` returns the sealed bytes of block i (``sizes[i]`` of them; memory that nobody changes for as long as
        it is referenced), in the thread of the link; LookupError if it is gone. One put at a time is on its way, others
        wait. After a cut the blocks are offered again.
        """
        if len(sizes) != len(keys) or (state and len(keys) != 1):
            raise ValueError(f"{len(sizes)} sizes for {len(keys)} keys{' of states' if state else ''}")
        request = request or Request()
        message = wire.Put(self._last_id + 1, 1, space, parent, wire.joined(keys), tuple(sizes), state)
        if self._admit(request.fail):
            self._start(Giving(request, message, read, payload))
        return request

    def cancel(self, what: Request[Matched] | Request[Stored] | Assembly | CardAssembly) -> None:
        """Give a request up; nothing happens if it has ended."""
        for number, live in list(self._live.items()):
            owner = live.assembly if isinstance(live, Getting) else live.request
            if owner is what:
                self._drop(number, LinkDownError("cancelled"))

    def held(self) -> int | None:
        """How many keys the cloud has announced in all; None while that is not known. Any thread."""
        return self._known.count()

    def announced(self, keys: Sequence[bytes]) -> int | None:
        """How many leading keys the cloud has announced; None while that is not known. Any thread."""
        return self._known.leading(keys) if self.up else None

    def bye(self, text: str = "") -> None:
        """Start no new requests; what runs goes on. Close the transport when `drained`."""
        self._leaving, self.draining = True, text or "bye"
        self._say(wire.Bye(text))

    @property
    def drained(self) -> bool:
        """True when nothing is under way and nothing waits to be sent."""
        return not self._live and not self._control

    def close(self, reason: str = "closed") -> None:
        """End all requests."""
        self._leaving, self.draining = True, reason
        for number in sorted(self._live, reverse=True):  # those that wait for room go before there is some
            self._drop(number, LinkDownError(reason))

    # ---- the link ----

    def opened(self, now: float) -> None:
        """The transport is connected: say hello."""
        if self._open:
            self.lost(now)
        super().opened(now)
        self._pinged, self._answered = self._time, False
        known, most = self._known, self.limits.terms.max_payload
        hello = wire.Hello(wire.VERSION, wire.VERSION, self.node, self.program, self.spaces, most, models=self._models)
        if known.version:
            hello = msgspec.structs.replace(hello, epoch=known.epoch, version=known.version)
        self._say(hello)

    def lost(self, now: float) -> None:
        """The transport is gone: requests wait for the next."""
        super().lost(now)
        self.up = False
        for live in self._live.values():
            if isinstance(live, Asking):
                live.asked = False
            elif isinstance(live, Getting):
                live.stop()
            else:
                live.stop(self._outlet)

    def tick(self, now: float) -> None:
        """Ping every heartbeat; notice a silent peer, and fetches that nobody wants any more."""
        super().tick(now)
        if self.up and self._time - self._pinged >= self._heartbeat:
            self._ping += 1
            self._pinged, self._answered = self._time, False
            self._say(wire.Ping(self._ping))
        for number, live in list(self._live.items()):
            if isinstance(live, Getting) and live.assembly.ended is not None:
                self._drop(number, LinkDownError("stopped"))

    def _deadline(self) -> float:
        return self._pinged + self._heartbeat if self.up else super()._deadline()

    def _take(self, message: Message, payload: memoryview | None) -> None:
        match message:
            case Welcome():
                self._welcomed(message)
            case wire.Refused() if message.id == 0:
                self.refused = LinkRefusedError(message.text or message.code, where=message.code)
                self._die(message.code)
            case _ if not self.up:
                raise ProtocolError(f"{type(message).__name__.lower()} before welcome", where=self._who())
            case wire.Payload() if payload is not None:
                self._payload(message, payload)
            case wire.Announce():
                if not self._known.apply(message):
                    self._say(wire.Resync())
            case wire.Matched():
                asking = self._live.get(message.id)
                if not isinstance(asking, Asking):
                    self.counts["ignored"] += 1
                    return
                count = len(asking.message.keys) // 32
                if not message.state_blocks <= message.blocks <= count:
                    raise ProtocolError(f"{message.blocks} of {count} blocks matched", where=self._who())
                del self._live[message.id]
                asking.request.succeed(Matched(message.blocks, message.state_blocks, message.nbytes))
            case wire.Done():
                self._done(message)
            case wire.Refused():
                self._refuse(message)
            case wire.Want() | wire.Credit() | wire.Stored():
                giving = self._live.get(message.id)
                if not isinstance(giving, Giving) or giving.round != message.round:
                    self.counts["ignored"] += 1
                else:
                    for skipped in giving.take(message, self, self._outlet, self._payload_limit(giving.payload)):
                        self._say(wire.Skip(message.id, message.round, skipped))
            case wire.Pong():
                if message.number == self._ping:
                    self._echo()
            case wire.Bye():
                self.draining = message.text or "drain"
            case _:
                raise ProtocolError(f"a cloud sends no {type(message).__name__.lower()}", where=self._who())

    def _welcomed(self, message: Welcome) -> None:
        if message.version != wire.VERSION:
            raise ProtocolError(f"the peer chose version {message.version}, this is {wire.VERSION}", where=self._who())
        if self.up:
            self.counts["ignored"] += 1
            return
        new = self.welcome is not None and self.welcome.epoch != message.epoch
        self._known.begin(message.epoch)
        self.welcome, self._terms, self.refused, self.up = message, message.terms, None, True
        if not self._leaving:
            self.draining = ""
        self._echo()
        if new and self._on_epoch is not None:
            self._on_epoch(message)
        if self._on_up is not None:
            self._on_up(message)
        self._open_waiting()

    def _echo(self) -> None:
        """The newest ping (or hello) is answered."""
        if not self._answered:
            self.rtt, self._answered = self._time - self._pinged, True

    def _payload_limit(self, wanted: int) -> int:
        most = min(self._terms.max_payload, self.limits.terms.max_payload)
        return min(wanted or most, most)

    def _bulk(self) -> list[Frame] | None:
        while (sending := self._outlet.pick(self)) is not None:
            frames = sending.take()
            giving = self._live.get(sending.id)
            if isinstance(giving, Giving):
                for skipped in giving.skipped():
                    self._say(wire.Skip(sending.id, sending.round, skipped))
            if frames is not None:
                self._outlet.served(sending)
                return frames
            if sending.finished:
                self._outlet.remove(sending)
        return self._urgent()

    def _payload(self, message: wire.Payload, payload: memoryview) -> None:
        live = self._live.get(message.id)
        if not isinstance(live, Getting) or message.round != live.round or not live.open:
            self.counts["ignored"] += 1
            return
        live.arrived(len(payload), self.limits.terms.max_payload, message.pace)
        try:
            fresh = live.assembly.write(message.pieces, payload)
        except ProtocolError:
            if live.assembly.ended is not None:
                self._drop(message.id, LinkDownError("foreign"))
            raise
        self.counts["duplicates"] += len(payload) - fresh if live.assembly.ended in (None, "") else 0
        if live.assembly.ended is not None:
            self._drop(message.id, LinkDownError("ended"), tell=live.assembly.ended != "")
        elif live.owes:
            self._owed[message.id] = live

    def _done(self, message: wire.Done) -> None:
        live = self._live.get(message.id)
        if live is None:
            return  # it was whole with the last payload
        if isinstance(live, Asking) or live.round != message.round:
            self.counts["ignored"] += 1
        elif isinstance(live, Getting):
            if message.payloads != live.got:  # only a new connection can mend it
                lost = f"{message.payloads - live.got} of {message.payloads} payloads are lost"
                raise ProtocolError(lost, where=self._who(), fix="The fetch is resumed")
            live.assembly.finish()
            self._drop(message.id, LinkDownError("short"), tell=False)
        else:
            del self._live[message.id]
            live.finish(self._outlet)
            self._open_waiting()

    def _refuse(self, message: wire.Refused) -> None:
        live = self._live.get(message.id)
        if live is None or (not isinstance(live, Asking) and message.round not in (0, live.round)):
            self.counts["ignored"] += 1
            return
        error = LinkRefusedError(message.text or message.code, where=message.code)
        if isinstance(live, Getting):
            live.assembly.end(message.code or "failed")  # empty would mean that all is here
        self._drop(message.id, error, tell=False)

    def _admit(self, fail: Callable[[CtxReuseError], None]) -> bool:
        """True if there is room for another request; else it has failed."""
        if self.draining:
            fail(LinkDownError("drain"))
        elif len(self._live) >= self.limits.queue:
            fail(LinkDownError("busy"))
        else:
            return True
        return False

    def _start(self, live: Asking | Getting | Giving) -> None:
        self._last_id += 1
        self._live[self._last_id] = live
        self._open_waiting()

    def _drop(self, number: int, error: CtxReuseError, *, tell: bool = True) -> None:
        """Forget a request and tell whoever waits for it; with ``tell`` also the cloud."""
        live = self._live.pop(number, None)
        self._owed.pop(number, None)
        if live is None:
            return
        if isinstance(live, Getting):
            live.assembly.end(error.what)
        else:
            if isinstance(live, Giving):
                live.stop(self._outlet)
            live.request.fail(error)
        if tell and self.up and (not isinstance(live, Getting) or live.open):
            self._say(wire.Cancel(number))
        self._open_waiting()

    def _open_waiting(self) -> None:
        """Open, in the order in which they were made, the requests that the terms leave room for."""
        if not self.up:
            return
        room = self._terms.transfers - sum(isinstance(g, Getting) and g.open for g in self._live.values())
        giving = any(isinstance(g, Giving) and g.open for g in self._live.values())
        for number, live in list(self._live.items()):
            if isinstance(live, Asking):
                if not live.asked:
                    live.asked = True
                    self._say(live.message)
            elif isinstance(live, Giving):
                if not giving:
                    giving = True
                    self._say(live.offer())
            elif not live.open and room > 0:
                room -= 1
                self._open_fetch(number, live)

    def _open_fetch(self, number: int, live: Getting) -> None:
        if live.idle >= self.limits.rounds:
            live.assembly.end("no progress")
            del self._live[number]
            return
        self.counts["resumes"] += live.round > 0
        self._say(live.offer(number, self._payload_limit(live.payload), self._terms.window))

    def check(self) -> None:
        """Raise AssertionError if the session is in a state that it cannot be in."""
        super().check()
        assert self._open or not self.up
        assert all(0 < number <= self._last_id for number in self._live)
        opened = [live for live in self._live.values() if isinstance(live, Getting) and live.open]
        assert self.up or not opened
        assert len(opened) <= self._terms.transfers
        assert all(live.got <= live.upto for live in opened)
        self._outlet.check()
        self._known.check()
