"""The edge's side of a link: requests that outlive connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ctxreuse.block.format import Buffer
from ctxreuse.bus.protocol import messages, wire
from ctxreuse.bus.protocol.announce import AnnouncedKeys
from ctxreuse.bus.protocol.base import MatchResult, PutRequest, PutResult
from ctxreuse.bus.protocol.messages import (
    Credit,
    Fetch,
    FetchCard,
    Forget,
    LevelRequest,
    Match,
    Message,
    Pace,
    Prefill,
    Welcome,
)
from ctxreuse.bus.protocol.put import PutSender
from ctxreuse.bus.protocol.session import Limits, Request, Session
from ctxreuse.bus.protocol.verify import PendingVerify
from ctxreuse.bus.protocol.wire import Frame, join_keys
from ctxreuse.bus.transfer.profile import ProfileBuffer
from ctxreuse.bus.transfer.receive import FetchBuffer
from ctxreuse.bus.transfer.send import SendScheduler
from ctxreuse.errors import CtxReuseError, LinkDownError, LinkRefusedError, ProtocolError
from ctxreuse.identity.model import ModelSpace

__all__ = ["ClientSession", "FetchReceiver", "PendingMatch"]

#: Bytes of a payload where nobody knows the link: a larger one would look like silence on a slow one.
_PAYLOAD = 1 << 20


class PendingMatch(msgspec.Struct, eq=False):
    """A match, or a deletion, that waits for its answer."""

    request: Request[MatchResult]
    message: Match | Forget
    sent: bool = False


class FetchReceiver:
    """One fetch (``tokens`` None), prefill (``tokens`` of the whole context) or profile fetch of a `ClientSession`.

    ``bandwidth()`` is the link's present bytes/s (0: unknown); it goes with each credit where levels may differ.
    ``idle`` counts connections in a row without a payload.
    """

    def __init__(
        self,
        buffer: FetchBuffer | ProfileBuffer,
        tokens: bytes | None,
        payload: int,
        window: int,
        bandwidth: Callable[[], float] = lambda: 0.0,
    ) -> None:
        if window < 1:
            raise ValueError(f"a window of {window} payloads")
        self.buffer, self.payload = buffer, payload
        self.number, self.round, self.open = 0, 0, False
        self.got = self.upto = self.idle = 0
        self._bandwidth = bandwidth
        self._levels = buffer.request.levels if isinstance(buffer, FetchBuffer) else LevelRequest()
        self._tokens, self._wanted, self._window = tokens, window, window
        self._before = 0

    def offer(self, number: int, payload: int, most: int) -> Fetch | Prefill | FetchCard:
        """Return the message that opens it on this connection, with credit for at most ``most`` payloads."""
        buffer = self.buffer
        self.number, self.round, self.open = number, self.round + 1, True
        self._window = min(self._wanted, most)
        self.got, self.upto, self._before = 0, self._window, buffer.received
        if isinstance(buffer, ProfileBuffer):
            return FetchCard(number, self.round, buffer.space, buffer.digest, payload, buffer.have(), self.upto)
        levels = self._levels
        if levels.levels and self.round > 1 and levels.deadline_ms:
            # The time that the cut took is unknown here: what is missing is late already.
            levels = msgspec.structs.replace(levels, bandwidth=self._measured(), deadline_ms=1)
        space, have, state = buffer.space.digest, buffer.have(), buffer.wants_state
        if self._tokens is None:
            keys = join_keys(buffer.keys)
            return Fetch(number, self.round, space, keys, state, buffer.order, payload, have, self.upto, levels)
        ids, first = self._tokens, buffer.first
        return Prefill(number, self.round, space, ids, first, state, payload, have, self.upto, levels)

    def arrived(self, nbytes: int, most: int) -> None:
        """Count a payload. Raises ProtocolError if it was not granted or has more than ``most`` bytes."""
        self.got += 1
        if self.got > self.upto or nbytes > most:
            raise ProtocolError(f"payload {self.got} of {nbytes} bytes with credit for {self.upto}", where="fetch")

    @property
    def owes(self) -> bool:
        """True when half of the credit is used up."""
        return self.upto - self.got <= self._window // 2

    def grant(self) -> Credit:
        """Extend the credit to the full window."""
        self.upto = self.got + self._window
        return Credit(self.number, self.round, self.upto, self._measured())

    def _measured(self) -> int:
        """What the link brings now, if the sender may choose between levels."""
        return max(int(self._bandwidth()), 0) if self._levels.levels else 0

    def stop(self) -> None:
        """Suspend until the next connection."""
        if self.open:
            self.open = False
            self.idle = self.idle + 1 if self.buffer.received == self._before else 0


class ClientSession(Session):
    """One edge's link to one cloud. Requests may be made at any time; they are sent when the link is up, and
    again after a cut. One thread calls; `announced` is for any.

    Args:
        node: 16 bytes that name this edge.
        spaces: Digests of its models.
        models: Those of them that are described to the cloud in full, so that it can encode for them.
        limits: Bounds; the default ones if None.
        on_up: Called when a cloud has accepted, before requests are opened again.
        on_pace: Called with the `Payload.pace` of each payload.
        bandwidth: The link's present bytes/s (0: unknown).
        forgets: It may ask to delete blocks.
    """

    #: The name of the program in hello.
    program = "ctxreuse"

    def __init__(
        self,
        *,
        node: bytes,
        spaces: Sequence[bytes] = (),
        models: Sequence[ModelSpace] = (),
        limits: Limits | None = None,
        on_up: Callable[[Welcome], None] = lambda _: None,
        on_pace: Callable[[Pace], None] = lambda _: None,
        bandwidth: Callable[[], float] = lambda: 0.0,
        forgets: bool = False,
    ) -> None:
        super().__init__(limits or Limits())
        self._forgets = forgets
        self.node, self.spaces = node, tuple(spaces)
        self._models = tuple(map(msgspec.msgpack.encode, models))
        self.welcome: Welcome | None = None
        self.up = False
        self.refused: LinkRefusedError | None = None
        self.draining = ""
        self.rtt: float | None = None
        self._on_up, self._on_pace, self._bandwidth = on_up, on_pace, bandwidth
        self._known = AnnouncedKeys(self.limits.announced)
        self._scheduler = SendScheduler()
        self._last_id = 0
        self._running: dict[int, PendingMatch | FetchReceiver | PutSender] = {}
        self._answers: dict[int, PendingVerify] = {}
        self._leaving = False
        self._ping, self._pinged, self._answered = 0, 0.0, True

    def transfers(self) -> list[tuple[str, int, int]]:
        """Return what goes over the link now: ``fetch`` or ``put``, blocks, and the bytes that came. Any thread."""
        found = list[tuple[str, int, int]]()
        for one in tuple(self._running.values()):
            if isinstance(one, PutSender):
                found.append(("put", one.blocks, 0))
            elif isinstance(one, FetchReceiver):
                blocks = len(one.buffer.keys) if isinstance(one.buffer, FetchBuffer) else 0
                found.append(("fetch", blocks, one.buffer.received))
        return found

    # ---- requests ----

    def match(
        self, space: bytes, keys: Sequence[bytes], request: Request[MatchResult] | None = None
    ) -> Request[MatchResult]:
        """Ask how many leading blocks of ``keys`` (at most 8,192) are stored."""
        request = request or Request()
        message = messages.Match(self._last_id + 1, space, wire.join_keys(keys))
        if self._admit(request.fail):
            self._start(PendingMatch(request, message))
        return request

    def forget(self, keys: Sequence[bytes], request: Request[MatchResult] | None = None) -> Request[MatchResult]:
        """Ask to delete blocks (at most 8,192) and all below them; the result counts those that were stored."""
        request = request or Request()
        message = messages.Forget(self._last_id + 1, wire.join_keys(keys))
        if self.welcome is None or self.welcome.forgets is not True:
            request.fail(LinkDownError("this cloud cannot delete blocks"))
        elif self._admit(request.fail):
            self._start(PendingMatch(request, message))
        return request

    def fetch(self, buffer: FetchBuffer, *, payload: int = 0, window: int = 8, compute: bool = False) -> None:
        """Fetch the blocks of ``buffer``, which alone reports what happens.

        Args:
            buffer: Where the blocks go.
            payload: Bytes per message at most (0: 1 MiB); smaller ones let others through sooner on a slow link.
            window: Payloads that may be on their way.
            compute: The cloud computes blocks that it does not store; at most 2^18 tokens.
        """
        if buffer.ended is not None:
            return
        tokens = buffer.context_tokens() if compute else None
        if tokens is None and len(buffer.keys) > messages.MAX_KEYS:
            buffer.end("too many blocks")
        elif tokens is not None and len(tokens) > 4 * messages.MAX_TOKENS:
            buffer.end("tokens")
        else:
            self._get(buffer, tokens, payload, window)

    def fetch_profile(self, buffer: ProfileBuffer, *, payload: int = 0, window: int = 8) -> None:
        """Fetch a calibration profile that the cloud named in its welcome."""
        if self.welcome is None or (buffer.space, buffer.digest) not in self.welcome.cards:
            buffer.end("not offered")
            return
        self._get(buffer, None, payload, window)

    def _get(self, buffer: FetchBuffer | ProfileBuffer, tokens: bytes | None, payload: int, window: int) -> None:
        if self._admit(lambda error: buffer.end(error.what)):
            self._start(FetchReceiver(buffer, tokens, payload, window, self._bandwidth))

    def put(
        self,
        blocks: PutRequest,
        read: Callable[[int], Buffer],
        *,
        payload: int = 0,
        request: Request[PutResult] | None = None,
    ) -> Request[PutResult]:
        """Offer blocks and send those that the cloud wants. One put at a time is on its way, others wait; after a cut
        the blocks are offered again.

        Args:
            blocks: What is offered.
            read: Returns the sealed bytes of block i, in the link's thread (LookupError if it is no longer stored); the
                memory must not change while it is referenced.
            payload: Bytes per message at most (0: 1 MiB).
            request: Filled with the result.
        """
        keys, sizes = wire.join_keys(blocks.keys), tuple(blocks.sizes)
        if len(sizes) != len(blocks.keys) or (blocks.state and len(sizes) != 1):
            raise ValueError(f"{len(sizes)} sizes for {len(blocks.keys)} keys{' of states' if blocks.state else ''}")
        request = request or Request()
        message = messages.Put(self._last_id + 1, 1, blocks.space, blocks.parent, keys, sizes, blocks.state)
        if self._admit(request.fail):
            self._start(PutSender(request, message, read, payload))
        return request

    def verify(self, answer: PendingVerify) -> None:
        """Ask for an answer; it ends with this connection, and at once if there is none."""
        if not self.up or self.draining or len(self._answers) >= self.limits.queue:
            answer.end("down" if not self.up else "busy")
            return
        self._last_id += 1
        answer.request = msgspec.structs.replace(answer.request, id=self._last_id)
        self._answers[self._last_id] = answer
        self._say(answer.request)

    def draft(self, answer: PendingVerify, start: int, tokens: bytes) -> None:
        """Say how an answer may go on; does nothing if it has ended."""
        if self._answers.get(answer.request.id) is answer:
            self._say(messages.Draft(answer.request.id, start, tokens))

    def stop_answer(self, answer: PendingVerify) -> None:
        """Give up an answer; does nothing if it has ended."""
        if self._answers.get(answer.request.id) is answer:
            del self._answers[answer.request.id]
            self._say(messages.Cancel(answer.request.id))

    def cancel(self, what: Request[MatchResult] | Request[PutResult] | FetchBuffer | ProfileBuffer) -> None:
        """Give up a request; does nothing if it has ended."""
        for number, running in list(self._running.items()):
            owner = running.buffer if isinstance(running, FetchReceiver) else running.request
            if owner is what:
                self._drop(number, LinkDownError("cancelled"))

    def withdrawn(self) -> frozenset[bytes]:
        """See `Link.withdrawn`. Any thread."""
        return self._known.withdrawn

    def announced_count(self) -> int | None:
        """Return the number of keys that the cloud has announced; None while unknown. Any thread."""
        return self._known.count()

    def announced(self, keys: Sequence[bytes]) -> int | None:
        """Count the leading keys that the cloud has announced; None while unknown. Any thread."""
        return self._known.leading(keys) if self.up else None

    def bye(self, text: str = "") -> None:
        """Start no new requests; running ones go on. Close the transport when `drained`."""
        self._leaving, self.draining = True, text or "bye"
        self._say(messages.Bye(text))

    @property
    def drained(self) -> bool:
        """True when nothing runs and nothing waits to be sent."""
        return not self._running and not self._answers and not self._control

    def close(self, reason: str = "closed") -> None:
        """End all requests."""
        self._leaving, self.draining = True, reason
        self._end_answers("down")
        for number in sorted(self._running, reverse=True):  # waiting ones first: ending others makes room for them
            self._drop(number, LinkDownError(reason))

    # ---- the link ----

    def opened(self, now: float) -> None:
        """Send hello: the transport is connected."""
        if self._open:
            self.lost(now)
        super().opened(now)
        self._pinged, self._answered = self._time, False
        known, most = self._known, self.limits.terms.max_payload
        hello = messages.Hello(
            wire.VERSION,
            wire.VERSION,
            self.node,
            self.program,
            self.spaces,
            most,
            models=self._models,
            forgets=self._forgets,
        )
        if known.version:
            hello = msgspec.structs.replace(hello, epoch=known.epoch, version=known.version)
        self._say(hello)

    def lost(self, now: float) -> None:
        """Suspend requests until the next connection: the transport is gone."""
        super().lost(now)
        self.up = False
        self._end_answers("cut")
        for running in self._running.values():
            if isinstance(running, PendingMatch):
                running.sent = False
            elif isinstance(running, FetchReceiver):
                running.stop()
            else:
                running.stop(self._scheduler)

    def _end_answers(self, reason: str) -> None:
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.end(reason)

    def tick(self, now: float) -> None:
        """Ping every heartbeat; notice a silent peer, and fetches that have been stopped."""
        super().tick(now)
        if self.up and self._time - self._pinged >= self._heartbeat:
            self._ping += 1
            self._pinged, self._answered = self._time, False
            self._say(messages.Ping(self._ping))
        for number, running in list(self._running.items()):
            if isinstance(running, FetchReceiver) and running.buffer.ended is not None:
                self._drop(number, LinkDownError("stopped"))

    def _deadline(self) -> float:
        return self._pinged + self._heartbeat if self.up else super()._deadline()

    def _take(self, message: Message, payload: memoryview | None) -> None:
        match message:
            case Welcome():
                self._welcomed(message)
            case messages.Refused() if message.id == 0:
                self.refused = LinkRefusedError(message.text or message.code, where=message.code)
                self._die(message.code)
            case _ if not self.up:
                raise ProtocolError(f"{type(message).__name__.lower()} before welcome", where=self._who())
            case messages.Payload() if payload is not None:
                self._payload(message, payload)
            case messages.Announce():
                if not self._known.apply(message):
                    self._say(messages.Resync())
            case messages.Matched():
                asking = self._running.get(message.id)
                if not isinstance(asking, PendingMatch):
                    self.counts["ignored"] += 1
                    return
                count = len(asking.message.keys) // 32
                if not message.state_blocks <= message.blocks <= count:
                    raise ProtocolError(f"{message.blocks} of {count} blocks matched", where=self._who())
                del self._running[message.id]
                asking.request.succeed(MatchResult(message.blocks, message.state_blocks, message.nbytes))
            case messages.Verdict():
                if (answer := self._answers.get(message.id)) is not None:
                    answer.add(message)
                else:
                    self.counts["ignored"] += 1
            case messages.Done() | messages.Refused() if message.id in self._answers:
                ended = "" if isinstance(message, messages.Done) else message.code or "failed"
                self._answers.pop(message.id).end(ended)
            case messages.Done():
                self._done(message)
            case messages.Refused():
                self._refuse(message)
            case messages.Want() | messages.Credit() | messages.Stored():
                giving = self._running.get(message.id)
                if not isinstance(giving, PutSender) or giving.round != message.round:
                    self.counts["ignored"] += 1
                else:
                    for skipped in giving.take(message, self, self._scheduler, self._payload_limit(giving.payload)):
                        self._say(messages.Skip(message.id, message.round, skipped))
            case messages.Pong():
                if message.number == self._ping:
                    self._echo()
            case messages.Bye():
                self.draining = message.text or "drain"
            case _:
                raise ProtocolError(f"a cloud sends no {type(message).__name__.lower()}", where=self._who())

    def _welcomed(self, message: Welcome) -> None:
        if message.version != wire.VERSION:
            raise ProtocolError(f"the peer chose version {message.version}, this is {wire.VERSION}", where=self._who())
        if self.up:
            self.counts["ignored"] += 1
            return
        self._known.begin(message.epoch)
        self.welcome, self._terms, self.refused, self.up = message, message.terms, None, True
        if not self._leaving:
            self.draining = ""
        self._echo()
        self._on_up(message)
        self._open_waiting()

    def _echo(self) -> None:
        """Measure the round trip: the newest ping (or hello) is answered."""
        if not self._answered:
            self.rtt, self._answered = self._time - self._pinged, True

    def _payload_limit(self, wanted: int) -> int:
        most = min(self._terms.max_payload, self.limits.terms.max_payload)
        return min(wanted or _PAYLOAD, most)

    def _bulk(self) -> list[Frame] | None:
        while (sending := self._scheduler.pick(self)) is not None:
            frames = sending.take()
            giving = self._running.get(sending.id)
            if isinstance(giving, PutSender):
                for skipped in giving.skipped():
                    self._say(messages.Skip(sending.id, sending.round, skipped))
            if frames is not None:
                self._scheduler.served(sending)
                return frames
            if sending.finished:
                self._scheduler.remove(sending)
        return self._urgent()

    def _payload(self, message: messages.Payload, payload: memoryview) -> None:
        running = self._running.get(message.id)
        if not isinstance(running, FetchReceiver) or message.round != running.round or not running.open:
            self.counts["ignored"] += 1
            return
        self._on_pace(message.pace)
        running.arrived(len(payload), self.limits.terms.max_payload)
        try:
            fresh = running.buffer.write(message.pieces, payload)
        except ProtocolError:
            if running.buffer.ended is not None:
                self._drop(message.id, LinkDownError("foreign"))
            raise
        self.counts["duplicates"] += len(payload) - fresh if running.buffer.ended in (None, "") else 0
        if running.buffer.ended is not None:
            self._drop(message.id, LinkDownError("ended"), tell=running.buffer.ended != "")
        elif running.owes:
            self._owed[message.id] = running

    def _done(self, message: messages.Done) -> None:
        running = self._running.get(message.id)
        if running is None:
            return  # it was whole with the last payload
        if isinstance(running, PendingMatch) or running.round != message.round:
            self.counts["ignored"] += 1
        elif isinstance(running, FetchReceiver):
            if message.payloads != running.got:  # only a new connection can recover them
                lost = f"{message.payloads - running.got} of {message.payloads} payloads are lost"
                raise ProtocolError(lost, where=self._who(), fix="The fetch is resumed")
            running.buffer.finish()
            self._drop(message.id, LinkDownError("short"), tell=False)
        else:
            del self._running[message.id]
            running.finish(self._scheduler)
            self._open_waiting()

    def _refuse(self, message: messages.Refused) -> None:
        running = self._running.get(message.id)
        if running is None or (not isinstance(running, PendingMatch) and message.round not in (0, running.round)):
            self.counts["ignored"] += 1
            return
        error = LinkRefusedError(message.text or message.code, where=message.code)
        if isinstance(running, FetchReceiver):
            running.buffer.end(message.code or "failed")  # empty would mean that all is here
        self._drop(message.id, error, tell=False)

    def _admit(self, fail: Callable[[CtxReuseError], None]) -> bool:
        """Return True if there is room for another request, else fail it."""
        if self.draining:
            fail(LinkDownError("drain"))
        elif len(self._running) >= self.limits.queue:
            fail(LinkDownError("busy"))
        else:
            return True
        return False

    def _start(self, running: PendingMatch | FetchReceiver | PutSender) -> None:
        self._last_id += 1
        self._running[self._last_id] = running
        self._open_waiting()

    def _drop(self, number: int, error: CtxReuseError, *, tell: bool = True) -> None:
        """End a request with ``error``; with ``tell`` also send a cancel."""
        running = self._running.pop(number, None)
        self._owed.pop(number, None)
        if running is None:
            return
        if isinstance(running, FetchReceiver):
            running.buffer.end(error.what)
        else:
            if isinstance(running, PutSender):
                running.stop(self._scheduler)
            running.request.fail(error)
        if tell and self.up and (not isinstance(running, FetchReceiver) or running.open):
            self._say(messages.Cancel(number))
        self._open_waiting()

    def _open_waiting(self) -> None:
        """Open, in the order they were made, the requests that the terms leave room for."""
        if not self.up:
            return
        room = self._terms.transfers - sum(isinstance(g, FetchReceiver) and g.open for g in self._running.values())
        giving = any(isinstance(g, PutSender) and g.open for g in self._running.values())
        for number, running in list(self._running.items()):
            if isinstance(running, PendingMatch):
                if not running.sent:
                    running.sent = True
                    self._say(running.message)
            elif isinstance(running, PutSender):
                if not giving:
                    giving = True
                    self._say(running.offer())
            elif not running.open and room > 0:
                room -= 1
                self._open_fetch(number, running)

    def _open_fetch(self, number: int, running: FetchReceiver) -> None:
        if running.idle >= self.limits.rounds:
            running.buffer.end("no progress")
            del self._running[number]
            return
        self.counts["resumes"] += running.round > 0
        self._say(running.offer(number, self._payload_limit(running.payload), self._terms.window))

    def check(self) -> None:
        """Raise AssertionError if the session's state is inconsistent."""
        super().check()
        assert self._open or not self.up
        assert all(0 < number <= self._last_id for number in (*self._running, *self._answers))
        assert self.up or not self._answers
        opened = [running for running in self._running.values() if isinstance(running, FetchReceiver) and running.open]
        assert self.up or not opened
        assert len(opened) <= self._terms.transfers
        assert all(running.got <= running.upto for running in opened)
        self._scheduler.check()
        self._known.check()
