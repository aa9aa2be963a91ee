"""Interfaces between the protocol and the node it runs in: a serving node, and a link."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from ctxreuse.block.format import Buffer
from ctxreuse.bus.protocol.messages import Have, LevelRequest, Pace, Piece, Verdict, Verify, Welcome
from ctxreuse.bus.remote import Fetch, FetchRequest
from ctxreuse.identity.keys import ROOT, Tokens
from ctxreuse.identity.model import ModelSpace

__all__ = [
    "BlockReceiver",
    "BlockSource",
    "EncodableSource",
    "Encoder",
    "Grant",
    "Link",
    "MatchResult",
    "PutRequest",
    "PutResult",
    "SendOrder",
    "SendPlan",
    "Service",
    "VerifySource",
    "VerifyingService",
]


class Grant(msgspec.Struct, frozen=True):
    """Rights of an accepted peer: its ``tenant`` (from its key, never from a message), the ``salt`` [16 bytes] of keys
    on this link, the ``spaces`` (digests) that this node computes for it, and those in which it ``verifies``."""

    tenant: str
    salt: bytes
    spaces: tuple[bytes, ...] = ()
    verifies: tuple[ModelSpace, ...] = ()


class MatchResult(msgspec.Struct, frozen=True):
    """Leading blocks of a chain of keys that are stored, how many of them up to the last stored state, and their bytes
    (0: unknown)."""

    blocks: int
    state_blocks: int
    nbytes: int = 0


class PutRequest(msgspec.Struct, frozen=True):
    """Consecutive blocks that a peer offers.

    Args:
        space: Digest of their model space.
        keys: Their keys.
        sizes: Bytes of each.
        parent: Key of the block before the first.
        state: Offer the state at the end of the one key instead; ``parent`` is that of its block.
    """

    space: bytes
    keys: Sequence[bytes]
    sizes: Sequence[int]
    parent: bytes = ROOT
    state: bool = False


class PutResult(msgspec.Struct, frozen=True):
    """The result of a put, by index of the offered blocks: ``taken`` were stored, ``present`` were not wanted (already
    there, or no room), ``refused`` maps the others to the reason (``gone``: could not be read here)."""

    taken: tuple[int, ...]
    present: tuple[int, ...]
    refused: Mapping[int, str]


class BlockSource(ABC):
    """Sealed blocks for one peer. Only the thread that owns the sockets calls.

    Items are numbered: the blocks in the order of their keys, then the state if it was requested. ``count`` is the
    number of items.
    """

    count: int

    def prepare(self, whole: int, allocate: Callable[[int], memoryview]) -> None:  # noqa: B027
        """Take note, before anything is requested, that an item of up to ``whole`` bytes will be gathered at once: it
        may be read with its head, into memory of ``allocate(nbytes)``."""

    @abstractmethod
    def parts(self, item: int) -> tuple[int, ...] | None:
        """Return ascending byte offsets of an item's parts, ending with its size; None while it is being made.

        Part 0 is the head (all before the first plane), part 1 + i the planes of the i-th layer. Raises LookupError if
        the item is not stored (any more).
        """

    @abstractmethod
    def read(self, item: int, start: int, stop: int) -> memoryview | bytes:
        """Return these bytes in memory that does not change. Raises LookupError if the item is no longer stored."""

    def gather(self, pieces: Sequence[Piece], allocate: Callable[[int], memoryview]) -> memoryview | bytes:
        """Concatenate the bytes of ``pieces``, in memory of ``allocate(nbytes)`` or other that does not change.

        Raises LookupError if an item is no longer stored.
        """
        if len(pieces) == 1:
            item, start, nbytes = pieces[0]
            return self.read(item, start, start + nbytes)
        data, at = allocate(sum(nbytes for _, _, nbytes in pieces)), 0
        for item, start, nbytes in pieces:
            data[at : at + nbytes] = self.read(item, start, start + nbytes)
            at += nbytes
        return data

    def pace(self) -> Pace:
        """Return the `Payload.pace` of the payload that is about to go."""
        return ()

    def on_bandwidth(self, bandwidth: int) -> None:  # noqa: B027
        """Called with the bandwidth that the receiver measures, in bytes/s."""

    def watch(self, wake: Callable[[], None]) -> None:  # noqa: B027
        """Have ``wake`` called (any thread, cheap) when another item is ready or none will come."""

    def close(self) -> None:  # noqa: B027
        """End the transfer. Idempotent; cancels a prefill that no other peer waits for."""


SendOrder: TypeAlias = Literal["layers", "tail", "front"]


class SendPlan(msgspec.Struct, frozen=True, eq=False):
    """Items to send, and how.

    Args:
        source: The items.
        order: In which order their parts go.
        payload: Bytes per message at most.
        state: The last of the ``first`` items is a state.
        first: So many items go before all others (default: all).
        items: Which items to send, ascending (default: all).
        have: What the receiver has already; it is skipped.
    """

    source: BlockSource
    order: SendOrder
    payload: int
    state: bool = False
    first: int | None = None
    items: Sequence[int] | None = None
    have: Sequence[Have] = ()


class EncodableSource(BlockSource):
    """A `BlockSource` whose items can be re-encoded. Sends exact blocks only, unless `allow` was called."""

    @abstractmethod
    def allow(self, levels: Container[str]) -> None:
        """Permit items stored at these levels to be sent as they are. Called before anything else."""

    @abstractmethod
    def sealed(self, item: int) -> memoryview:
        """Return an item's bytes at the level it is stored at, unchanging. Any thread. Raises LookupError."""


