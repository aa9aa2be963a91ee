"""The protocols of a store, its readers, and the codecs that it encodes blocks with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView, Buffer, Kind
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace
from ctxreuse.store.chunks.index import ChunkIndex
from ctxreuse.store.types import Entry, Removal, StoreStats
from ctxreuse.tree import Match

__all__ = ["BlockCodec", "Reader", "Store"]


class LevelSize(Protocol):
    """One level of a codec."""

    @property
    def name(self) -> str: ...


class BlockCodec(Protocol):
    """Encodes the blocks and states of one model space, see `ctxreuse.codec.Codec`. Any thread may call."""

    @property
    def space(self) -> ModelSpace:
        """The space of these blocks."""

    @property
    def levels(self) -> Sequence[LevelSize]:
        """The levels that it can encode."""

    def nbytes(self, level: str) -> int:
        """Return the expected bytes of one block at a level."""

    def level_for(self, view: BlockView, level: str) -> str:
        """Return the level that keeps for ``view`` what ``level`` promises: itself, or a stricter one."""

    def encode(self, view: BlockView, level: str) -> npt.NDArray[np.uint8]:
        """Encode an exact view. Raises ConfigError for a level that it cannot encode, FormatError."""

    def decode(self, view: BlockView) -> npt.NDArray[np.uint8]:
        """Decode a view to raw planes. Raises FormatError for damaged bytes."""


class Reader(Protocol):
    """One short read of a store, for one thread. Its views are valid inside the ``with`` block only.

    A value at a worse level than the read allows is a miss (``level``) and stays stored.
    """

    #: Tokens served so far, by source: ``host`` or ``disk``.
    served: dict[str, int]
    #: Reason of the first miss, ``""`` if there was none.
    missed: str

    def block(self, key: bytes, tokens: Tokens, space: bytes) -> BlockView | None:
        """Return the block of ``key`` if its token ids [n] and space digest match; else None, a miss counted by reason.

        Bytes that are not what their key says are dropped. Checksums of planes are compared when a plane is read.
        """

    def state(self, key: bytes, tokens: Tokens, space: bytes) -> BlockView | None:
        """Return the state at the end of ``key``, as `block`; ``tokens``: the ids in the state's header."""

    def peek(self, key: bytes, kind: Kind = "block") -> BlockView | None:
        """Return the value of ``key`` without comparing token ids; the caller must prove them.

        Counts neither as a use nor, if absent, as a miss.
        """


class Store(Protocol):
    """Blocks and states by key. Any thread may call any method at any time.

    ``max_kl`` is everywhere the caller's limit in nats a token, such as 0.01; None: exact blocks only.
    """

    @property
    def chunks(self) -> ChunkIndex:
        """Places of chunks in the blocks, by content. Closed with the store."""

    def match(self, keys: Sequence[bytes], max_kl: float | None = None) -> Match:
        """Return the longest stored prefix of ``keys`` at allowed levels. Pure; it may be evicted at once."""

    def read(self, max_kl: float | None = None) -> AbstractContextManager[Reader]:
        """Open a read; copy what must outlive it.

        Keep it to milliseconds: pages that are freed meanwhile cannot be reused.
        """

    def put(
        self,
        key: bytes,
        data: Buffer,
        *,
        kind: Kind = "block",
        replace: bool = False,
        max_kl: float | None = None,
        giver: bytes = b"",
    ) -> bool:
        """Queue the sealed bytes of a block or state. Never blocks for long and never raises.

        Args:
            data: kept by reference; do not change it afterwards.
            replace: overwrite a stored value of an equally good level. A better level always replaces, a worse never.
            lossy: the worst level at which the store may keep it, at once or later to make room.
            giver: 8 bytes that name the peer it came from, kept beside it; b"": it was computed here.

        Returns:
            True if accepted; a duplicate counts as accepted.
        """

    def pin(self, keys: Sequence[bytes]) -> int:
        """Protect the stored blocks among ``keys`` from eviction until `unpin` or closing. Returns the number."""

    def unpin(self, keys: Sequence[bytes]) -> int:
        """Undo one `pin`. Returns the number unpinned."""

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all puts accepted before are committed, or dropped and counted. Do not call inside `read`.

        Raises StoreError after ``timeout`` seconds.
        """

    def walk(self) -> Iterator[Entry]:
        """Iterate over the blocks stored at the moment of the call, parents before children."""

    def recent(self) -> list[bytes]:
        """Return stored keys, the last to be evicted first. A parent may come after its children."""

    def entries(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Return the entry of each key, or None. Reads no value."""

    def givers(self) -> dict[bytes, bytes]:
        """Return who gave each block, or state at its end, that a peer gave; see `put`. O(given blocks)."""
        ...

    def removal(self, key: bytes) -> Removal | None:
        """Return how the block of ``key`` left last, or why it was refused, if known; it may be stored again.

        ``ROOT`` stands for all blocks at once.
        """

    def watch(self, listener: Callable[[Sequence[bytes]], None]) -> Callable[[], None]:
        """Call ``listener`` with keys that may have come or gone; the result unsubscribes.

        Keys may repeat or be unchanged; none is left out. Called in any thread, perhaps under the store's lock: the
        listener must be quick, never raise and not call the store.
        """

    def drop(self, key: bytes, reason: str) -> None:
        """Remove an entry and all below it; counted under ``reason``."""

    def forget(self, keys: Sequence[bytes]) -> int:
        """Remove the blocks of one context, from its end up to where another context shares them.

        ``keys``: the context's keys, first block first. Waits for puts accepted before; a pin stops it too. Returns the
        number removed.
        """

    def touch(self, keys: Sequence[bytes], *, partial: bool = False) -> None:
        """Count as used now, with all ancestors. Reading does this by itself, except for `Reader.peek`.

        ``partial``: the use belongs to no context reported by `on_lookup`, such as rows relocated into another context.
        """

    def on_lookup(self, keys: Sequence[bytes], tokens: int) -> None:
        """Report a prompt's keys, in blocks of ``tokens`` tokens, stored or not, to the eviction policy.

        Call it once a prompt, before reading.
        """

    def on_pause(self, keys: Sequence[bytes], label: int) -> None:
        """Report that the context of ``keys`` paused for reason ``label``, see `ctxreuse.pauses` (0: unknown)."""

    def set_recompute_cost(self, per_token: float, per_pair: float) -> None:
        """Set the seconds of prefill a token, and a pair of a token and one before it."""

    def share_by(self, over: Callable[[int], Callable[[bytes], bool] | None]) -> None:
        """Evict first, for ``need`` bytes, keys for which ``over(need)`` is true; None: any, in the policy's order.

        Called in any thread under the store's lock: it must be quick, never raise and not call the store.
        """

    def register_codec(self, codec: BlockCodec) -> None:
        """Encode blocks of the codec's space with it from now on."""

    def stats(self) -> StoreStats:
        """Return the figures of this moment."""

    def check(self) -> None:
        """Compare memory with disk. Raises AssertionError at a difference. O(entries)."""

    def close(self) -> None:
        """Commit what is queued, sync, end the writer. A second call does nothing."""
