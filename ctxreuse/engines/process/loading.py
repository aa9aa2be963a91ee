"""An import into a context of an engine's process: the blocks' layers are passed through shared memory, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ctxreuse.block.format import BlockView, Plane
from ctxreuse.engines.process.connection import Connection
from ctxreuse.engines.process.memory import Region
from ctxreuse.engines.process.wire import LayerArrived, WireError

__all__ = ["ChildLoading", "placed_planes"]

#: Layers in shared memory at once: one that is copied by the loader, one by a prefill, and two that come next.
_SLOTS = 4
#: Below this all layers are passed at once, without a thread.
_SMALL = 1 << 20


def placed_planes(views: Sequence[BlockView], layer: int) -> Iterator[tuple[int, Plane, int, int]]:
    """Where the planes of a layer lie in its slot: for each view's number and plane, first and last byte.

    Both sides compute the same places.
    """
    at = 0
    for number, view in enumerate(views):
        for plane in view.layout.planes:
            if plane.layer == layer and plane.nbytes:
                yield number, plane, at, at + plane.nbytes
                at += -(-plane.nbytes // 64) * 64


class ChildLoading:
    """See `ctxreuse.engines.base.Loading`."""

    def __init__(
        self,
        connection: Connection,
        load: int,
        views: Sequence[BlockView],
        layers: Sequence[int],
        ready: Callable[[int], None] | None,
    ) -> None:
        """Begin to pass ``layers`` of the views, in this order. Raises EngineDiedError."""
        self._connection, self._load, self._ready = connection, load, ready
        self._views, self._layers = list(views), list(layers)
        self._waiting, self._over = threading.Lock(), False
        self._error: Exception | None = None
        self._stopped = False
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._region: Region | None = None
        if not self._layers:
            return
        sizes = [max((end for *_, end in placed_planes(views, layer)), default=0) for layer in self._layers]
        size = -(-max(1, *sizes) // 64) * 64
        small = ready is None and sum(sizes) <= _SMALL
        count = len(self._layers) if small else min(_SLOTS, len(self._layers))
        self._region = connection.memory.take(count * size)
        for slot in range(count):
            self._slots.put(self._region.at + slot * size)
        connection.begin_layers(load, self)
        if small:
            self._pass()
        else:
            self._thread = threading.Thread(target=self._pass, name="ctxreuse-pass", daemon=True)
            self._thread.start()

    def used(self, at: int) -> None:
        """See `Layers.used`."""
        self._slots.put(at)

    def stop(self) -> None:
        """See `Layers.stop`."""
        self._stopped = True
        self._slots.put(-1)

    def _pass(self) -> None:
        memory = self._connection.memory
        for layer in self._layers:
            at = self._slots.get()
            if self._stopped:
                return
            try:
                if self._ready is not None:
                    self._ready(layer)
                for number, plane, start, end in placed_planes(self._views, layer):
                    view = self._views[number]
                    offset = view.offset(plane.layer, plane.role)
                    source = np.frombuffer(view.buffer, np.uint8, plane.nbytes, offset)
                    memory.view(Region(at + start, end - start))[:] = source
            except Exception as error:  # a LinkError, mostly: the child raises it in whatever needs the layer
                self._connection.send(LayerArrived(self._load, layer, at, WireError.of(error)))
                return
            self._connection.send(LayerArrived(self._load, layer, at))

    def wait(self) -> None:
        """See `Loading.wait`."""
        with self._waiting:
            if not self._over:
                try:
                    self._connection.call("wait", self._load)
                except Exception as error:
                    self._error = error
                finally:
                    self._end()
            if self._error is not None:
                raise self._error

    def _end(self) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()
        self._connection.end_layers(self._load)
        if self._region is not None:
            self._connection.memory.give_back(self._region)
        self._over, self._region = True, None
        self._views.clear()
