"""BusClient: an edge's link to one cloud, as any thread may use it."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ctxreuse.block.format import Buffer
from ctxreuse.bus.protocol.base import MatchResult, PutRequest, PutResult
from ctxreuse.bus.protocol.client import ClientSession
from ctxreuse.bus.protocol.messages import MAX_KEYS, MAX_MODELS, Verify, Welcome
from ctxreuse.bus.protocol.session import Request
from ctxreuse.bus.protocol.verify import PendingVerify
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transfer.profile import ProfileBuffer
from ctxreuse.bus.transfer.receive import FetchBuffer
from ctxreuse.bus.transport.dialer import ClientOptions, Dialer, LinkState
from ctxreuse.bus.transport.sockets import check_endpoint
from ctxreuse.errors import ConfigError, CtxReuseError, LinkError, LinkRefusedError
from ctxreuse.identity.model import ModelSpace

__all__ = ["BusClient", "ClientOptions", "LinkStats"]

_log = logging.getLogger(__name__)

_model_decoder = msgspec.msgpack.Decoder(ModelSpace)


class LinkStats(msgspec.Struct, frozen=True):
    """Figures of a link since it was made: bytes and payloads of blocks in and out, times it came ``up``, fetches that
    were ``resumes``, ``duplicates`` in bytes. ``rtt`` is in seconds, None before the first measurement; ``announced``
    blocks of the cloud, None while unknown."""

    name: str
    state: LinkState
    reason: str
    rtt: float | None
    bytes_in: int
    bytes_out: int
    payloads_in: int
    payloads_out: int
    up: int
    resumes: int
    duplicates: int
    announced: int | None


class BusClient:
    """A `Link` to one cloud. Any thread may call; a thread of its own owns the socket and starts at once.

    Requests survive connections: after a cut a fresh DEALER is opened (so that nothing stale is sent or delivered) and
    they continue where they were.

    ``endpoint``: ``tcp://HOST:PORT``.
    """

    def __init__(self, endpoint: str, options: ClientOptions | None = None) -> None:
        options = options or ClientOptions()
        secured = options.keys is not None and options.server_key is not None
        if not secured and (options.keys is not None or options.server_key is not None):
            fix = "Set both bus.key_file and the cloud's server_key, or neither on loopback"
            raise ConfigError("CURVE needs this node's key and the cloud's", where=endpoint, fix=fix)
        check_endpoint(endpoint, secured=secured, insecure=options.insecure)
        estimate = options.estimate
        self.endpoint, self.name = endpoint, options.name or endpoint
        self._session = ClientSession(
            node=options.node or os.urandom(16),
            spaces=options.spaces or [model.digest for model in options.models],
            models=options.models,
            limits=options.limits,
            on_up=lambda _: self._dialer.came_up(),
            on_pace=lambda pace: self._dialer.paced(pace),
            bandwidth=lambda: estimate.bandwidth if estimate is not None else 0.0,
            forgets=True,
        )
        self._described: tuple[Welcome | None, Sequence[ModelSpace]] = (None, ())
        self._dialer = Dialer(endpoint, self._session, self.name, options)
        self._dialer.start()

    @property
    def state(self) -> LinkState:
        """See `Link.state`."""
        return self._dialer.state

    @property
    def reason(self) -> str:
        """Why the link is not up."""
        return self._dialer.reason

    @property
    def welcome(self) -> Welcome | None:
        """See `Link.welcome`."""
        return self._session.welcome

    @property
    def rtt(self) -> float | None:
        """The last measured round trip in seconds."""
        return self._session.rtt

    def match(self, space: bytes, keys: Sequence[bytes], timeout: float) -> MatchResult | None:
        """See `Link.match`; counts the first 8,192 keys."""
        if self.state != "up" or not keys:
            return None
        request: Request[MatchResult] = Request()
        self._dialer.post(lambda: self._session.match(space, keys[:MAX_KEYS], request), request.fail)
        try:
            return request.wait(timeout)
        except LinkError:
            self._dialer.post(lambda: self._session.cancel(request))
            return None

    def forget(self, keys: Sequence[bytes], timeout: float) -> int | None:
        """See `Link.forget`."""
        found = 0
        for at in range(0, len(keys), MAX_KEYS):
            request: Request[MatchResult] = Request()
            some = keys[at : at + MAX_KEYS]
            self._dialer.post(partial(self._session.forget, some, request), request.fail)
            try:
                found += request.wait(timeout).blocks
            except LinkError:
                self._dialer.post(partial(self._session.cancel, request))
                return None
        return found

    @property
    def withdrawn(self) -> frozenset[bytes]:
        """See `Link.withdrawn`."""
        return self._session.withdrawn()

    def announced(self, keys: Sequence[bytes]) -> int | None:
        """See `Link.announced`."""
        return self._session.announced(keys)

    def fetch(
        self,
        request: FetchRequest,
        keys: Sequence[bytes],
        *,
        payload: int = 0,
        window: int = 8,
        compute: bool = False,
        on_done: Callable[[float, float], None] | None = None,
    ) -> FetchBuffer:
        """See `Link.fetch`; returns at once."""
        # Nothing refines what only an older cloud would send.
        refine = request.levels.refine and self.welcome is not None and bool(self.welcome.cards)
        buffer = FetchBuffer(request, keys, refine=refine, on_done=on_done)
        # A weak reference: in a cycle, tens of megabytes would wait for the garbage collector.
        weak = weakref.ref(buffer)

        def stop() -> None:
            if (stopped := weak()) is not None:
                self._dialer.post(partial(self._session.cancel, stopped))

        buffer.on_stop = stop
        self.fill(buffer, payload=payload, window=window, compute=compute)
        return buffer

    def fill(self, buffer: FetchBuffer, *, payload: int = 0, window: int = 8, compute: bool = False) -> None:
        """Fetch into a buffer that the caller has made; returns at once."""
        self._dialer.post(
            lambda: self._session.fetch(buffer, payload=payload, window=window, compute=compute),
            lambda error: buffer.end(error.what),
        )

    def fetch_profile(self, space: bytes, digest: bytes, timeout: float) -> bytes:
        """Fetch the calibration profile that the cloud names in its welcome for the model of ``space``.

        Raises LinkError after ``timeout`` seconds (bytes received so far are lost) or if the link is down, FormatError
        if the bytes do not hash to ``digest``.
        """
        buffer = ProfileBuffer(space, digest)
        self._dialer.post(lambda: self._session.fetch_profile(buffer), lambda error: buffer.end(error.what))
        try:
            return buffer.data(timeout)
        finally:
            buffer.end("stopped")
            self._dialer.post(lambda: self._session.cancel(buffer))

    @property
    def verifies(self) -> Sequence[ModelSpace]:
        """The model spaces in which the cloud verifies, by its last handshake."""
        welcome = self.welcome
        if welcome is not self._described[0]:
            self._described = welcome, _described(welcome)
        return self._described[1]

    def verify(self, request: Verify) -> PendingVerify:
        """Have the cloud decode an answer that this node drafts; returns at once. It ends with the connection."""
        answer = PendingVerify(request)

        def draft(start: int, tokens: bytes) -> None:
            self._dialer.post(lambda: self._session.draft(answer, start, tokens))

        answer.on_draft = draft
        answer.on_stop = lambda: self._dialer.post(lambda: self._session.stop_answer(answer))
        self._dialer.post(lambda: self._session.verify(answer), lambda _: answer.end("down"))
        return answer

    def put(self, request: PutRequest, read: Callable[[int], Buffer], *, timeout: float = 60.0) -> PutResult:
        """See `Link.put`; ``read`` is called in the link's thread."""

        def safe(item: int) -> Buffer:
            try:
                return read(item)
            except LookupError:
                raise
            except Exception as error:
                _log.exception("link %s: a block could not be read", self.name)
                raise LookupError(item) from error

        if self.state == "refused":
            raise LinkRefusedError(self.reason, where=self.name)
        result: Request[PutResult] = Request()
        self._dialer.post(lambda: self._session.put(request, safe, request=result), result.fail)
        try:
            return result.wait(timeout)
        except LinkError:
            self._dialer.post(lambda: self._session.cancel(result))
            raise

    def stats(self) -> LinkStats:
        """Return the figures of this moment."""
        counts = self._session.counts
        return LinkStats(
            self.name,
            self.state,
            self.reason,
            self.rtt,
            counts["bytes_in"],
            counts["bytes_out"],
            counts["payloads_in"],
            counts["payloads_out"],
            self._dialer.ups,
            counts["resumes"],
            counts["duplicates"],
            self._session.announced_count(),
        )

    def transfers(self) -> list[tuple[str, int, int]]:
        """See `ClientSession.transfers`."""
        return self._session.transfers()

    def close(self, timeout: float = 2.0) -> None:
        """Finish what is on its way for up to ``timeout`` seconds, then end the rest. Idempotent."""
        self._dialer.close(timeout)

    def __enter__(self) -> BusClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _described(welcome: Welcome | None) -> Sequence[ModelSpace]:
    """Return the spaces that a cloud verifies in, without those that cannot be read."""
    found = list[ModelSpace]()
    raw = welcome.verifies if welcome is not None and isinstance(welcome.verifies, list) else ()
    for description in raw[:MAX_MODELS]:
        try:
            found.append(_model_decoder.decode(description))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, CtxReuseError, TypeError, ValueError):
            continue
    return found