class Encoder(Protocol):
    """Encodes blocks for peers. One thread calls."""

    @property
    def packs(self) -> tuple[str, ...]:
        """Levels that need no calibration profile."""

    def offered_profiles(self, models: Sequence[ModelSpace]) -> tuple[tuple[bytes, bytes], ...]:
        """Return (space digest, profile digest) of the profiles available for these models, at most 32."""

    def profile_source(self, model: ModelSpace, digest: bytes) -> BlockSource:
        """Return a calibration profile as a source of one item. Raises LookupError."""

    def encode_source(self, plan: SendPlan, model: ModelSpace, request: LevelRequest) -> BlockSource:
        """Return a source of the plan's items at levels that ``request`` allows, then of their refinements if wanted.

        The result closes the plan's source with itself.
        """


class BlockReceiver(ABC):
    """Receives the blocks of one put. One thread calls.

    ``wanted`` are the ascending indices of the offered keys that are missing here and fit.
    """

    wanted: Sequence[int]

    @abstractmethod
    def put(self, item: int, data: memoryview) -> str:
        """Store the sealed bytes (unchanging) of an offered block; returns "" or why it was rejected: ``corrupt``,
        ``foreign`` (key, tenant, space or tokens), ``full``, ``orphan``, ``audit``, …"""

    def close(self) -> None:  # noqa: B027
        """End the put."""


class Service(Protocol):
    """A node that serves peers. One thread calls all methods; none may block for more than milliseconds.

    Every method takes the tenant: blocks of other tenants are never matched, read, replaced or counted.
    """

    @property
    def encoder(self) -> Encoder | None:
        """Encodes for peers that allow it; None: blocks are sent as stored."""

    def admit(self, user: str, node: bytes, spaces: Sequence[bytes]) -> Grant:
        """Accept a peer whose key is that of ``user`` in the allow-list. Raises LinkRefusedError."""

    def match(self, tenant: str, space: bytes, keys: Sequence[bytes]) -> MatchResult:
        """Count the leading ``keys`` that are stored."""

    def open_fetch(self, tenant: str, space: bytes, keys: Sequence[bytes], *, state: bool) -> BlockSource:
        """Open stored blocks, with ``state`` also the state at the end of the last key. Raises LookupError."""

    def open_put(self, tenant: str, request: PutRequest, *, user: str = "") -> BlockReceiver:
        """Open a put; ``user`` is the peer that offers the blocks (as in `admit`). Raises LinkRefusedError."""

    def open_prefill(self, tenant: str, space: bytes, tokens: Tokens, *, first: int, state: bool) -> BlockSource:
        """Compute (or find) the whole blocks of ``tokens`` from block ``first`` on, ready one by one.

        Raises LinkRefusedError (``space`` not served, too many waiting, tokens out of range).
        """

    def forget(self, tenant: str, keys: Sequence[bytes]) -> int:
        """Delete those of ``keys`` that are the tenant's, and all below them; returns how many were stored."""

    def snapshot(self, tenant: str) -> tuple[int, Sequence[bytes]]:
        """Return a version and the keys of all of the tenant's blocks at that version."""

    def withdrawn(self, tenant: str) -> bytes:
        """Return the first 8 bytes of each key of the tenant that was dropped because of who gave it, in a row."""
        ...

    def changes(self, tenant: str, since: int) -> tuple[int, Sequence[bytes], Sequence[bytes]] | None:
        """Return the current version and the keys added and removed since ``since``; None if no longer known."""


