"""BusClient: an edge's link to one cloud, as any thread may use it."""

from __future__ import annotations

import logging
import os
import random
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import zmq

from ctxreuse.bus.auth import KeyPair
from ctxreuse.bus.base import Matched
from ctxreuse.bus.session import Limits, Request
from ctxreuse.bus.session_client import ClientSession, Stored
from ctxreuse.bus.session_get import Allow
from ctxreuse.bus.transfer import Assembly
from ctxreuse.bus.transfer_card import CardAssembly
from ctxreuse.bus.wire import MAX_KEYS, Welcome, Wish
from ctxreuse.bus.zmqio_dial import Dialer, Estimate, LinkState
from ctxreuse.bus.zmqio_socket import check_endpoint
from ctxreuse.errors import ConfigError, LinkError, LinkRefusedError
from ctxreuse.keys import ROOT, Tokens
from ctxreuse.model import ModelSpace
from ctxreuse.runtime.remote import Order
from ctxreuse.store.base import Buffer

__all__ = ["BusClient", "LinkStats"]

_log = logging.getLogger(__name__)


class LinkStats(msgspec.Struct, frozen=True):
    """A link's figures: bytes and payloads of blocks in and out, times it came ``up``, fetches that were ``resumes``,
    ``duplicates`` in bytes; ``rtt`` in seconds, None before the first measurement; ``announced``: blocks that the cloud
    says it holds, None while that is not known. Counts since it was made."""

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
    """The link to one cloud. Any thread may call; a thread of its own owns the socket and starts at once.

    Requests survive connections: after a cut a fresh DEALER is opened (so that nothing stale is sent or delivered) and
    they go on where they were. Waits between attempts double from ``backoff[0]`` to ``backoff[1]`` seconds, each drawn
    between half and all of it, so that a thousand edges do not come back at once.

    ``keys`` and ``server_key`` (32 bytes) for CURVE; without both only loopback, unless ``insecure``. ``spaces``:
    digests of this node's models; ``models``: those that a cloud is told whole, so that it can encode for them (default
    of ``spaces``: theirs). ``on_state(state, reason)`` is called in the link's thread and must return quickly;
    ``refused`` (unknown or revoked key, version, …) is tried again too, at the longest wait. ``estimate`` is fed with
    what transfers show. ``context``: share one among many links; it is not closed then.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        keys: KeyPair | None = None,
        server_key: bytes | None = None,
        name: str = "",
        spaces: Sequence[bytes] = (),
        models: Sequence[ModelSpace] = (),
        node: bytes | None = None,
        limits: Limits | None = None,
        insecure: bool = False,
        on_state: Callable[[LinkState, str], None] | None = None,
        estimate: Estimate | None = None,
        context: zmq.Context[Any] | None = None,
        backoff: tuple[float, float] = (0.1, 15.0),
        rng: random.Random | None = None,
    ) -> None:
        if (keys is None) != (server_key is None):
            fix = "Set both bus.key_file and the cloud's server_key, or neither on loopback"
            raise ConfigError("CURVE needs this node's key and the cloud's", where=endpoint, fix=fix)
        check_endpoint(endpoint, secured=keys is not None, insecure=insecure)
        self.endpoint, self.name = endpoint, name or endpoint
        limits = limits or Limits()
        self._session = ClientSession(
            node=node or os.urandom(16),
            spaces=spaces or [model.digest for model in models],
            models=models,
            limits=limits,
            on_up=lambda _: self._dialer.came_up(),
        )
        self._estimate = estimate
        self._dialer = Dialer(
            endpoint,
            self._session,
            name=self.name,
            terms=limits.terms,
            curve=(keys, server_key) if keys is not None and server_key is not None else None,
            on_state=on_state,
            estimate=estimate,
            context=context,
            backoff=backoff,
            rng=rng or random.Random(),
        )
        self._dialer.start()

    @property
    def state(self) -> LinkState:
        """``up`` while the cloud serves this node; ``refused`` if it will not, ``down`` if it cannot be reached."""
        return self._dialer.state

    @property
    def reason(self) -> str:
        """Why the link is not up."""
        return self._dialer.reason

    @property
    def welcome(self) -> Welcome | None:
        """What the cloud said last (salt, epoch, spaces, terms); None while it has never been up."""
        return self._session.welcome

    @property
    def rtt(self) -> float | None:
        """The last measured round trip in seconds."""
        return self._session.rtt

    def match(self, space: bytes, keys: Sequence[bytes], timeout: float) -> Matched | None:
        """How many leading blocks of ``keys`` the cloud holds (of the first 8,192); None if it did not say in time."""
        if self.state != "up" or not keys:
            return None
        request: Request[Matched] = Request()
        self._dialer.post(lambda: self._session.match(space, keys[:MAX_KEYS], request), request.fail)
        try:
            return request.wait(timeout)
        except LinkError:
            self._dialer.post(lambda: self._session.cancel(request))
            return None

    def announced(self, keys: Sequence[bytes]) -> int | None:
        """How many leading keys the cloud has announced; None while that is not known. No round trip."""
        return self._session.announced(keys)

    def fetch(
        self,
        space: ModelSpace,
        keys: Sequence[bytes],
        tokens: Tokens,
        *,
        first: int = 0,
        order: Order = "layers",
        state: bool = False,
        payload: int = 0,
        window: int = 8,
        wish: Wish | None = None,
    ) -> Assembly:
        """Ask for blocks ``first`` to the last of ``keys``; returns at once. With ``state``, also the state at its end.

        ``keys`` and ``tokens`` are of the context from its start. ``payload``: bytes a message (0: the most allowed);
        ``window``: messages on their way, so ``payload * window`` should be above bandwidth times round trip. ``wish``:
        at which levels they may come.
        """
        assembly = self._assembly(space, keys, tokens, first, order, state, wish)
        self.fill(assembly, payload=payload, window=window, wish=wish)
        return assembly

    def fill(self, assembly: Assembly, *, payload: int = 0, window: int = 8, wish: Wish | None = None) -> None:
        """Fetch into an assembly that the caller has made; returns at once."""
        allow = self._allow(wish)
        self._dialer.post(
            lambda: self._session.fetch(assembly, payload=payload, window=window, allow=allow), _ends(assembly)
        )

    def card(self, space: bytes, digest: bytes, timeout: float) -> bytes:
        """The bytes of a card that the cloud names in its welcome, for the model of ``space``; they hash to ``digest``.

        Raises LinkError after ``timeout`` seconds (what has come is lost) or if the link is down, FormatError if the
        cloud sent something else.
        """
        assembly = CardAssembly(space, digest)
        self._dialer.post(lambda: self._session.card(assembly), lambda error: assembly.end(error.what))
        try:
            return assembly.card(timeout)
        finally:
            assembly.end("stopped")
            self._dialer.post(lambda: self._session.cancel(assembly))

    def prefill(
        self,
        space: ModelSpace,
        keys: Sequence[bytes],
        tokens: Tokens,
        *,
        first: int = 0,
        state: bool = False,
        payload: int = 0,
        window: int = 8,
        wish: Wish | None = None,
    ) -> Assembly:
        """As `fetch`, but the cloud computes what it does not hold; blocks come as they are made."""
        assembly = self._assembly(space, keys, tokens, first, "layers", state, wish)
        ids = tokens[: len(keys) * space.block_tokens]
        allow = self._allow(wish)
        self._dialer.post(
            lambda: self._session.prefill(assembly, ids, payload=payload, window=window, allow=allow), _ends(assembly)
        )
        return assembly

    def put(
        self,
        space: bytes,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        read: Callable[[int], Buffer],
        *,
        parent: bytes = ROOT,
        state: bool = False,
        timeout: float = 60.0,
    ) -> Stored:
        """Offer consecutive blocks after ``parent`` and give those that the cloud lacks; waits until it is done.

        ``state``: give the state at the end of the one key instead; ``parent`` is that of its block. ``read(i)``: the
        sealed bytes of block i, called in the link's thread when they are wanted; LookupError if they are gone. Raises
        LinkError after ``timeout`` seconds, or if the link refuses or closes.
        """

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
        request: Request[Stored] = Request()
        self._dialer.post(
            lambda: self._session.put(space, keys, sizes, safe, parent=parent, state=state, request=request),
            request.fail,
        )
        try:
            return request.wait(timeout)
        except LinkError:
            self._dialer.post(lambda: self._session.cancel(request))
            raise

    def stats(self) -> LinkStats:
        """The figures of this moment."""
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
            self._session.held(),
        )

    def close(self, timeout: float = 2.0) -> None:
        """Say goodbye, let what is on its way finish for up to ``timeout`` seconds, then end the rest. Idempotent."""
        self._dialer.close(timeout)

    def __enter__(self) -> BusClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _allow(self, wish: Wish | None) -> Allow:
        speed = lambda: float(getattr(self._estimate, "bandwidth", 0.0))  # noqa: E731
        return Allow(wish or Wish(), speed, self._dialer.paced)

    def _assembly(
        self,
        space: ModelSpace,
        keys: Sequence[bytes],
        tokens: Tokens,
        first: int,
        order: Order,
        state: bool,
        wish: Wish | None,
    ) -> Assembly:
        levels, refine = (wish.levels, wish.refine) if wish is not None else ((), False)
        # Nothing refines what only an older cloud would send.
        refine = refine and self.welcome is not None and bool(self.welcome.cards)
        assembly = Assembly.of_context(
            space, keys, tokens, first, order=order, state=state, levels=levels, refine=refine
        )
        weak = weakref.ref(assembly)

        def stop() -> None:
            # Not by a reference of its own: in a cycle, tens of megabytes would wait for the garbage collector.
            stopped = weak()
            if stopped is not None:
                self._dialer.post(partial(self._session.cancel, stopped))

        assembly.on_stop = stop
        return assembly


def _ends(assembly: Assembly) -> Callable[[LinkError], None]:
    return lambda error: assembly.end(error.what)
