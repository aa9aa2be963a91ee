"""Encodes blocks for peers in a few threads, at the levels that they allow, and keeps what it made for a while."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.block import BlockView, parse
from ctxreuse.bus.base import Encodable, Supply
from ctxreuse.bus.pick import Candidate, Picker
from ctxreuse.bus.serve_coded import CodedSupply
from ctxreuse.bus.transfer_card import CardSupply
from ctxreuse.bus.wire import Have, Wish
from ctxreuse.bus.wire_messages import MAX_LEVELS
from ctxreuse.codec import Codec, LevelName, Shelf, parse_level
from ctxreuse.errors import CtxReuseError, LinkRefusedError
from ctxreuse.levels import EXACT, PACKED, damage
from ctxreuse.model import ModelSpace

__all__ = ["Coded", "Packer"]

log = logging.getLogger(__name__)

#: Seconds that encoding a byte of raw planes is taken to take before any was: 1 GB/s.
_GUESS = 1e-9
_NEW = 0.2
#: Bytes of a block beside its planes: head and padding.
_HEAD = 4096


def _finest(wish: Wish) -> float:
    """The least damage that is worth sending at first."""
    return min(map(damage, wish.levels[wish.spared :]), default=0.0) if wish.spared else 0.0


class Coded(NamedTuple):
    """Bytes of an item at a level, or None where it is sent as it is held; and the seconds that it took to encode."""

    level: str
    data: npt.NDArray[np.uint8] | None
    seconds: float


class Packer:
    """See `ctxreuse.bus.base.Packs`. `encode`, `counts` and `close` are for any thread.

    ``shelf`` holds the cards. ``threads`` encode (default: half of the cores, at most 8; encoding lets go of the
    interpreter). Up to ``kept`` bytes of what was encoded stay for ``seconds``, so that many devices that want the same
    context cost its encoding once. ``held``: bytes that open transfers may hold besides; more are refused as ``busy``.
    """

    packs: tuple[str, ...] = (PACKED,)

    def __init__(
        self,
        shelf: Shelf | None = None,
        *,
        threads: int = 0,
        kept: int = 256 << 20,
        seconds: float = 120.0,
        held: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shelf, self.clock = shelf or Shelf(), clock
        self._kept, self._seconds, self._held = kept, seconds, held
        self._threads = threads or max(1, min(8, (os.cpu_count() or 2) // 2))
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._codecs: dict[bytes, Codec] = {}
        self._made: OrderedDict[tuple[bytes, str, str], tuple[float, npt.NDArray[np.uint8]]] = OrderedDict()
        self._made_bytes = self._open_bytes = 0
        self._rates: dict[bool, float] = {}
        self._closed = False
        #: Items sent and bytes saved by not sending them raw, by level without card.
        self.counts: dict[str, tuple[int, int]] = {}

    # ---- Packs ----

    def cards(self, models: Sequence[ModelSpace]) -> tuple[tuple[bytes, bytes], ...]:
        """See `Packs.cards`: the newest card of each model."""
        named = []
        for model in models[:MAX_LEVELS]:
            codec = self._codec(model)
            if codec is not None and codec.digest:
                named.append((model.digest, bytes.fromhex(codec.digest)))
        return tuple(named)

    def card(self, model: ModelSpace, digest: bytes) -> CardSupply:
        """See `Packs.card`."""
        data = self.shelf.data(model, digest.hex()[:16])
        if data is None:
            raise LookupError("no such card")
        return CardSupply(data)

    def supply(
        self, source: Supply, model: ModelSpace, wish: Wish, *, order: str, state: bool, have: Sequence[Have]
    ) -> Supply:
        """See `Packs.supply`; ``source`` itself if it cannot be encoded here."""
        codec = self._codec(model)
        if not isinstance(source, Encodable) or codec is None or self._closed:
            return source
        mine = {EXACT, *self.packs, *(str(LevelName(i.name, codec.digest[:16])) for i in codec.levels if i.lossy)}
        levels = [level for level in (EXACT, *wish.levels) if level in mine]
        if self._open_bytes > self._held:
            raise LinkRefusedError("too many encoded contexts wait for their peers", where="busy")
        raw = codec.nbytes(EXACT)
        candidates = [
            Candidate(level, float(codec.nbytes(level) + _HEAD), self._expected(level, raw) / self._threads)
            for level in dict.fromkeys(levels)
        ]
        source.allow(frozenset(levels))
        picker = Picker(
            candidates, bandwidth=float(wish.bandwidth), deadline=wish.deadline_ms / 1000, now=self.clock(),
            serial=order == "layers", finest=_finest(wish),
        )  # fmt: skip
        return CodedSupply(self, source, codec, picker, wish, order=order, state=state, have=have)

    # ---- any thread ----

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Run ``work`` in one of the threads. LookupError after `close`."""
        with self._lock:
            if self._closed:
                raise LookupError("closed")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, "ctxreuse-pack")
            return self._pool.submit(work)

    @property
    def threads(self) -> int:
        """How many items are encoded at a time."""
        return self._threads

    @property
    def pace(self) -> tuple[int, int]:
        """Microseconds that encoding a MiB of raw planes takes all threads, packed and lossy."""
        packed, lossy = (int(self._rates.get(way, _GUESS) * 1e6 * (1 << 20)) // self._threads for way in (True, False))
        return packed, lossy

    def encode(self, codec: Codec, view: BlockView, level: str) -> Coded:
        """``view`` at ``level``; without data if it is held at that level. Raises CtxReuseError."""
        held = view.header.level
        if held == level:
            return Coded(level, None, 0.0)
        began = self.clock()
        key = (view.header.key, view.header.kind, level)
        data = self._find(key)
        if data is None:
            if parse_level(held).coded:
                view = parse(codec.decode(view))
            name = parse_level(level)
            data = codec.refinement(view, name.name) if name.base else codec.encode(view, name.name)
            self._keep(key, data)
            self._learn(level, len(view.buffer), self.clock() - began)
        return Coded(level, data, self.clock() - began)

    def hold(self, nbytes: int) -> None:
        """An open transfer holds so many bytes more (or less)."""
        with self._lock:
            self._open_bytes += nbytes

    def sent(self, level: str, nbytes: int, raw: int) -> None:
        """An item went out with ``nbytes`` in place of ``raw``."""
        short = level.partition("@")[0]
        with self._lock:
            items, saved = self.counts.get(short, (0, 0))
            self.counts[short] = items + 1, saved + max(0, raw - nbytes)

    def close(self) -> None:
        """End the threads; transfers that are open find their items gone. Idempotent."""
        with self._lock:
            self._closed, pool, self._pool = True, self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._made.clear()
            self._made_bytes = 0

    def _codec(self, model: ModelSpace) -> Codec | None:
        """The codec with the newest card; another one when there is a newer card."""
        codec = self._codecs.get(model.digest)
        try:
            paths = self.shelf.paths(model)
            if codec is None or (paths and paths[0].stem != codec.digest[:16]):
                codec = Codec.open(model, self.shelf)
                self._codecs[model.digest] = codec
                while len(self._codecs) > MAX_LEVELS:  # peers can describe any number of models
                    del self._codecs[next(iter(self._codecs))]
        except (CtxReuseError, OSError) as error:
            log.warning("cards of %s cannot be read: %s", model.architecture, error)
        return codec

    def _find(self, key: tuple[bytes, str, str]) -> npt.NDArray[np.uint8] | None:
        with self._lock:
            found = self._made.get(key)
            if found is None:
                return None
            self._made.move_to_end(key)
            return found[1]

    def _keep(self, key: tuple[bytes, str, str], data: npt.NDArray[np.uint8]) -> None:
        now = self.clock()
        with self._lock:
            old = self._made.pop(key, None)
            self._made_bytes -= old[1].nbytes if old is not None else 0
            self._made[key] = now, data
            self._made_bytes += data.nbytes
            while self._made:
                first = next(iter(self._made))
                since, oldest = self._made[first]
                if self._made_bytes <= self._kept and now - since <= self._seconds:
                    break
                del self._made[first]
                self._made_bytes -= oldest.nbytes

    def _learn(self, level: str, raw: int, seconds: float) -> None:
        lossless = level == PACKED
        with self._lock:
            rate = self._rates.get(lossless)
            self._rates[lossless] = seconds / raw if rate is None else rate + _NEW * (seconds / raw - rate)

    def _expected(self, level: str, raw: int) -> float:
        return 0.0 if level == EXACT else self._rates.get(level == PACKED, _GUESS) * raw

    def check(self) -> None:
        """Raise AssertionError if the books do not fit what is kept."""
        with self._lock:
            assert self._made_bytes == sum(data.nbytes for _, data in self._made.values()) <= max(self._kept, 0)
            assert self._open_bytes >= 0
