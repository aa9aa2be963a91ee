"""Between the protocol and the node it runs in: what a node that serves others must offer."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from ctxreuse.bus.wire_messages import Have, Wish
from ctxreuse.keys import Tokens
from ctxreuse.model import ModelSpace
from ctxreuse.runtime.remote import Fetch, Order
from ctxreuse.store.base import Buffer

__all__ = [
    "Encodable",
    "Gather",
    "Given",
    "Grant",
    "Greeting",
    "Intake",
    "Link",
    "Matched",
    "Packs",
    "Service",
    "Supply",
]


class Grant(msgspec.Struct, frozen=True):
    """What an accepted peer may do: its ``tenant`` (from its key, never from a message), the ``salt`` [16 bytes] with
    which it makes keys on this link, and the ``spaces`` (digests) in which this node can prefill for it."""

    tenant: str
    salt: bytes
    spaces: tuple[bytes, ...] = ()


class Matched(msgspec.Struct, frozen=True):
    """How many leading blocks of a chain of keys are held, at how many of them the last state is, and the bytes of the
    held blocks together (0: not known)."""

    blocks: int
    state_blocks: int
    nbytes: int = 0


class Supply(Protocol):
    """Blocks that one peer asked for, as sealed bytes. One thread calls, the one that owns the sockets.

    Items are the blocks in the order of their keys and after them, if it was asked for, the state; ``count`` is the
    number of both together.
    """

    @property
    def count(self) -> int: ...

    def parts(self, item: int) -> tuple[int, ...] | None:
        """Byte offsets of an item's parts, ascending: part p is ``[offsets[p], offsets[p + 1])``, part 0 is the head
        (all before the first plane), part 1 + i the i-th layer, the last offset the total size. None while the item is
        still being made. Raises LookupError if it is not held (any more)."""
        ...

    def read(self, item: int, start: int, stop: int) -> memoryview | bytes:
        """A copy of these bytes (memory that nobody changes). Raises LookupError if the item is gone."""
        ...

    def watch(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` (from any thread, cheap) whenever another item is ready or the making has ended."""
        ...

    def close(self) -> None:
        """The peer has all, or wants no more. Idempotent; a prefill that nobody else waits for is given up."""
        ...


class Gather(Protocol):
    """The method ``gather`` that a `Supply` may have besides, if it can do better than one `read` after another."""

    def __call__(self, pieces: Sequence[tuple[int, int, int]], room: Callable[[int], memoryview]) -> memoryview | bytes:
        """The bytes of all ``pieces``, (item, start, number of bytes) each, in a row: in memory from ``room(nbytes)``,
        or in its own that nobody changes. Raises LookupError if an item is gone."""
        ...


@runtime_checkable
class Encodable(Supply, Protocol):
    """A `Supply` whose items can be encoded anew. Without `allow` it sends exact blocks alone."""

    def allow(self, levels: Container[str]) -> None:
        """Items that are held at these levels may be sent as they are. Before anything else is called."""
        ...

    def sealed(self, item: int) -> memoryview:
        """The bytes of an item as it is held, at any level: a copy, or memory that nobody changes. Any thread.
        LookupError if it is gone."""
        ...


class Packs(Protocol):
    """What can encode blocks for peers; a `Service` may have one as its attribute ``packer``. One thread calls."""

    @property
    def packs(self) -> tuple[str, ...]:
        """The levels that need no card."""
        ...

    def cards(self, models: Sequence[ModelSpace]) -> tuple[tuple[bytes, bytes], ...]:
        """(space digest, card digest) of the cards held for these models, at most 32."""
        ...

    def card(self, model: ModelSpace, digest: bytes) -> Supply:
        """A card as the one item of a supply. LookupError if it is not held."""
        ...

    def supply(
        self, source: Supply, model: ModelSpace, wish: Wish, *, order: str, state: bool, have: Sequence[Have]
    ) -> Supply:
        """The items of ``source`` at levels that ``wish`` allows, and after them a refinement of each block if it asks
        for those. Closes ``source`` with itself. A method ``told(bandwidth)``, if it has one, hears what the receiver
        sees; ``pace()`` is asked with each payload for its `Payload.pace`."""
        ...


