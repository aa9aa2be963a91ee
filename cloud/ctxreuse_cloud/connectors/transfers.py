"""Between a store and the pages of another engine: loads layer by layer, saves behind the engine's back."""

from __future__ import annotations

import contextlib
import logging
import mmap
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView, BlockWriter, Layout, block_layout
from ctxreuse.block.levels import EXACT
from ctxreuse.codec import Codec
from ctxreuse.engines.checks import check_blocks
from ctxreuse.engines.imports import Import
from ctxreuse.errors import ConfigError, CtxReuseError, FormatError, StoreError
from ctxreuse.identity.model import ModelSpace
from ctxreuse.kernels import advise_hugepages
from ctxreuse.store import TieredStore
from ctxreuse_cloud.connectors.access import StoreAccess
from ctxreuse_cloud.connectors.pages import LayerPages
from ctxreuse_cloud.connectors.requests import PagedBlock

__all__ = ["PageLoad", "PageSaver", "SaveBuffers"]

log = logging.getLogger(__name__)

#: Seconds to wait for a full queue of writes, in the saver's own thread.
_PATIENCE = 10.0


class PageLoad:
    """The loads of one step, layer by layer: a thread copies ahead, a caller that comes first copies itself.

    A block that is missing, another's or damaged spoils its page and those after it in its run: see `finish`.
    ``max_kl``: how lossy blocks may be, in nats; None: exact ones only. ``codec``: opens what decodes those that are
    packed or coded, when one is met.
    """

    def __init__(
        self,
        access: StoreAccess,
        space: ModelSpace,
        pages: Sequence[LayerPages],
        runs: Sequence[Sequence[PagedBlock]],
        *,
        max_kl: float | None = None,
        codec: Callable[[], Codec] | None = None,
    ) -> None:
        self._access, self._runs, self._pages, self._max_kl = access, runs, pages, max_kl
        self._open_codec = codec or partial(Codec.open, space)
        self._codec: Codec | None = None
        self._open = contextlib.ExitStack()
        self._store = access.reading()
        self._bad: dict[int, int] = {}
        self._damaged: set[bytes] = set()
        self._views: list[tuple[int, int, PagedBlock, BlockView]] = []
        self._began = time.perf_counter()
        try:
            self._look_up(space)
        except StoreError as error:
            log.warning("KV is computed, not loaded: %s", error)
            self._bad, self._views = dict.fromkeys(range(len(runs)), 0), []
        jobs = [(layer, partial(self._load_layer, layer)) for layer in range(len(pages))] if self._views else []
        self._import = Import(jobs, background=True)

    def _look_up(self, space: ModelSpace) -> None:
        layout = block_layout(space)
        reader = self._open.enter_context(self._store.read(self._max_kl)) if self._store is not None else None
        for number, run in enumerate(self._runs):
            for i, block in enumerate(run):
                ids = np.frombuffer(block.tokens, "<i4")
                view = reader.block(block.key, ids, space.digest) if reader is not None else None
                if view is None or not self._fits(view, block, space, layout):
                    self._bad[number] = i
                    break
                self._views.append((number, i, block, view))

    def _fits(self, view: BlockView, block: PagedBlock, space: ModelSpace, layout: Layout) -> bool:
        """True if a block has this model's planes, or what decodes to them."""
        if view.header.level == EXACT:
            return view.layout.planes == layout.planes
        try:
            if self._codec is None:
                self._codec = self._open_codec()
            check_blocks([view], space, layout, block.end - space.block_tokens, self._codec)
        except (FormatError, ConfigError) as error:
            log.debug("a block is computed, not loaded: %s", error)
            return False
        return True

    def _load_layer(self, layer: int) -> None:
        for number, i, block, view in self._views:
            if self._bad.get(number, len(self._runs[number])) > i and not self._pages[layer].load(
                view, layer, block.page, self._codec
            ):
                self._bad[number] = i
                self._damaged.add(block.key)

    def ensure(self, layer: int) -> None:
        """Return when a layer's pages are loaded, or known to be bad."""
        with contextlib.suppress(FormatError):  # `finish` says so
            self._import.ensure(layer)

    def finish(self) -> tuple[set[int], int, float]:
        """End the load: the pages that are not loaded, how many blocks are, and the seconds until then."""
        try:
            self._import.wait()
        except FormatError as error:
            log.warning("KV is computed, not loaded: %s", error)
            self._bad = dict.fromkeys(range(len(self._runs)), 0)
        seconds = time.perf_counter() - self._began
        self._views.clear()
        self._open.close()
        store = self._access.writing() if self._damaged else None
        if store is not None:
            for key in self._damaged:
                store.drop(key, "corrupt")
        bad = {block.page for number, i in self._bad.items() for block in self._runs[number][i:]}
        loaded = sum(self._bad.get(number, len(run)) for number, run in enumerate(self._runs))
        return bad, loaded, seconds


