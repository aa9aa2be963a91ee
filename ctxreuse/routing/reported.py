"""What an engine says that it has: blocks by their tokens, from its own events, in bounded memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import xxhash

from ctxreuse.routing.events import BlocksRemoved, BlocksStored, KvEvent

__all__ = ["PromptTokens", "ReportedBlocks"]

#: Sizes of blocks that one engine may have at once, and adapters that are remembered.
_SIZES, _ADAPTERS = 4, 256


class PromptTokens(msgspec.Struct, frozen=True):
    """A prompt as its engine reads it: token ids as unsigned 32-bit bytes, its model's name, the salt of its tenant."""

    ids: bytes
    model: str = ""
    salt: str = ""

    @classmethod
    def of(cls, ids: Sequence[int], model: str = "", salt: str = "") -> PromptTokens:
        """Make one of token ids. Raises OverflowError for what is none."""
        return cls(array("I", ids).tobytes(), model, salt)

    def __len__(self) -> int:
        return len(self.ids) // 4


class _Block:
    __slots__ = ("chain", "places")

    def __init__(self, chain: bytes, place: str) -> None:
        self.chain, self.places = chain, {place}


class ReportedBlocks:
    """Blocks of one engine. Not thread-safe.

    A block is found by a chain of hashes over the tokens up to its end, not by the engine's name of it: how an engine
    makes those is its own affair. ``complete`` becomes False when a block was left out for want of room.
    """

    def __init__(self, most: int = 1 << 19) -> None:
        """Remember at most so many blocks."""
        self._most = most
        self._blocks: dict[bytes, _Block] = {}
        #: How many names each chain has.
        self._chains: dict[bytes, int] = {}
        self._sizes: set[int] = set()
        self._adapters: set[str] = set()
        self.complete = True

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, event: KvEvent) -> None:
        """Take one event."""
        if isinstance(event, BlocksStored):
            self._store(event)
        elif isinstance(event, BlocksRemoved):
            for name in event.ids:
                self._remove(name, event.place)
        else:
            self.clear()

    def _store(self, event: BlocksStored) -> None:
        if event.size not in self._sizes and len(self._sizes) >= _SIZES:
            self.complete = False
            return
        chain = b""
        if event.parent is not None:
            parent = self._blocks.get(event.parent)
            if parent is None:  # left out itself, or lost with others
                self.complete = False
                return
            chain = parent.chain
        if event.adapter and len(self._adapters) < _ADAPTERS:
            self._adapters.add(event.adapter)
        for name, tokens, extra in zip(event.ids, event.tokens, event.extra):
            chain = _follow(chain, tokens, extra)
            block = self._blocks.get(name)
            if block is not None and block.chain == chain:
                block.places.add(event.place)
                continue
            if block is not None:
                self._drop(name, block)
            if len(self._blocks) >= self._most:
                self.complete = False
                return
            self._blocks[name] = _Block(chain, event.place)
            self._chains[chain] = self._chains.get(chain, 0) + 1
            self._sizes.add(event.size)

    def _remove(self, name: bytes, place: str) -> None:
        block = self._blocks.get(name)
        if block is not None:
            block.places.discard(place)
            if not block.places:
                self._drop(name, block)

    def _drop(self, name: bytes, block: _Block) -> None:
        del self._blocks[name]
        left = self._chains[block.chain] - 1
        if left:
            self._chains[block.chain] = left
        else:
            del self._chains[block.chain]

    def match(self, prompt: PromptTokens) -> int:
        """Return how many leading tokens of a prompt the engine has. Pure."""
        first = [prompt.model] if prompt.model in self._adapters else []
        each = msgspec.msgpack.encode(first) if first else b""
        if prompt.salt:
            first = [*first, prompt.salt]
        begin = msgspec.msgpack.encode(first) if first else b""
        return max((self._match(prompt.ids, size, begin, each) for size in self._sizes), default=0)

    def _match(self, ids: bytes, size: int, begin: bytes, each: bytes) -> int:
        chain, step = b"", 4 * size
        for at in range(0, len(ids) - step + 1, step):
            chain = _follow(chain, ids[at : at + step], each if at else begin)
            if chain not in self._chains:
                return at // 4
        return len(ids) // step * size

    def clear(self) -> None:
        """Forget all: the engine has nothing, or nothing is known of it."""
        self._blocks.clear()
        self._chains.clear()
        self._sizes.clear()
        self._adapters.clear()
        self.complete = True

    def check(self) -> None:
        """Raise AssertionError if a bound or a count is wrong."""
        chains: dict[bytes, int] = {}
        for block in self._blocks.values():
            assert block.places, "a block is nowhere"
            chains[block.chain] = chains.get(block.chain, 0) + 1
        assert chains == self._chains, "names of chains counted wrong"
        assert len(self._blocks) <= self._most, "more blocks than are remembered"


def _follow(chain: bytes, tokens: bytes, extra: bytes) -> bytes:
    return xxhash.xxh3_128_digest(chain + len(extra).to_bytes(4, "little") + extra + tokens)