class Intake(Protocol):
    """Blocks that one peer wants to give. One thread calls."""

    @property
    def wanted(self) -> Sequence[int]:
        """Indices of the offered keys that are lacking here and that there is room for, ascending."""
        ...

    def put(self, item: int, data: memoryview) -> str:
        """The whole sealed bytes of an offered block (memory that nobody changes). ``""`` if it was taken, else why
        not: ``corrupt``, ``foreign`` (key, tenant, space or tokens), ``full``, ``orphan``, ``audit``, …"""
        ...

    def close(self) -> None: ...


class Service(Protocol):
    """A node that serves its peers. One thread calls all methods, none of which may block for more than milliseconds.

    The tenant is an argument everywhere: nothing of another tenant may be matched, read, replaced or counted.
    """

    def admit(self, user: str, node: bytes, spaces: Sequence[bytes]) -> Grant:
        """Accept a peer whose key belongs to ``user`` (its entry in the allow-list). Raises LinkRefusedError."""
        ...

    def match(self, tenant: str, space: bytes, keys: Sequence[bytes]) -> Matched: ...

    def supply(self, tenant: str, space: bytes, keys: Sequence[bytes], *, state: bool) -> Supply:
        """Open a fetch. ``state``: also the state at the end of the last key."""
        ...

    def intake(
        self,
        tenant: str,
        space: bytes,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        parent: bytes,
        *,
        user: str = "",
        state: bool = False,
    ) -> Intake:
        """Open a put of consecutive blocks that follow ``parent``; ``sizes`` are bytes.

        ``user`` is who gives them (as in `admit`) and answers for them. ``state``: the one item is not a block but the
        state at the end of block ``keys[0]``, which is held."""
        ...

    def prefill(self, tenant: str, space: bytes, tokens: Tokens, *, first: int, state: bool) -> Supply:
        """Compute (or find) the whole blocks of ``tokens`` from block ``first`` on; they become ready as they are made.

        Raises LinkRefusedError if this node cannot (``space`` not served, too many waiting, tokens out of range)."""
        ...

    def held(self, tenant: str) -> tuple[int, Sequence[bytes]]:
        """A version and the keys of all blocks of the tenant that are held at it: the snapshot of an announcement."""
        ...

    def changes(self, tenant: str, since: int) -> tuple[int, Sequence[bytes], Sequence[bytes]] | None:
        """The present version and the keys that came and went since version ``since``; None if that is not known any
        more (too long ago, or of another epoch): announce anew. Several peers of one tenant each ask with their own."""
        ...


class Greeting(Protocol):
    """What a cloud said when it accepted this node: the link's ``salt``, the ``epoch`` of its life, and the digests of
    the ``spaces`` in which it computes, the levels without a card that it ``packs``, and the ``cards`` that it has to
    give and encodes with: (space digest, card digest)."""

    @property
    def salt(self) -> bytes: ...
    @property
    def epoch(self) -> int: ...
    @property
    def spaces(self) -> tuple[bytes, ...]: ...
    @property
    def packs(self) -> tuple[str, ...]: ...
    @property
    def cards(self) -> tuple[tuple[bytes, bytes], ...]: ...


class Given(Protocol):
    """What became of offered blocks, by index: given, not wanted, and why others were refused."""

    @property
    def taken(self) -> tuple[int, ...]: ...
    @property
    def present(self) -> tuple[int, ...]: ...
    @property
    def refused(self) -> Mapping[int, str]: ...


class Link(Protocol):
    """An edge's link to one cloud, as `ctxreuse.bus.zmqio.BusClient` offers it. Any thread may call."""

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> str:
        """``up``, ``down`` or ``refused``."""
        ...

    @property
    def welcome(self) -> Greeting | None:
        """What the cloud said last; None while it has never been up."""
        ...

    def match(self, space: bytes, keys: Sequence[bytes], timeout: float) -> Matched | None:
        """How many leading blocks of ``keys`` are held; None if the cloud did not say in time."""
        ...

    def announced(self, keys: Sequence[bytes]) -> int | None:
        """How many leading keys the cloud has announced; None while that is not known. No round trip."""
        ...

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
    ) -> Fetch:
        """Ask for blocks ``first`` to the last of ``keys``, which with ``tokens`` are of the context from its start."""
        ...

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
    ) -> Fetch:
        """As `fetch`, but the cloud computes what it does not hold."""
        ...

    def put(
        self,
        space: bytes,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        read: Callable[[int], Buffer],
        *,
        parent: bytes,
        state: bool = False,
        timeout: float = 60.0,
    ) -> Given:
        """Offer consecutive blocks (or one state) and give what is wanted. Raises LinkError."""
        ...