class SaveBuffers:
    """Memory for blocks on their way to the store, faulted in once. Any thread may call.

    A buffer is free again when nothing refers to it or to a slice of it.
    """

    def __init__(self, nbytes: int, limit: int) -> None:
        """Take room for blocks of ``nbytes``, of ``limit`` bytes together and at least one."""
        self._size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        count = max(1, limit // self._size)
        self._arena = mmap.mmap(-1, count * self._size)
        advise_hugepages(self._arena, populate=True)  # a first fill would wait for these pages: 25 ms for 47 MB
        self._buffers = [np.frombuffer(self._arena, np.uint8, self._size, i * self._size) for i in range(count)]
        self._next = 0

    def take(self) -> npt.NDArray[np.uint8] | None:
        """Return a free buffer; None if there is none."""
        for _ in range(len(self._buffers)):
            at = self._next
            self._next = (at + 1) % len(self._buffers)
            if sys.getrefcount(self._buffers[at]) <= 2:  # the list's, and the call's own
                return self._buffers[at]
        return None


class _Save(NamedTuple):
    key: bytes
    writer: BlockWriter


class PageSaver:
    """Copies pages out of the engine's memory at once, and seals and stores them in a thread of its own.

    What is over ``limit`` bytes of memory is not saved, nor what no other process lets this one write.
    """

    def __init__(self, access: StoreAccess, space: ModelSpace, pages: Sequence[LayerPages], limit: int) -> None:
        self._access, self._space, self._pages = access, space, pages
        self._layout = block_layout(space)
        probe = self._writer(PagedBlock(bytes(32), bytes(32), bytes(4 * space.block_tokens), space.block_tokens, 0))
        self._buffers = SaveBuffers(probe.buffer.nbytes, limit)
        self._queue: queue.SimpleQueue[_Save | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: set[bytes] = set()
        self._counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="ctxreuse-save", daemon=True)
        self._thread.start()

    def save(self, runs: Sequence[Sequence[PagedBlock]]) -> None:
        """Copy the pages of blocks that are not stored; the engine may overwrite them afterwards."""
        store = self._access.writing()
        for run in runs:
            if store is None:
                self._count("unsaved_readonly", len(run))
                continue
            for i, (block, entry) in enumerate(zip(run, store.entries([block.key for block in run]))):
                with self._lock:
                    if entry is not None or block.key in self._waiting:
                        continue
                    into = self._buffers.take()
                    if into is None:
                        self._counts["unsaved_memory"] += len(run) - i
                        break
                    self._waiting.add(block.key)
                writer = self._writer(block, into)
                del into
                for layer, pages in enumerate(self._pages):
                    pages.save(writer, layer, block.page)
                self._queue.put(_Save(block.key, writer))

    def _writer(self, block: PagedBlock, into: npt.NDArray[np.uint8] | None = None) -> BlockWriter:
        ids = np.frombuffer(block.tokens, "<i4")
        return BlockWriter(
            self._layout,
            kind="block",
            space=self._space.digest,
            key=block.key,
            parent=block.parent,
            end=block.end,
            tokens=ids,
            rope_at=block.end - len(ids),
            into=into,
        )

    def take_counts(self) -> Counter[str]:
        """Return blocks ``saved``, and those not saved by reason, since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts

    def flush(self, timeout: float = _PATIENCE) -> bool:
        """Wait until all that was copied is stored or refused; False at the timeout."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            with self._lock:
                if not self._waiting:
                    return True
            time.sleep(0.005)
        return False

    def close(self) -> None:
        """Store what was copied, then end the thread. A second call does nothing."""
        self._queue.put(None)
        self._thread.join()

    def _count(self, name: str, blocks: int) -> None:
        with self._lock:
            self._counts[name] += blocks

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            key = item.key
            try:
                stored = self._put(item)
            except CtxReuseError as error:
                stored = False
                log.warning("a block of KV was not saved: %s", error)
            del item
            with self._lock:
                self._waiting.discard(key)
                self._counts["saved" if stored else "unsaved_store"] += 1

    def _put(self, item: _Save) -> bool:
        store: TieredStore | None = self._access.writing()
        if store is None:
            return False
        data = item.writer.seal()
        if store.put(item.key, data):
            return True
        store.flush(_PATIENCE)  # a full queue of writes: no step waits here
        return store.put(item.key, data)
