"""One transfer's blocks on their way through the encoder: picked, encoded ahead of the link, sent, let go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ctxreuse.block import parse
from ctxreuse.bus.base import Encodable
from ctxreuse.bus.pick import Picker
from ctxreuse.bus.transfer import part_offsets
from ctxreuse.bus.wire import Have, Pace, Wish
from ctxreuse.codec import Codec, LevelName, parse_level
from ctxreuse.errors import CtxReuseError
from ctxreuse.levels import EXACT

if TYPE_CHECKING:
    from ctxreuse.bus.serve_pack import Packer

__all__ = ["CodedSupply"]

#: Seconds between the last block and its refinements.
_REST = 1.0


class _Item:
    """One item: what was picked, and when it is made its bytes (None: as held) and parts, or why it is gone."""

    __slots__ = ("data", "gone", "level", "offsets", "raw")

    def __init__(self) -> None:
        self.level = ""
        self.data: memoryview | None = None
        self.offsets: tuple[int, ...] | None = None
        self.gone: LookupError | None = None
        self.raw = 0


class CodedSupply:
    """See `ctxreuse.bus.base.Supply`: the items of ``source`` at levels that ``picker`` picks, then refinements.

    The owner of the sockets calls; work is done in the packer's threads, at most a few items ahead of what is sent. An
    item that is sent as it is held is read from ``source`` when it goes, all others are let go of when their last byte
    went. Blocks of which the peer has a beginning (``have``) are made at the level that they began with.
    """

    def __init__(
        self,
        packer: Packer,
        source: Encodable,
        codec: Codec,
        picker: Picker,
        wish: Wish,
        *,
        order: str,
        state: bool,
        have: Sequence[Have],
    ) -> None:
        self._packer, self._source, self._codec, self._picker = packer, source, codec, picker
        self._main, self._blocks = source.count, source.count - state
        self._expect = wish.expect or self._blocks
        self._allowed = frozenset(one.level for one in picker.candidates)
        self._finer = self._refinements() if wish.refine else {}
        self.count = self._main + (self._blocks if self._finer else 0)
        self._items = [_Item() for _ in range(self.count)]
        self._have = {item: (nbytes, check) for item, nbytes, check in have}
        self._layers = order == "layers"
        run, more = range(self._main), range(self._main, self.count)
        self._sequence = [*run, *more] if order != "tail" else [*reversed(run), *reversed(more)]
        self._next = self._picked = self._held = self._gone = 0
        self._rests: threading.Timer | None = None
        self._until = 0.0
        self._waits, self._since = 0.0, 0.0  # seconds in which nothing was ready, and since when nothing is (0: it is)
        self._open: set[int] = set()
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._closed = False

    def _refinements(self) -> dict[str, str]:
        """The refinement that leads from a level to the finest allowed one that refines it."""
        card, found = self._codec.digest[:16], {}
        for info in self._codec.levels:
            fine, base = LevelName(info.name, card), LevelName(info.base, card)
            if info.base and {str(fine), str(base)} <= self._allowed:
                found[str(base)] = str(LevelName(info.name, card, info.base))
        return found

    def told(self, bandwidth: int) -> None:
        """What the receiver sees of the link, in bytes/s."""
        with self._lock:
            self._picker.told(float(bandwidth), self._packer.clock())

    def parts(self, item: int) -> tuple[int, ...] | None:
        """See `Supply.parts`; () for the refinement of a block that has none."""
        self._ahead()
        found, now = self._items[item], self._packer.clock()
        if found.offsets is None and found.gone is None:
            self._since = self._since or now
        elif self._since:
            self._waits, self._since = self._waits + now - self._since, 0.0
        if found.gone is not None:
            raise found.gone
        return found.offsets

    def pace(self) -> Pace:
        """See `Packs.supply`."""
        waits, self._waits = self._waits, 0.0
        return int(waits * 1e6), *self._packer.pace

    def read(self, item: int, start: int, stop: int) -> memoryview | bytes:
        """See `Supply.read`."""
        found = self._items[item]
        if found.gone is not None:
            raise found.gone
        data = self._source.read(item, start, stop) if found.data is None else found.data[start:stop]
        if found.offsets and stop == found.offsets[-1]:
            self._let_go(item, found)
        return data

    def watch(self, wake: Callable[[], None]) -> None:
        """See `Supply.watch`."""
        self._wake = wake
        self._source.watch(wake)

    def close(self) -> None:
        """See `Supply.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            held, self._held = self._held, 0
        if self._rests is not None:
            self._rests.cancel()
        self._packer.hold(-held)
        self._source.close()

    def _let_go(self, item: int, found: _Item) -> None:
        size = found.offsets[-1] if found.offsets else 0
        self._packer.sent(found.level, size, found.raw)
        with self._lock:
            self._gone += item < self._main
            self._open.discard(item)
            freed = size if found.data is not None and not self._closed else 0
            self._held -= freed
            found.data = None
        self._packer.hold(-freed)

    def _ahead(self) -> None:
        """Begin to make the next items. In layer order all are made before the first layer goes, so none waits for
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
                self._packer.submit(lambda item=item, level=level: self._make(item, level))  # type: ignore[misc]
            except LookupError as error:
                self._settle(item, None, None, error)

    def _crowded(self) -> bool:
        """True if so many items are being made, or where each may have its own level wait to be sent, that the level of
        another one is better picked later."""
        with self._lock:
            open_ = [self._items[i] for i in self._open]
            return sum(not self._layers or found.offsets is None for found in open_) >= 2 * self._packer.threads

    def _ready(self, item: int) -> bool:
        """False while a block is still computed, and for refinements until all else has gone and the receiver has had
        time to work with it: nobody waits for them."""
        if item < self._main:
            return self._source.parts(item) is not None
        if self._gone < self._main:
            return False
        now = self._packer.clock()
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
        return self._picker.pick(self._expect - self._picked + 1, self._packer.clock())

    def _make(self, item: int, level: str) -> None:
        """In a thread of the packer."""
        if self._closed:
            return
        try:
            view = parse(self._source.sealed(item if item < self._main else item - self._main))
            held, (_, check) = view.header.level, self._have.get(item, (0, b""))
            if held != EXACT and parse_level(held).exact is False:
                # It was kept lossy here: nothing better can be made of it.
                if held not in self._allowed:
                    raise LookupError("held at a level that is not allowed")
                level = held if item < self._main else ""
            coded = self._packer.encode(self._codec, view, level) if level else None
            for other in sorted(self._allowed) if check and item < self._blocks else ():
                if coded is not None and _check(coded.data, view.buffer) == check:
                    break
                coded = self._packer.encode(self._codec, view, other)
            if coded is None:
                self._settle(item, None, ())
                return
            data = view.buffer if coded.data is None else coded.data.data.toreadonly()
            kept = data if coded.data is not None else None
            with self._lock:
                self._items[item].level, self._items[item].raw = coded.level, self._codec.nbytes(EXACT)
                self._picker.made(coded.level, len(data), coded.seconds / self._packer.threads)
            self._settle(item, kept, part_offsets(parse(data)))
        except LookupError as error:
            self._settle(item, None, None, error)
        except CtxReuseError as error:
            self._settle(item, None, None, LookupError(error.what))
        except BaseException as error:
            self._settle(item, None, None, LookupError("failed"))
            raise error

    def _settle(
        self, item: int, data: memoryview | None, offsets: tuple[int, ...] | None, gone: LookupError | None = None
    ) -> None:
        found = self._items[item]
        with self._lock:
            if self._closed:
                return
            found.data, found.gone, found.offsets = data, gone, offsets
            if not offsets:
                self._open.discard(item)
            nbytes = len(data) if data is not None else 0
            self._held += nbytes
        self._packer.hold(nbytes)
        if offsets and self._have.get(item, (0, b""))[0] >= offsets[-1]:
            self._let_go(item, found)  # the peer has all of it: it will not be read
        self._wake()


def _check(data: object, held: memoryview) -> bytes:
    return bytes((held if data is None else memoryview(data))[24:32])  # type: ignore[arg-type]
