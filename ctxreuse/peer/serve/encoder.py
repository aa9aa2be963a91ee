"""Encodes blocks for peers at the levels that they allow: threads, a cache of results, and one transfer's items."""

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

from ctxreuse.block.format import BlockView, parse
from ctxreuse.block.levels import EXACT, PACKED, expected_kl
from ctxreuse.bus.protocol.base import BlockSource, EncodableSource, SendPlan
from ctxreuse.bus.protocol.messages import MAX_LEVELS, LevelRequest, Pace
from ctxreuse.bus.transfer.profile import ProfileBlockSource
from ctxreuse.bus.transfer.receive import part_offsets
from ctxreuse.codec import Codec, LevelName, ProfileStore, parse_level
from ctxreuse.cost.levels import JOINT_WORK, Work, work_of
from ctxreuse.errors import CtxReuseError, LinkRefusedError
from ctxreuse.identity.model import ModelSpace
from ctxreuse.peer.serve.pick import Candidate, Picker

__all__ = ["BlockEncoder"]

log = logging.getLogger(__name__)

#: Seconds per byte of raw planes that encoding is expected to take before any was measured: 1 GB/s.
_GUESS = 1e-9
#: Weight of a new measurement.
_NEW = 0.2
#: Bytes of a block beside its planes: head and padding.
_HEAD = 4096
#: Seconds for which encoded blocks are kept.
_KEEP_SECONDS = 120.0
#: Bytes that open transfers may keep besides; beyond it requests are refused as ``busy``.
_OPEN_BYTES = 1 << 30
#: Seconds between the last block and its refinements.
_REST = 1.0


class _Encoded(NamedTuple):
    """Bytes of an item at a level (None: send it as stored), and the seconds that encoding took."""

    level: str
    data: npt.NDArray[np.uint8] | None
    seconds: float