class VerifySource(Protocol):
    """An answer that is decoded for one peer. Only the thread that owns the sockets calls.

    ``ended``: None while more may come, then "" or why it ended early.
    """

    @property
    def ended(self) -> str | None: ...

    def draft(self, start: int, tokens: Tokens) -> None:
        """Take what may follow the answer's first ``start`` tokens."""

    def verdicts(self) -> Sequence[Verdict]:
        """Return those that have come since the last call, with any ids."""

    def close(self) -> None:
        """Give it up. Idempotent."""


@runtime_checkable
class VerifyingService(Protocol):
    """A `Service` that also decodes answers which its peers draft."""

    def open_verify(self, tenant: str, request: Verify, wake: Callable[[], None]) -> VerifySource:
        """Begin an answer; ``wake`` is called (any thread, cheap) when a verdict has come, or it has ended.

        Raises LinkRefusedError (``space``, ``tokens`` out of range, ``busy``), ConfigError for a rule without meaning.
        """
        ...


class Link(Protocol):
    """An edge's link to one cloud, such as `ctxreuse.bus.transport.BusClient`. Any thread may call."""

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> str:
        """``up``, ``down`` or ``refused``."""

    @property
    def welcome(self) -> Welcome | None:
        """The last handshake of the cloud; None before the first."""

    def match(self, space: bytes, keys: Sequence[bytes], timeout: float) -> MatchResult | None:
        """Count the leading ``keys`` that the cloud stores; None without an answer in time."""

    @property
    def withdrawn(self) -> frozenset[bytes]:
        """The first 8 bytes of keys that the cloud has withdrawn: copies of what it sent are not to be used."""
        ...

    def announced(self, keys: Sequence[bytes]) -> int | None:
        """Count the leading ``keys`` that the cloud has announced, without a round trip; None while unknown."""

    def fetch(
        self,
        request: FetchRequest,
        keys: Sequence[bytes],
        *,
        payload: int = 0,
        window: int = 8,
        compute: bool = False,
        on_done: Callable[[float, float], None] | None = None,
    ) -> Fetch:
        """Ask for blocks.

        Args:
            request: The blocks.
            keys: Keys of the context on this link, from its start to the last block.
            payload: Bytes per message (0: 1 MiB, if that is allowed).
            window: Payloads on their way; ``payload * window`` should exceed bandwidth times round trip.
            compute: The cloud computes blocks that it does not store, and sends them as they are made.
            on_done: Called with the seconds until the first bytes and until the end, once all is here. Any thread.
        """

    def forget(self, keys: Sequence[bytes], timeout: float) -> int | None:
        """Have the cloud delete blocks, and all that it stores below them; returns how many it had.

        None without an answer in time, or from a cloud of a version that cannot.
        """

    def put(self, request: PutRequest, read: Callable[[int], Buffer], *, timeout: float = 60.0) -> PutResult:
        """Offer blocks and send those the cloud wants. Raises LinkError.

        Args:
            request: The blocks.
            read: Returns the sealed bytes of block i; LookupError if it is no longer stored.
            timeout: Seconds.
        """
