"""The cloud's side of a link: one peer's requests, within the peer's bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ctxreuse.bus import wire
from ctxreuse.bus.base import Grant, Service, Supply
from ctxreuse.bus.session import Limits, Session
from ctxreuse.bus.session_intake import Taking
from ctxreuse.bus.session_supply import described, opened, packer_of
from ctxreuse.bus.session_tell import Telling
from ctxreuse.bus.transfer import ChangedError, Outgoing, Outlet
from ctxreuse.bus.wire import Frame, Message
from ctxreuse.errors import CtxReuseError, LinkRefusedError, ProtocolError
from ctxreuse.model import ModelSpace

__all__ = ["ServerSession"]


class ServerSession(Session):
    """One peer of a cloud; everything of it is given up when its connection is. One thread calls.

    ``user``: the peer's entry in the allow-list, from its key. ``outlet`` is shared by all sessions of the node: ask
    its `turn` whose `next` to call. ``wake`` is called, from any thread, when a prefill has made something for this
    peer. ``epoch``: a number of this life of the node, never used before (such as nanoseconds at its start).
    """

    def __init__(
        self,
        service: Service,
        user: str,
        outlet: Outlet,
        *,
        node: bytes,
        epoch: int,
        limits: Limits | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(limits or Limits())
        self.service, self.user, self.outlet = service, user, outlet
        self.node, self.epoch = node, epoch
        self.hello: wire.Hello | None = None
        self.grant: Grant | None = None
        self.draining = ""
        self._wake = wake
        self._models: Mapping[bytes, ModelSpace] = {}
        self._leaving = False
        self._sending: dict[int, Outgoing] = {}
        self._taking: dict[int, Taking] = {}
        self._moved: dict[int, tuple[int, float]] = {}  # progress of a transfer, and when it was made
        self._telling = Telling(service, self.limits)
        self._turn = False

    # ---- called by the owner of the transport ----

    def opened(self, now: float) -> None:
        """The transport is connected; the peer says hello first."""
        super().opened(now)
        self._reset()

    def lost(self, now: float) -> None:
        """The transport is gone: the peer's requests are given up; it opens again those that it still wants."""
        super().lost(now)
        self._reset()

    def tick(self, now: float) -> None:
        """Look for changes to announce; end what the peer does not move."""
        super().tick(now)
        if not self._open or self.grant is None:
            return
        if not self.draining:
            self._telling.look(self._time)
        for number in [*self._sending, *self._taking]:
            self._watch(number)
        if self._leaving and self.drained:
            self._die("bye")

    def drain(self, text: str = "drain") -> None:
        """Refuse new requests from now on, finish those that run. Idempotent."""
        if not self.draining:
            self.draining = text
            if self.grant is not None:
                self._say(wire.Bye(text))

    @property
    def drained(self) -> bool:
        """True when nothing is under way and nothing waits to be sent."""
        return not self._sending and not self._taking and not self._control

    @property
    def talks(self) -> bool:
        """True if `next` would give something that is not up to the outlet (control, announcements)."""
        return self._open and bool(self._control or self._owed or (self.grant is not None and self._telling.pending))

    def close(self, reason: str = "drain") -> None:
        """End what runs, telling the peer why; `next` still gives those messages."""
        for number in [*self._sending, *self._taking]:
            self._end(number, reason)

    # ---- messages ----

    def _take(self, message: Message, payload: memoryview | None) -> None:
        if isinstance(message, wire.Hello):
            self._greet(message)
            return
        if self.grant is None:
            if self.dead or self.reason:
                return
            raise ProtocolError(f"{type(message).__name__.lower()} before hello", where=self._who())
        grant = self.grant
        match message:
            case wire.Payload() if payload is not None:
                self._payload(message, payload)
            case wire.Match():
                self._answer(message, grant)
            case wire.Fetch() | wire.Prefill() | wire.FetchCard():
                self._open_transfer(message, grant)
            case wire.Put():
                self._open_put(message, grant)
            case wire.Credit():
                self._credit(message)
            case wire.Cancel():
                self._forget(message.id)
            case wire.Skip():
                taking = self._taking.get(message.id)
                if taking is None or taking.round != message.round:
                    self.counts["ignored"] += 1
                else:
                    taking.skip(message.item)
                    self._settle(message.id, taking)
            case wire.Resync():
                self._telling.restart()
            case wire.Ping():
                self._say(wire.Pong(message.number))
            case wire.Bye():
                self._leaving = True
            case wire.Refused():
                self._forget(message.id)
            case _:
                raise ProtocolError(f"an edge sends no {type(message).__name__.lower()}", where=self._who())

    def _greet(self, message: wire.Hello) -> None:
        self._reset()
        self.reason = ""
        if not message.oldest <= wire.VERSION <= message.newest:
            spoken = f"{message.oldest} to {message.newest}"
            self._turn_away(
                "version", f"this node speaks version {wire.VERSION} of the protocol, the peer versions {spoken}"
            )
            return
        if self.draining:
            self._turn_away("drain", self.draining)
            return
        try:
            grant = self.service.admit(self.user, message.node, message.spaces)
        except LinkRefusedError as error:
            self._turn_away("unknown", error.what)
            return
        self.hello, self.grant = message, grant
        self._models = described(message)
        terms, packer = self.limits.terms, packer_of(self.service)
        packs = packer.packs if packer is not None else ()
        cards = packer.cards(list(self._models.values())) if packer is not None else ()
        self._say(wire.Welcome(wire.VERSION, self.node, self.epoch, grant.salt, grant.spaces, terms, packs, cards))
        since = message.version if message.epoch == self.epoch else 0
        self._telling.begin(grant.tenant, since, self._time)

    def _turn_away(self, code: str, text: str) -> None:
        self._say(wire.Refused(0, code, text[: wire.MAX_TEXT]))
        self.reason = code

    def _refuse(self, number: int, turn: int, code: str, text: str = "") -> None:
        self.counts["refused"] += 1
        self._say(wire.Refused(number, code[:32], text[: wire.MAX_TEXT], turn))

    def _answer(self, message: wire.Match, grant: Grant) -> None:
        try:
            found = self.service.match(grant.tenant, message.space, wire.split(message.keys))
        except CtxReuseError as error:
            self._refuse(message.id, 0, "failed", error.what)
            return
        self._say(wire.Matched(message.id, found.blocks, found.state_blocks, found.nbytes))

    def _room(self, message: wire.Fetch | wire.Prefill | wire.FetchCard | wire.Put, count: int, most: int) -> bool:
        """True if this request may be opened; an older round of it is closed."""
        older = self._sending.get(message.id) or self._taking.get(message.id)
        if older is not None:
            if older.round >= message.round:
                self.counts["ignored"] += 1
                return False
            self._forget(message.id)
            count -= 1
        if self.draining:
            self._refuse(message.id, message.round, "drain", self.draining)
        elif count >= most:
            self._refuse(message.id, message.round, "busy", f"{count} are open")
        else:
            return True
        return False

    def _open_transfer(self, message: wire.Fetch | wire.Prefill | wire.FetchCard, grant: Grant) -> None:
        terms = self.limits.terms
        if message.credit > terms.window:
            raise ProtocolError(f"credit of {message.credit}, {terms.window} is the most", where=self._who())
        if not self._room(message, len(self._sending), terms.transfers):
            return
        supply: Supply | None = None
        try:
            supply, order, state, blocks = opened(self.service, grant, self._models, message)
            # A supply keeps the head of each block: kilobytes that a peer could ask for without end.
            if self._sending and supply.count + sum(len(s.items) for s in self._sending.values()) > wire.MAX_KEYS:
                raise LinkRefusedError(f"more than {wire.MAX_KEYS} blocks at once", where="busy")
            assert self.hello is not None
            most = min(terms.max_payload, self.hello.max_payload)
            sending = Outgoing(
                self,
                message.id,
                message.round,
                supply,
                order=order,
                payload=max(4096, min(message.payload or most, most)),
                credit=message.credit,
                state=state,
                first=blocks,
                have=message.have,
                wake=self._wake,
                memory=self.outlet.memory,
            )
        except (LookupError, CtxReuseError) as error:
            if supply is not None:
                supply.close()
            self._refuse(message.id, message.round, *_why(error))
            return
        if sending.finished:
            sending.close()
            self._say(wire.Done(message.id, message.round, 0))
            return
        self._sending[message.id] = sending
        self._moved[message.id] = (0, self._time)
        self.outlet.add(sending)

    def _open_put(self, message: wire.Put, grant: Grant) -> None:
        terms = self.limits.terms
        if max(message.sizes) > terms.max_block:
            self._refuse(message.id, message.round, "failed", f"a block of {max(message.sizes)} bytes")
            return
        if not self._room(message, len(self._taking), terms.puts):
            return
        keys = wire.split(message.keys)
        try:
            intake = self.service.intake(
                grant.tenant, message.space, keys, message.sizes, message.parent, user=self.user, state=message.state
            )
        except (LookupError, CtxReuseError) as error:
            self._refuse(message.id, message.round, *_why(error))
            return
        taking = Taking(message.id, message.round, message.sizes, intake, terms.max_payload)
        self._taking[message.id] = taking
        self._moved[message.id] = (0, self._time)
        self._say(wire.Want(message.id, message.round, taking.items, taking.upto))
        self._settle(message.id, taking)

    def _payload(self, message: wire.Payload, payload: memoryview) -> None:
        taking = self._taking.get(message.id)
        if taking is None or taking.round != message.round:
            self.counts["ignored"] += 1
            return
        for item, reason in taking.write(message.pieces, payload):
            self._say(wire.Stored(message.id, message.round, item, reason[:32]))
        if taking.owes:
            self._owed[message.id] = taking
        self._settle(message.id, taking)

    def _settle(self, number: int, taking: Taking) -> None:
        if taking.finished:
            self._say(wire.Done(number, taking.round))
            self._forget(number)

    def _credit(self, message: wire.Credit) -> None:
        sending = self._sending.get(message.id)
        if sending is None or sending.round != message.round:
            self.counts["ignored"] += 1
            return
        if message.upto > sending.sent + self.limits.terms.window:
            raise ProtocolError(f"credit up to {message.upto} after {sending.sent} payloads", where=self._who())
        sending.granted(message.upto, message.bandwidth)

    def _bulk(self) -> list[Frame] | None:
        """Announcements and payloads take turns."""
        if self.grant is None:
            if self.reason:
                self._die(self.reason)
            return None
        self._turn = not self._turn
        if self._turn and (told := self._telling.next()) is not None:
            return wire.encode(told)
        while (sending := self.outlet.pick(self)) is not None:
            try:
                frames = sending.take()
            except LookupError as error:
                self._end(sending.id, *_why(error))
                break
            if frames is not None:
                self.outlet.served(sending)
            if sending.finished:
                self._say(wire.Done(sending.id, sending.round, sending.sent))
                self._forget(sending.id)
            if frames is not None:
                return frames
        if self._control:
            return self._urgent()
        told = self._telling.next()
        return wire.encode(told) if told is not None else None

    # ---- ends ----

    def _watch(self, number: int) -> None:
        sending = self._sending.get(number)
        taking = self._taking.get(number)
        progress = sending.sent if sending is not None else taking.got if taking is not None else 0
        before, since = self._moved[number]
        if progress != before or (sending is not None and sending.waits):
            self._moved[number] = (progress, self._time)
        elif self._time - since > self.limits.stall:
            self._end(number, "stalled")

    def _end(self, number: int, code: str, text: str = "") -> None:
        older = self._sending.get(number) or self._taking.get(number)
        if older is not None:
            self._forget(number)
            self._refuse(number, older.round, code, text)

    def _forget(self, number: int) -> None:
        sending, taking = self._sending.pop(number, None), self._taking.pop(number, None)
        self._moved.pop(number, None)
        self._owed.pop(number, None)
        if sending is not None:
            self.outlet.remove(sending)
            sending.close()
        if taking is not None:
            taking.close()

    def _reset(self) -> None:
        for number in [*self._sending, *self._taking]:
            self._forget(number)
        self._control.clear()
        self._telling.stop()
        self.hello = self.grant = None
        self._leaving = False

    def _deadline(self) -> float:
        if self.grant is None:
            return super()._deadline()
        beat = self._time + self._heartbeat
        return beat if self.draining else min(self._telling.due, beat)

    def _who(self) -> str:
        return f"peer {self.user}"

    def check(self) -> None:
        """Raise AssertionError if the session is in a state that it cannot be in."""
        super().check()
        terms = self.limits.terms
        assert len(self._sending) <= terms.transfers
        assert len(self._taking) <= terms.puts
        assert set(self._moved) == set(self._sending) | set(self._taking)
        assert self.grant is not None or not self._moved
        for taking in self._taking.values():
            taking.check()
        self.outlet.check()


def _why(error: Exception) -> tuple[str, str]:
    """Code and text of a refusal."""
    if isinstance(error, ChangedError):
        return "changed", ""
    if isinstance(error, LookupError):
        return "gone", ""
    if isinstance(error, LinkRefusedError):
        return error.where if error.where in wire.CODES else "failed", error.what
    return "failed", error.what if isinstance(error, CtxReuseError) else ""