class BlockEncoder:
    """An `Encoder`. `encode`, `counts` and `close` are for any thread.

    Args:
        profiles: Calibration profiles (default: those of the user).
        threads: How many encode (default: half of the cores, at most 8; encoding releases the interpreter).
        kept: Bytes of encoded blocks kept for two minutes, so that many devices that want the same context cost its
            encoding once.
        clock: Monotonic seconds.
    """

    packs: tuple[str, ...] = (PACKED,)

    def __init__(
        self,
        profiles: ProfileStore | None = None,
        *,
        threads: int = 0,
        kept: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.profiles, self.clock = profiles or ProfileStore(), clock
        self._kept = kept
        #: How many items are encoded at a time.
        self.threads = threads or max(1, min(8, (os.cpu_count() or 2) // 2))
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._codecs: dict[bytes, Codec] = {}
        self._made: OrderedDict[tuple[bytes, str, str], tuple[float, npt.NDArray[np.uint8]]] = OrderedDict()
        self._made_bytes = self._open_bytes = 0
        self._rates: dict[Work, float] = {}
        self._closed = False
        #: Items sent and bytes saved by not sending them raw, by level without its profile.
        self.counts: dict[str, tuple[int, int]] = {}

    def offered_profiles(self, models: Sequence[ModelSpace]) -> tuple[tuple[bytes, bytes], ...]:
        """See `Encoder.offered_profiles`: the newest of each model."""
        named = []
        for model in models[:MAX_LEVELS]:
            codec = self._codec(model)
            if codec is not None and codec.digest:
                named.append((model.digest, bytes.fromhex(codec.digest)))
        return tuple(named)

    def profile_source(self, model: ModelSpace, digest: bytes) -> ProfileBlockSource:
        """See `Encoder.profile_source`."""
        data = self.profiles.data(model, digest.hex()[:16])
        if data is None:
            raise LookupError("no such profile")
        return ProfileBlockSource(data)

    def encode_source(self, plan: SendPlan, model: ModelSpace, request: LevelRequest) -> BlockSource:
        """See `Encoder.encode_source`; returns the plan's source itself if it cannot be encoded here."""
        source, codec = plan.source, self._codec(model)
        if not isinstance(source, EncodableSource) or codec is None or self._closed:
            return source
        mine = {EXACT, *self.packs, *(str(LevelName(i.name, codec.digest[:16])) for i in codec.levels if i.lossy)}
        levels = [level for level in (EXACT, *request.levels) if level in mine]
        if self._open_bytes > _OPEN_BYTES:
            raise LinkRefusedError("too many encoded contexts wait for their peers", where="busy")
        raw = codec.nbytes(EXACT)
        candidates = [
            Candidate(level, float(codec.nbytes(level) + _HEAD), self._expected(level, raw) / self.threads)
            for level in dict.fromkeys(levels)
        ]
        source.allow(frozenset(levels))
        finest = min(map(expected_kl, request.levels[request.spared :]), default=0.0) if request.spared else 0.0
        picker = Picker(
            candidates, bandwidth=float(request.bandwidth), deadline=request.deadline_ms / 1000, now=self.clock(),
            serial=plan.order == "layers", finest=finest,
        )  # fmt: skip
        return EncodedSource(self, plan, source, codec, picker, request)

    # ---- any thread ----

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Run ``work`` in one of the threads. Raises LookupError after `close`."""
        with self._lock:
            if self._closed:
                raise LookupError("closed")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads, "ctxreuse-pack")
            return self._pool.submit(work)

    @property
    def pace(self) -> tuple[int, int]:
        """Microseconds in which all threads encode a MiB of raw planes, packed and lossy."""
        packed, lossy = (int(self._rate(work) * 1e6 * (1 << 20)) // self.threads for work in ("packed", "lossy"))
        return packed, lossy

    def encode(self, codec: Codec, view: BlockView, level: str) -> _Encoded:
        """Encode ``view`` at ``level``, without data if it is stored at that level. Raises CtxReuseError."""
        stored = view.header.level
        if stored == level:
            return _Encoded(level, None, 0.0)
        began = self.clock()
        key = (view.header.key, view.header.kind, level)
        data = self._find(key)
        if data is None:
            if parse_level(stored).coded:
                view = parse(codec.decode(view))
            name = parse_level(level)
            data = codec.refinement(view, name.name) if name.base else codec.encode(view, name.name)
            self._keep(key, data)
            self._learn(level, len(view.buffer), self.clock() - began)
        return _Encoded(level, data, self.clock() - began)

    def count_open(self, nbytes: int) -> None:
        """Count bytes that open transfers keep (negative: release)."""
        with self._lock:
            self._open_bytes += nbytes

    def sent(self, level: str, nbytes: int, raw: int) -> None:
        """Count an item that was sent with ``nbytes`` in place of ``raw``."""
        short = level.partition("@")[0]
        with self._lock:
            items, saved = self.counts.get(short, (0, 0))
            self.counts[short] = items + 1, saved + max(0, raw - nbytes)

    def close(self) -> None:
        """End the threads; open transfers fail. Idempotent."""
        with self._lock:
            self._closed, pool, self._pool = True, self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._made.clear()
            self._made_bytes = 0

    def _codec(self, model: ModelSpace) -> Codec | None:
        """Return the codec with the newest profile."""
        codec = self._codecs.get(model.digest)
        try:
            paths = self.profiles.paths(model)
            if codec is None or (paths and paths[0].stem != codec.digest[:16]):
                codec = Codec.open(model, self.profiles)
                self._codecs[model.digest] = codec
                while len(self._codecs) > MAX_LEVELS:  # peers can describe any number of models
                    del self._codecs[next(iter(self._codecs))]
        except (CtxReuseError, OSError) as error:
            log.warning("calibration profiles of %s cannot be read: %s", model.architecture, error)
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
                if self._made_bytes <= self._kept and now - since <= _KEEP_SECONDS:
                    break
                del self._made[first]
                self._made_bytes -= oldest.nbytes

    def _learn(self, level: str, raw: int, seconds: float) -> None:
        work = work_of(level)
        with self._lock:
            rate = self._rates.get(work)
            self._rates[work] = seconds / raw if rate is None else rate + _NEW * (seconds / raw - rate)

    def _rate(self, work: Work) -> float:
        """Seconds for a byte of raw planes."""
        guess = _GUESS if work != "joint" else JOINT_WORK * self._rates.get("lossy", _GUESS)
        return self._rates.get(work, guess)

    def _expected(self, level: str, raw: int) -> float:
        return 0.0 if level == EXACT else self._rate(work_of(level)) * raw

    def check(self) -> None:
        """Raise AssertionError if counters and contents disagree."""
        with self._lock:
            assert self._made_bytes == sum(data.nbytes for _, data in self._made.values()) <= max(self._kept, 0)
            assert self._open_bytes >= 0


class _Item:
    """One item: its level; once encoded its bytes (None: as stored) and parts, or the error."""

    __slots__ = ("data", "error", "level", "offsets", "raw")

    def __init__(self) -> None:
        self.level = ""
        self.data: memoryview | None = None
        self.offsets: tuple[int, ...] | None = None
        self.error: LookupError | None = None
        self.raw = 0


class EncodedSource(BlockSource):
    """The items of ``source`` at levels that ``picker`` picks, then their refinements.

    The sockets' thread calls; work is done in the encoder's threads, a few items ahead of what is sent. An item sent as
    stored is read from ``source`` when it goes, others are released with their last byte. Blocks of which the peer has
    a beginning (``have``) are encoded at the level that they began with.
    """

    def __init__(
        self,
        encoder: BlockEncoder,
        plan: SendPlan,
        source: EncodableSource,
        codec: Codec,
        picker: Picker,
        request: LevelRequest,
    ) -> None:
        self._encoder, self._source, self._codec, self._picker = encoder, source, codec, picker
        self._main, self._blocks = source.count, source.count - plan.state
        self._expect = request.expect or self._blocks
        self._allowed = frozenset(one.level for one in picker.candidates)
        self._finer = self._refinements() if request.refine else {}
        self.count = self._main + (self._blocks if self._finer else 0)
        self._items = [_Item() for _ in range(self.count)]
        self._have = {item: (nbytes, check) for item, nbytes, check in plan.have}
        self._layers = plan.order == "layers"
        run, more = range(self._main), range(self._main, self.count)
        self._sequence = [*run, *more] if plan.order != "tail" else [*reversed(run), *reversed(more)]
        self._next = self._picked = self._unsent_bytes = self._sent = 0
        self._rests: threading.Timer | None = None
        self._until = 0.0
        self._waits, self._since = 0.0, 0.0  # seconds in which nothing was ready, and since when (0: ready)
        self._open: set[int] = set()
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._closed = False

    def _refinements(self) -> dict[str, str]:
        """Return, by level, the refinement to the finest allowed level that refines it."""
        profile, found = self._codec.digest[:16], {}
        for info in self._codec.levels:
            fine, base = LevelName(info.name, profile), LevelName(info.base, profile)
            if info.base and {str(fine), str(base)} <= self._allowed:
                found[str(base)] = str(LevelName(info.name, profile, info.base))
        return found

    def on_bandwidth(self, bandwidth: int) -> None:
        """See `BlockSource.on_bandwidth`."""
        with self._lock:
            self._picker.on_bandwidth(float(bandwidth), self._encoder.clock())

    def parts(self, item: int) -> tuple[int, ...] | None:
        """See `BlockSource.parts`; () for the refinement of a block that has none."""
        self._ahead()
        found, now = self._items[item], self._encoder.clock()
        if found.offsets is None and found.error is None:
            self._since = self._since or now
        elif self._since:
            self._waits, self._since = self._waits + now - self._since, 0.0
        if found.error is not None:
            raise found.error
        return found.offsets

    def pace(self) -> Pace:
        """See `BlockSource.pace`."""
        waits, self._waits = self._waits, 0.0
        return int(waits * 1e6), *self._encoder.pace

    def read(self, item: int, start: int, stop: int) -> memoryview | bytes:
        """See `BlockSource.read`."""
        found = self._items[item]
        if found.error is not None:
            raise found.error
        data = self._source.read(item, start, stop) if found.data is None else found.data[start:stop]
        if found.offsets and stop == found.offsets[-1]:
            self._release(item, found)
        return data

    def watch(self, wake: Callable[[], None]) -> None:
        """See `BlockSource.watch`."""
        self._wake = wake
        self._source.watch(wake)

    def close(self) -> None:
        """See `BlockSource.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            unsent, self._unsent_bytes = self._unsent_bytes, 0
        if self._rests is not None:
            self._rests.cancel()
        self._encoder.count_open(-unsent)
        self._source.close()

    def _release(self, item: int, found: _Item) -> None:
        size = found.offsets[-1] if found.offsets else 0
        self._encoder.sent(found.level, size, found.raw)
        with self._lock:
            self._sent += item < self._main
            self._open.discard(item)
            freed = size if found.data is not None and not self._closed else 0
            self._unsent_bytes -= freed
            found.data = None
        self._encoder.count_open(-freed)

    def _ahead(self) -> None:
        """Start to encode the next items. In layer order all are encoded before the first layer goes, so none waits for
        others to be sent."""
        while self._next < len(self._sequence):
            item = self._sequence[self._next]
            if self._crowded() or not self._ready(item):
                return
            with self._lock:
                self._items[item].level = level = self._level(item)
                self._open.add(item)
            self._next += 1
            if not level:
                self._settle(item, None, ())
                continue
            try:
                self._encoder.submit(lambda item=item, level=level: self._make(item, level))  # type: ignore[misc]
            except LookupError as error:
                self._settle(item, None, None, error)

    def _crowded(self) -> bool:
        """Return True if so many items are being encoded (or, where each has its own level, wait to be sent) that the
        next level is better picked later."""
        with self._lock:
            open_ = [self._items[i] for i in self._open]
            return sum(not self._layers or found.offsets is None for found in open_) >= 2 * self._encoder.threads

    def _ready(self, item: int) -> bool:
        """Return False while a block is being computed, and for refinements until `_REST` seconds after all else was
        sent, as no request waits for them."""
        if item < self._main:
            return self._source.parts(item) is not None
        if self._sent < self._main:
            return False
        now = self._encoder.clock()
        if self._rests is None:
            self._rests = threading.Timer(_REST, lambda: self._wake())
            self._rests.daemon = True
            self._until = now + _REST
            self._rests.start()
        return now >= self._until

    def _level(self, item: int) -> str:
        if item >= self._main:
            return self._finer.get(self._items[item - self._main].level, "")
        if item >= self._blocks:
            return EXACT
        self._picked += 1
        return self._picker.pick(self._expect - self._picked + 1, self._encoder.clock())

    def _make(self, item: int, level: str) -> None:
        """Encode one item, in a thread of the encoder."""
        if self._closed:
            return
        try:
            view = parse(self._source.sealed(item if item < self._main else item - self._main))
            stored, (_, check) = view.header.level, self._have.get(item, (0, b""))
            if stored != EXACT and parse_level(stored).exact is False:
                # It is stored with loss: nothing better can be made of it.
                if stored not in self._allowed:
                    raise LookupError("stored at a level that is not allowed")
                level = stored if item < self._main else ""
            elif item < self._main and level:
                suited = self._codec.level_for(view, level)
                level = suited if suited in self._allowed else EXACT
            coded = self._encoder.encode(self._codec, view, level) if level else None
            for other in sorted(self._allowed) if check and item < self._blocks else ():
                if coded is not None and _check(coded.data, view.buffer) == check:
                    break
                coded = self._encoder.encode(self._codec, view, other)
            if coded is None:
                self._settle(item, None, ())
                return
            data = view.buffer if coded.data is None else coded.data.data.toreadonly()
            kept = data if coded.data is not None else None
            with self._lock:
                self._items[item].level, self._items[item].raw = coded.level, self._codec.nbytes(EXACT)
                self._picker.made(coded.level, len(data), coded.seconds / self._encoder.threads)
            self._settle(item, kept, part_offsets(parse(data)))
        except LookupError as error:
            self._settle(item, None, None, error)
        except CtxReuseError as error:
            self._settle(item, None, None, LookupError(error.what))
        except BaseException as error:
            self._settle(item, None, None, LookupError("failed"))
            raise error

    def _settle(
        self, item: int, data: memoryview | None, offsets: tuple[int, ...] | None, error: LookupError | None = None
    ) -> None:
        found = self._items[item]
        with self._lock:
            if self._closed:
                return
            found.data, found.error, found.offsets = data, error, offsets
            if not offsets:
                self._open.discard(item)
            nbytes = len(data) if data is not None else 0
            self._unsent_bytes += nbytes
        self._encoder.count_open(nbytes)
        if offsets and self._have.get(item, (0, b""))[0] >= offsets[-1]:
            self._release(item, found)  # the peer has all of it, so it will not be read
        self._wake()


def _check(data: object, stored: memoryview) -> bytes:
    return bytes((stored if data is None else memoryview(data))[24:32])  # type: ignore[arg-type]
