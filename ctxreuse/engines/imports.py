"""An import in flight: layers are verified and copied in order, by the thread that needs them first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from ctxreuse.errors import EngineError, FormatError, LinkError

__all__ = ["Import"]


def _nothing() -> None:
    """The job of a layer that is done."""


_TODO, _RUNNING, _DONE = range(3)


class Import:
    """Copies layer by layer; a layer is done by the loader thread or by the prefill that comes to need it.

    ``jobs``: one a layer that has planes, in layer order. ``background``: start a thread at once. Any thread may call
    `ensure` and `wait`. The first failure, FormatError (a corrupt plane), LinkError (a layer that will not come) or
    EngineError (no memory on a device), is its end, and everybody gets it from then on.
    """

    def __init__(self, jobs: Sequence[tuple[int, Callable[[], None]]], *, background: bool) -> None:
        self._jobs = dict(jobs)
        self._state = dict.fromkeys(self._jobs, _TODO)
        self._change = threading.Condition()
        self._error: FormatError | LinkError | EngineError | None = None
        self._thread: threading.Thread | None = None
        if background and self._jobs:
            self._thread = threading.Thread(target=self._run, name="ctxreuse-load", daemon=True)
            self._thread.start()

    @property
    def done(self) -> bool:
        """True if every layer is verified and in place."""
        return self._error is None and all(state == _DONE for state in self._state.values())

    def ensure(self, layer: int) -> None:
        """Return when a layer is in place: does it here if no thread has begun, else waits; raises the failure."""
        if self._state.get(layer, _DONE) == _DONE and self._error is None:
            return
        with self._change:
            while self._state.get(layer, _DONE) == _RUNNING and self._error is None:
                self._change.wait()
            if self._error is not None:
                self._fail()
            if self._state.get(layer, _DONE) == _DONE:
                return
            self._state[layer] = _RUNNING
        self._copy(layer)
        if self._error is not None:
            self._fail()

    def wait(self) -> None:
        """Return when all layers are in place and the thread has ended; raises the failure."""
        try:
            for layer in self._jobs:
                self.ensure(layer)
        finally:
            with self._change:
                # After an error another thread may still be inside a copy: it reads the views until it is through.
                while any(state == _RUNNING for state in self._state.values()):
                    self._change.wait()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join()

    def _run(self) -> None:
        for layer in self._jobs:
            with self._change:
                if self._error is not None:
                    return
                if self._state[layer] != _TODO:
                    continue
                self._state[layer] = _RUNNING
            self._copy(layer)

    def _copy(self, layer: int) -> None:
        error: FormatError | LinkError | EngineError | None = None
        try:
            self._jobs[layer]()
        except (FormatError, LinkError, EngineError) as caught:
            error = caught
        except BaseException as caught:
            error = FormatError(f"layer {layer} could not be loaded: {caught}")
            raise
        finally:
            with self._change:
                self._error = self._error or error
                self._jobs[layer] = _nothing  # releases the views and the memory they were copied to
                self._state[layer] = _DONE
                self._change.notify_all()

    def _fail(self) -> NoReturn:
        assert self._error is not None
        raise type(self._error)(self._error.what, where=self._error.where, fix=self._error.fix) from self._error
