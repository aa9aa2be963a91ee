"""What every store promises: the protocols, and the frozen figures that a store reports about itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse.block import BlockView, Kind
from ctxreuse.keys import Tokens
from ctxreuse.levels import EXACT
from ctxreuse.model import ModelSpace
from ctxreuse.store.gone import Gone
from ctxreuse.store.policy.duel import Standing
from ctxreuse.tree import Match

if TYPE_CHECKING:
    from ctxreuse.store.chunks import ChunkIndex

__all__ = [
    "Buffer",
    "Coder",
    "Entry",
    "Kind",
    "Progress",
    "Reader",
    "Store",
    "StoreAdmin",
    "StoreListing",
    "StoreStats",
    "WholeStore",
]

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

#: Called as ``progress(done, total)`` from the thread that does the work; both count entries.
Progress: TypeAlias = Callable[[int, int], None]


class StoreStats(msgspec.Struct, frozen=True):
    """A store's figures at one moment; counts since it was opened, sizes in bytes.

    ``nbytes`` is what the held values take in whole pages and never exceeds ``capacity``; ``file_bytes`` is the file,
    which keeps freed pages for reuse. Reasons in ``misses``: ``absent`` (never stored or evicted), ``corrupt``,
    ``truncated``, ``foreign`` (another key's or program's bytes), ``older``, ``newer`` (format), ``space`` (another
    model's), ``tokens`` (a hash hit whose token ids differ), ``level`` (held at a level that the reader does not allow;
    it stays), ``unreadable`` (the disk failed). In ``refused`` (puts):
    ``queue_full``, ``orphan`` (the parent is not held), ``too_big``, ``no_room`` (all else is pinned), ``declined``
    (the store is full, and the policy would rather keep what it has), ``malformed``, ``disk`` (a failed commit),
    ``backoff`` (too soon after one), ``readonly``, ``closed``. In ``dropped`` (entries removed other than by eviction):
    the reason given to ``drop`` or ``below`` (under such an entry).
    ``recovered``: what open found: ``""`` (nothing to do), ``kept``, ``verified`` or ``rebuilt``. ``levels``: blocks by
    level, without its card (a reader beside a writer does not know); ``demoted``: entries encoded smaller to make room,
    by ``FROM>TO``. ``standing``: how the duel of policies stands (None under a single policy).
    """

    blocks: int
    states: int
    tokens: int
    nbytes: int
    capacity: int
    queued: int
    queued_bytes: int
    file_bytes: int
    hits: int
    misses: Mapping[str, int]
    puts: int
    duplicates: int
    refused: Mapping[str, int]
    evicted: int
    dropped: Mapping[str, int]
    errors: Mapping[str, int]
    recovered: str = ""
    levels: Mapping[str, int] = {}
    demoted: Mapping[str, int] = {}
    standing: Standing | None = None


class LevelSize(Protocol):
    """What a coder says of a level."""

    @property
    def name(self) -> str: ...


class Coder(Protocol):
    """Encodes the blocks and states of one model space, see `ctxreuse.codec.Codec`. Any thread may call."""

    @property
    def space(self) -> ModelSpace:
        """Whose blocks these are."""
        ...

    @property
    def levels(self) -> Sequence[LevelSize]:
        """The levels that it can make."""
        ...

    def nbytes(self, level: str) -> int:
        """Expected bytes of one block at a level."""
        ...

    def encode(self, view: BlockView, level: str) -> npt.NDArray[np.uint8]:
        """An exact view at another level. Raises ConfigError for a level that it cannot make, FormatError."""
        ...

    def decode(self, view: BlockView) -> npt.NDArray[np.uint8]:
        """A view with raw planes. Raises FormatError for damaged bytes."""
        ...


class Reader(Protocol):
    """One short read of a store. Owned by the thread that opened it; its views die when the ``with`` block ends.

    It was opened with the worst level that it may give; what is held at a worse one is a miss (``level``) and stays.
    """

    #: Tokens served so far, by source: ``host`` or ``disk``.
    served: dict[str, int]
    #: Reason of the first miss, ``""`` if there was none.
    missed: str

    def block(self, key: bytes, tokens: Tokens, space: bytes) -> BlockView | None:
        """The block of ``key`` if it is held and is the one meant (key, token ids [n] and space digest compared).

        None is a miss, counted by reason; bytes that are not what their key says are dropped afterwards. Checksums of
        planes are compared when a plane is read, not here.
        """

    def state(self, key: bytes, tokens: Tokens, space: bytes) -> BlockView | None:
        """The state at the end of ``key``; like ``block`` (``tokens`` are the ids that the state's header names)."""

    def peek(self, key: bytes, kind: Kind = "block") -> BlockView | None:
        """What is held under ``key``, for a caller who does not know its token ids and must prove them by other means.

        Only the key is compared. Counts neither as a use nor, if it is absent, as a miss.
        """


class Store(Protocol):
    """Blocks and states by key. Any thread may call any method at any time.

    ``lossy`` is everywhere the name of the worst level that the caller allows, such as ``kl-0.01``; None: exact ones.
    """

    def match(self, keys: Sequence[bytes], lossy: str | None = None) -> Match:
        """The longest prefix of ``keys`` held at levels that the caller allows. Pure. It may be evicted at once."""

    def read(self, lossy: str | None = None) -> AbstractContextManager[Reader]:
        """A short read: views are valid inside the ``with`` block only, so copy what must outlive it.

        Keep it to milliseconds: while it is open the pages that were freed meanwhile cannot be reused.
        """

    def put(
        self, key: bytes, data: Buffer, *, kind: Kind = "block", replace: bool = False, lossy: str | None = None
    ) -> bool:
        """Queue the sealed bytes of a block or state; True if accepted. Never blocks for long and never raises.

        The store keeps a reference: do not change ``data`` afterwards. A held key is written again only at a better
        level, or with ``replace`` at an equally good one; never at a worse. ``lossy``: the worst level at which the
        store may keep it from now on, be it at once or to make room.
        """

    def pin(self, keys: Sequence[bytes]) -> int:
        """Hold eviction off the held ones of ``keys``; returns how many. Pins live in memory, as long as the store."""

    def unpin(self, keys: Sequence[bytes]) -> int:
        """Undo one ``pin``; returns how many it reached."""

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all puts accepted before are committed, or dropped and counted.

        Raises StoreError after ``timeout`` seconds. Not inside ``read``: the writer may wait for readers.
        """


class Entry(NamedTuple):
    """A held block: its ``tokens`` end at position ``end`` of its context; ``nbytes``: what it takes in the store.

    ``level`` as its header says; ``state_level`` that of the state at its end, if there is one.
    """

    key: bytes
    parent: bytes
    tokens: int
    end: int
    nbytes: int
    has_state: bool
    level: str = EXACT
    state_level: str = EXACT


class StoreListing(Protocol):
    """What is held, from memory: no value is read. Any thread may call."""

    def walk(self) -> Iterator[Entry]:
        """All held blocks of the moment of the call, parents before children."""

    def recent(self) -> list[bytes]:
        """Keys of what is held, the last to be evicted first: under ``lru`` the last used. A parent may come after its
        children."""

    def entries(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """For each key its block as `walk` gives it, or None."""

    def gone(self, key: bytes) -> Gone | None:
        """How the block of ``key`` left last, or why it was refused; None if nothing is known. It may be held again.
        ``ROOT`` stands for all blocks at once."""

    def watch(self, listener: Callable[[Sequence[bytes]], None]) -> Callable[[], None]:
        """Call ``listener`` with keys that may have come or gone since they were last named; call the result to end it.

        A hint, after which `entries` tells: keys may be named twice, or for nothing, never too rarely. It is called in
        whatever thread made the change, perhaps under the store's lock: it must be quick, never raise and not call the
        store.
        """


class StoreAdmin(Protocol):
    """The rest of a store's life. Any thread may call."""

    def drop(self, key: bytes, reason: str) -> None:
        """Forget an entry and all below it (children can no longer be reached); counted under ``reason``."""

    def forget(self, keys: Sequence[bytes]) -> int:
        """Forget the blocks of one context from its end up to where another context shares them; returns how many.

        ``keys``: the context's keys, first block first. Waits for puts accepted before. A pin ends it too.
        """

    def touch(self, keys: Sequence[bytes], *, needed: bool = False) -> None:
        """Count as used now, with all ancestors. Reading does this by itself, but for ``peek``.

        ``needed``: the use is part of no context that was `asked` for, as where rows are moved into another one; a
        policy that learns from prompts is told.
        """

    def asked(self, keys: Sequence[bytes], tokens: int) -> None:
        """Somebody needs the context of ``keys``, blocks of ``tokens`` tokens each, held or not: the policy learns.

        Call it once a prompt, before anything of it is read.
        """

    def mark(self, keys: Sequence[bytes], label: int) -> None:
        """The context of ``keys`` paused for the reason ``label``, see `ctxreuse.pauses` (0: unknown)."""

    def price(self, per_token: float, per_pair: float) -> None:
        """What computing takes here: seconds a token, and a pair of a token and one before it."""

    def adopt(self, coder: Coder) -> None:
        """Have blocks of the coder's space encoded by it from now on."""

    def stats(self) -> StoreStats:
        """The figures of this moment."""

    def check(self) -> None:
        """Compare what is held in memory with what is on disk; raises AssertionError at a difference. O(entries)."""

    def close(self) -> None:
        """Commit what is queued, sync, end the writer. A second call does nothing."""


class WholeStore(Store, StoreListing, StoreAdmin, Protocol):
    """All of it: what a runtime works with."""

    @property
    def chunks(self) -> ChunkIndex:
        """Where chunks lie in the blocks: by content, what `match` knows by prefix. It ends with the store."""
        ...
