"""Calls into an engine's process: from any thread, many at once, each answered, or failed when the process dies."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from ctxreuse.engines.process.memory import Region, SharedMemory
from ctxreuse.engines.process.pipe import FramePipe, Payload
from ctxreuse.engines.process.wire import (
    INLINE,
    Array,
    Call,
    ContextFacts,
    EngineMessage,
    EngineOpened,
    LayerUsed,
    Released,
    Returned,
    pack_arrays,
    packed_size,
    unpack_arrays,
)
from ctxreuse.errors import EngineDiedError, ProtocolError

__all__ = ["Connection", "Layers", "Result"]


class Result(NamedTuple):
    """What a call returned; the arrays are new memory."""

    value: Any
    arrays: list[Array]
    facts: tuple[ContextFacts, ...]


class Layers(Protocol):
    """Gives the child the layers of a load."""

    def used(self, at: int) -> None:
        """The child has copied what lay at ``at`` of the shared memory."""
        ...

    def stop(self) -> None:
        """Nothing more is needed. Returns at once."""
        ...


class _Pending:
    """A call that has not returned."""

    def __init__(self, region: Region | None) -> None:
        self.future: Future[tuple[Returned, Payload]] = Future()
        self.region, self.abandoned = region, False


class Connection:
    """One life of an engine's process, from the moment it has opened its engine. Any thread may call.

    ``died`` is None while it lives, then the error of every call.
    """

    def __init__(self, pipe: FramePipe[EngineMessage], memory: SharedMemory, opened: EngineOpened) -> None:
        self.pipe, self.memory, self.opened = pipe, memory, opened
        self.died: EngineDiedError | None = None
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._layers: dict[int, Layers] = {}
        #: Prefills and steps that have succeeded.
        self.computed = 0
        # A finaliser may run in the middle of a send of the same thread, so another thread sends these.
        self._released: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._releaser = threading.Thread(target=self._release, name="engine-released", daemon=True)
        self._releaser.start()

    def number(self) -> int:
        """A new number, for a context, a load or a call."""
        return next(self._numbers)

    def call(
        self,
        verb: str,
        *args: Any,
        contexts: Sequence[int] = (),
        arrays: Sequence[Array] = (),
        room: int = 0,
    ) -> Result:
        """Call ``verb`` and wait. ``room``: bytes of the arrays that it returns, as far as they are known.

        Raises what the engine raises, EngineDiedError if the process dies.
        """
        memory, given = self.memory, packed_size(arrays)
        region = memory.take(given + room) if given + room > INLINE else None
        pending = _Pending(region)
        try:
            specs, payload = pack_arrays(arrays, memory, region)
            into = Region(region.at + given, region.size - given) if region is not None and room else None
            number = self.number()
            with self._lock:
                if self.died is not None:
                    raise self.died.again()
                self._pending[number] = pending
            try:
                self.pipe.send(Call(number, verb, tuple(contexts), args, specs, into), payload)
            except OSError:
                pass  # the receiving thread learns of it and fails the call
            returned, body = pending.future.result()
            if returned.error is not None:
                raise returned.error.error()
            self.computed += verb in ("prefill", "step")
            found = unpack_arrays(returned.arrays, body, memory)
            copies = [array.copy() if spec.at >= 0 else array for array, spec in zip(found, returned.arrays)]
            return Result(returned.value, copies, returned.facts)
        except BaseException:
            # Interrupted while the child may still write: the region is given back when it answers.
            with self._lock:
                pending.abandoned = not pending.future.done() and pending in self._pending.values()
            raise
        finally:
            if region is not None and not pending.abandoned:
                memory.give_back(region)

    def send(self, message: EngineMessage) -> None:
        """Send what has no answer; a dead process is no error."""
        try:
            self.pipe.send(message)
        except OSError:
            pass

    def release(self, context: int) -> None:
        """Tell the child that a context is not used any more. For finalisers: takes no lock."""
        self._released.put(context)

    def _release(self) -> None:
        while (context := self._released.get()) >= 0:
            self.send(Released(context))

    def begin_layers(self, load: int, layers: Layers) -> None:
        """Let ``layers`` know what the child has used of a load. Raises EngineDiedError."""
        with self._lock:
            if self.died is not None:
                raise self.died.again()
            self._layers[load] = layers

    def end_layers(self, load: int) -> None:
        """The load has ended."""
        with self._lock:
            self._layers.pop(load, None)

    def serve(self) -> None:
        """Receive until the child closes its end. Raises ProtocolError, OSError."""
        while (received := self.pipe.receive()) is not None:
            message, payload = received
            if isinstance(message, Returned):
                with self._lock:
                    pending = self._pending.pop(message.number, None)
                if pending is None:
                    raise ProtocolError(f"the engine's process answers call {message.number}, which nobody made")
                if pending.abandoned and pending.region is not None:
                    self.memory.give_back(pending.region)
                pending.future.set_result((message, payload))
            elif isinstance(message, LayerUsed):
                with self._lock:
                    layers = self._layers.get(message.load)
                if layers is not None:
                    layers.used(message.at)
            else:
                raise ProtocolError(f"the engine's process sent {type(message).__name__}")

    def fail(self, error: EngineDiedError) -> None:
        """Fail all calls, now and later: the process has ended."""
        with self._lock:
            self.died = error
            pending, self._pending = list(self._pending.values()), {}
            layers, self._layers = list(self._layers.values()), {}
        for one in layers:
            one.stop()
        for call in pending:
            call.future.set_exception(error.again())
        self._released.put(-1)
        self._releaser.join()
