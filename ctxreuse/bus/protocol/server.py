"""The cloud's side of a link: one peer's requests, within the peer's bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace

from ctxreuse.bus.protocol import messages, wire
from ctxreuse.bus.protocol.announce import Announcer
from ctxreuse.bus.protocol.base import (
    Grant,
    PutRequest,
    SendOrder,
    SendPlan,
    Service,
    VerifyingService,
    VerifySource,
)
from ctxreuse.bus.protocol.messages import Message
from ctxreuse.bus.protocol.put import PutReceiver
from ctxreuse.bus.protocol.session import Limits, Session
from ctxreuse.bus.protocol.wire import Frame
from ctxreuse.bus.transfer.send import ChangedError, SendScheduler, SendTransfer
from ctxreuse.errors import CtxReuseError, LinkRefusedError, ProtocolError
from ctxreuse.identity.model import ModelSpace

__all__ = ["ServerSession"]

_Opening: TypeAlias = messages.Fetch | messages.Prefill | messages.FetchCard

_model_decoder = msgspec.msgpack.Decoder(ModelSpace)
#: Answers that one peer may have decoded at once.
_VERIFYING = 16
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, CtxReuseError, ValueError)


class ServerSession(Session):
    """One peer of a cloud; all its requests end with its connection. One thread calls.

    Args:
        service: Serves it.
        user: The peer's entry in the allow-list, from its key.
        scheduler: Shared by all sessions of the node; its `turn` says whose `next` to call.
        node: 16 bytes that name this node.
        epoch: A number of this life of the node, never used before (such as nanoseconds at its start).
        limits: Bounds; the default ones if None.
        wake: Called (any thread) when a prefill has made something for this peer.
        ready: Called (any thread) when `collect` has something to do.
    """

    def __init__(
        self,
        service: Service,
        user: str,
        scheduler: SendScheduler,
        *,
        node: bytes,
        epoch: int,
        limits: Limits | None = None,
        wake: Callable[[], None] | None = None,
        ready: Callable[[ServerSession], None] = lambda _: None,
    ) -> None:
        super().__init__(limits or Limits())
        self._ready = ready
        self.service, self.user, self.scheduler = service, user, scheduler
        self.node, self.epoch = node, epoch
        self.hello: messages.Hello | None = None
        self.grant: Grant | None = None
        self.draining = ""
        self._wake = wake
        self._models: Mapping[bytes, ModelSpace] = {}
        self._leaving = False
        self._sending: dict[int, SendTransfer] = {}
        self._receiving: dict[int, PutReceiver] = {}
        self._verifying: dict[int, VerifySource] = {}
        self._progress: dict[int, tuple[int, float]] = {}  # of a transfer, and when it last changed
        self._announcer = Announcer(service, self.limits)
        self._turn = False
        #: A transfer of which the last payload has just gone.
        self._sent: SendTransfer | None = None

    # ---- called by the owner of the transport ----

    def opened(self, now: float) -> None:
        """Wait for hello: the transport is connected."""
        super().opened(now)
        self._reset()

    def lost(self, now: float) -> None:
        """Give up the peer's requests: the transport is gone. It opens again those that it still wants."""
        super().lost(now)
        self._reset()

    def tick(self, now: float) -> None:
        """Look for changes to announce; end transfers without progress."""
        super().tick(now)
        if not self._open or self.grant is None:
            return
        self.collect()
        if not self.draining:
            self._announcer.look(self._time)
        for number in [*self._sending, *self._receiving]:
            self._watch(number)
        if self._leaving and self.drained:
            self._die("bye")

    def drain(self, text: str = "drain") -> None:
        """Refuse new requests, finish running ones. Idempotent."""
        if not self.draining:
            self.draining = text
            if self.grant is not None:
                self._say(messages.Bye(text))

    @property
    def drained(self) -> bool:
        """True when nothing runs and nothing waits to be sent."""
        return not self._sending and not self._receiving and not self._verifying and not self._control

    @property
    def talks(self) -> bool:
        """True if `next` has something that does not depend on the scheduler (control, announcements)."""
        waits = self._control or self._owed or self._sent is not None
        return self._open and bool(waits or (self.grant is not None and self._announcer.pending))

    def close(self, reason: str = "drain") -> None:
        """End what runs and tell the peer why; `next` still returns those messages."""
        for number in [*self._sending, *self._receiving, *self._verifying]:
            self._end(number, reason)

    def collect(self) -> None:
        """Say the verdicts that have come."""
        for number, source in list(self._verifying.items()):
            ended = source.ended  # before its last verdicts are taken
            for verdict in source.verdicts():
                self._say(replace(verdict, id=number))
            if ended == "":
                self._say(messages.Done(number, 1))
                self._forget(number)
            elif ended is not None:
                self._end(number, "failed", ended)

    # ---- messages ----

    def _take(self, message: Message, payload: memoryview | None) -> None:
        if isinstance(message, messages.Hello):
            self._greet(message)
            return
        if self.grant is None:
            if self.dead or self.reason:
                return
            raise ProtocolError(f"{type(message).__name__.lower()} before hello", where=self._who())
        grant = self.grant
        match message:
            case messages.Payload() if payload is not None:
                self._payload(message, payload)
            case messages.Match():
                self._answer(message, grant)
            case messages.Forget():
                self._delete(message, grant)
            case messages.Fetch() | messages.Prefill() | messages.FetchCard():
                self._open_transfer(message, grant)
            case messages.Put():
                self._open_put(message, grant)
            case messages.Verify():
                self._open_verify(message, grant)
            case messages.Draft():
                if (source := self._verifying.get(message.id)) is not None:
                    source.draft(message.start, np.frombuffer(message.tokens, "<i4"))
                else:
                    self.counts["ignored"] += 1
            case messages.Credit():
                self._credit(message)
            case messages.Cancel():
                self._forget(message.id)
            case messages.Skip():
                receiver = self._receiving.get(message.id)
                if receiver is None or receiver.round != message.round:
                    self.counts["ignored"] += 1
                else:
                    receiver.skip(message.item)
                    self._settle(message.id, receiver)
            case messages.Resync():
                self._announcer.restart()
            case messages.Ping():
                self._say(messages.Pong(message.number))
            case messages.Bye():
                self._leaving = True
            case messages.Refused():
                self._forget(message.id)
            case _:
                raise ProtocolError(f"an edge sends no {type(message).__name__.lower()}", where=self._who())

    def _greet(self, message: messages.Hello) -> None:
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
        self._models = _described(message)
        terms, encoder = self.limits.terms, self.service.encoder
        packs = encoder.packs if encoder is not None else ()
        cards = encoder.offered_profiles(list(self._models.values())) if encoder is not None else ()
        self._say(
            messages.Welcome(
                wire.VERSION,
                self.node,
                self.epoch,
                grant.salt,
                grant.spaces,
                terms,
                packs,
                cards,
                message.forgets is True,
                list(map(msgspec.msgpack.encode, grant.verifies)),
            )
        )
        since = message.version if message.epoch == self.epoch else 0
        self._announcer.begin(grant.tenant, since, self._time)

    def _turn_away(self, code: str, text: str) -> None:
        self._say(messages.Refused(0, code, text[: messages.MAX_TEXT]))
        self.reason = code

    def _refuse(self, number: int, turn: int, code: str, text: str = "") -> None:
        self.counts["refused"] += 1
        self._say(messages.Refused(number, code[:32], text[: messages.MAX_TEXT], turn))

    def _answer(self, message: messages.Match, grant: Grant) -> None:
        try:
            found = self.service.match(grant.tenant, message.space, wire.split_keys(message.keys))
        except CtxReuseError as error:
            self._refuse(message.id, 0, "failed", error.what)
            return
        self._say(messages.Matched(message.id, found.blocks, found.state_blocks, found.nbytes))

    def _delete(self, message: messages.Forget, grant: Grant) -> None:
        try:
            count = self.service.forget(grant.tenant, wire.split_keys(message.keys))
        except CtxReuseError as error:
            self._refuse(message.id, 0, "failed", error.what)
            return
        self._say(messages.Matched(message.id, count, 0, 0))

    def _room(self, message: _Opening | messages.Put, count: int, most: int) -> bool:
        """Return True if this request may be opened; close an older round of it."""
        older = self._sending.get(message.id) or self._receiving.get(message.id)
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

    def _open_transfer(self, message: _Opening, grant: Grant) -> None:
        terms = self.limits.terms
        if message.credit > terms.window:
            raise ProtocolError(f"credit of {message.credit}, {terms.window} is the most", where=self._who())
        if self._sent is not None:
            self._finish(self._sent)
        if not self._room(message, len(self._sending), terms.transfers):
            return
        source = None
        try:
            plan = self._opened(message, grant)
            source = plan.source
            # A source keeps the head of each block: kilobytes that a peer could ask for without end.
            if self._sending and source.count + sum(len(s.items) for s in self._sending.values()) > messages.MAX_KEYS:
                raise LinkRefusedError(f"more than {messages.MAX_KEYS} blocks at once", where="busy")
            sending = SendTransfer(
                self,
                message.id,
                message.round,
                plan,
                credit=message.credit,
                wake=self._wake,
                memory=self.scheduler.memory,
                tenant=grant.tenant,
            )
        except (LookupError, CtxReuseError) as error:
            if source is not None:
                source.close()
            self._refuse(message.id, message.round, *_why(error))
            return
        if sending.finished:
            sending.close()
            self._say(messages.Done(message.id, message.round, 0))
            return
        self._sending[message.id] = sending
        self._progress[message.id] = (0, self._time)
        self.scheduler.add(sending)

    def _opened(self, message: _Opening, grant: Grant) -> SendPlan:
        """Open the source of a request. Raises LookupError if not stored, LinkRefusedError if not served."""
        assert self.hello is not None
        most = min(self.limits.terms.max_payload, self.hello.max_payload)
        payload = max(4096, min(message.payload or most, most))
        service, model, encoder = self.service, self._models.get(message.space), self.service.encoder
        if isinstance(message, messages.FetchCard):
            if model is None or encoder is None:
                raise LookupError("no card")
            return SendPlan(encoder.profile_source(model, message.digest), "front", payload, have=message.have)
        order: SendOrder = "front"
        if isinstance(message, messages.Fetch):
            order, keys = message.order, wire.split_keys(message.keys)
            source = service.open_fetch(grant.tenant, message.space, keys, state=message.state)
        else:
            ids = np.frombuffer(message.tokens, "<i4")
            source = service.open_prefill(grant.tenant, message.space, ids, first=message.first, state=message.state)
        plan = SendPlan(source, order, payload, state=message.state, first=source.count, have=message.have)
        if message.level_request.levels and encoder is not None and model is not None:
            try:
                plan = replace(plan, source=encoder.encode_source(plan, model, message.level_request))
            except BaseException:
                source.close()
                raise
        return plan

    def _open_put(self, message: messages.Put, grant: Grant) -> None:
        terms = self.limits.terms
        if max(message.sizes) > terms.max_block:
            self._refuse(message.id, message.round, "failed", f"a block of {max(message.sizes)} bytes")
            return
        if not self._room(message, len(self._receiving), terms.puts):
            return
        keys = wire.split_keys(message.keys)
        request = PutRequest(message.space, keys, message.sizes, message.parent, message.state)
        try:
            blocks = self.service.open_put(grant.tenant, request, user=self.user)
        except (LookupError, CtxReuseError) as error:
            self._refuse(message.id, message.round, *_why(error))
            return
        receiver = PutReceiver(message, blocks, terms.max_payload)
        self._receiving[message.id] = receiver
        self._progress[message.id] = (0, self._time)
        self._say(messages.Want(message.id, message.round, receiver.items, receiver.upto))
        self._settle(message.id, receiver)

    def _open_verify(self, message: messages.Verify, grant: Grant) -> None:
        open_numbers = self._verifying.keys() | self._sending.keys() | self._receiving.keys()
        if message.id in open_numbers:
            self.counts["ignored"] += 1
        elif self.draining:
            self._refuse(message.id, 0, "drain", self.draining)
        elif len(self._verifying) >= _VERIFYING:
            self._refuse(message.id, 0, "busy", f"{len(self._verifying)} are open")
        elif not isinstance(self.service, VerifyingService):
            self._refuse(message.id, 0, "space", "this node verifies nothing")
        else:
            try:
                source = self.service.open_verify(grant.tenant, message, lambda: self._ready(self))
            except CtxReuseError as error:
                self._refuse(message.id, 0, *_why(error))
                return
            self._verifying[message.id] = source

    def _payload(self, message: messages.Payload, payload: memoryview) -> None:
        receiver = self._receiving.get(message.id)
        if receiver is None or receiver.round != message.round:
            self.counts["ignored"] += 1
            return
        for item, reason in receiver.write(message.pieces, payload):
            self._say(messages.Stored(message.id, message.round, item, reason[:32]))
        if receiver.owes:
            self._owed[message.id] = receiver
        self._settle(message.id, receiver)

    def _settle(self, number: int, receiver: PutReceiver) -> None:
        if receiver.finished:
            self._say(messages.Done(number, receiver.round))
            self._forget(number)

    def _credit(self, message: messages.Credit) -> None:
        sending = self._sending.get(message.id)
        if sending is None or sending.round != message.round:
            self.counts["ignored"] += 1
            return
        if message.upto > sending.sent + self.limits.terms.window:
            raise ProtocolError(f"credit up to {message.upto} after {sending.sent} payloads", where=self._who())
        sending.granted(message.upto, message.bandwidth)

    def _bulk(self) -> list[Frame] | None:
        """Alternate between announcements and payloads."""
        if self.grant is None:
            if self.reason:
                self._die(self.reason)
            return None
        if self._sent is not None:
            self._finish(self._sent)
            return self._urgent()
        self._turn = not self._turn
        if self._turn and (announcement := self._announcer.next()) is not None:
            return wire.encode(announcement)
        while (sending := self.scheduler.pick(self)) is not None:
            try:
                frames = sending.take()
            except LookupError as error:
                self._end(sending.id, *_why(error))
                break
            if frames is not None:
                self.scheduler.served(sending)
            if frames is not None:
                self._sent = sending if sending.finished else None
                return frames
            if sending.finished:
                self._finish(sending)
        if self._control:
            return self._urgent()
        announcement = self._announcer.next()
        return wire.encode(announcement) if announcement is not None else None

    # ---- ends ----

    def _finish(self, sending: SendTransfer) -> None:
        """End a transfer of which all is sent; after its last payload, which need not wait for what closing takes."""
        self._say(messages.Done(sending.id, sending.round, sending.sent))
        self._forget(sending.id)

    def _watch(self, number: int) -> None:
        sending = self._sending.get(number)
        receiver = self._receiving.get(number)
        progress = sending.sent if sending is not None else receiver.got if receiver is not None else 0
        before, since = self._progress[number]
        if progress != before or (sending is not None and sending.waits):
            self._progress[number] = (progress, self._time)
        elif self._time - since > self.limits.stall:
            self._end(number, "stalled")

    def _end(self, number: int, code: str, text: str = "") -> None:
        older = self._sending.get(number) or self._receiving.get(number)
        if older is not None or number in self._verifying:
            self._forget(number)
            self._refuse(number, older.round if older is not None else 0, code, text)

    def _forget(self, number: int) -> None:
        sending, receiver = self._sending.pop(number, None), self._receiving.pop(number, None)
        self._progress.pop(number, None)
        self._owed.pop(number, None)
        if sending is not None:
            if sending is self._sent:
                self._sent = None
            self.scheduler.remove(sending)
            sending.close()
        if receiver is not None:
            receiver.close()
        if (source := self._verifying.pop(number, None)) is not None:
            source.close()

    def _reset(self) -> None:
        for number in [*self._sending, *self._receiving, *self._verifying]:
            self._forget(number)
        self._control.clear()
        self._announcer.stop()
        self.hello = self.grant = None
        self._leaving = False

    def _deadline(self) -> float:
        if self.grant is None:
            return super()._deadline()
        beat = self._time + self._heartbeat
        return beat if self.draining else min(self._announcer.due, beat)

    def _who(self) -> str:
        return f"peer {self.user}"

    def check(self) -> None:
        """Raise AssertionError if the session's state is inconsistent."""
        super().check()
        terms = self.limits.terms
        assert len(self._sending) <= terms.transfers
        assert len(self._receiving) <= terms.puts
        assert len(self._verifying) <= _VERIFYING
        assert set(self._progress) == set(self._sending) | set(self._receiving)
        assert self.grant is not None or not self._progress
        for receiver in self._receiving.values():
            receiver.check()
        self.scheduler.check()


def _described(hello: messages.Hello) -> dict[bytes, ModelSpace]:
    """Return the hello's model spaces by digest, without those that cannot be read: their blocks are sent exact.

    A description is right if it hashes to the digest.
    """
    found = {}
    for data in hello.models:
        try:
            space = _model_decoder.decode(data)
            digest = space.digest
        except _UNREADABLE:
            continue
        if digest in hello.spaces:
            found[digest] = space
    return found


def _why(error: Exception) -> tuple[str, str]:
    """Return code and text of a refusal."""
    if isinstance(error, ChangedError):
        return "changed", ""
    if isinstance(error, LookupError):
        return "gone", ""
    if isinstance(error, LinkRefusedError):
        return error.where if error.where in wire.CODES else "failed", error.what
    return "failed", error.what if isinstance(error, CtxReuseError) else ""
