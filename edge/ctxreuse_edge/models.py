"""The models of the daemon: loaded when a request names them, unloaded when they are idle or others need the memory."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ctxreuse import models
from ctxreuse.daemon.openai import ApiError
from ctxreuse.engines.process import ChildEngine
from ctxreuse.errors import ConfigError
from ctxreuse.units import parse_duration

if TYPE_CHECKING:
    from ctxreuse.identity.model import ModelSpace
    from ctxreuse.runtime import Runtime

__all__ = ["ModelName", "ServedModel", "ServedModels", "check_keep_alive", "model_name", "parse_keep_alive"]

log = logging.getLogger(__name__)

T = TypeVar("T")


class ModelName(NamedTuple):
    """The name of a model in the API, and its folder or file."""

    id: str
    folder: str


def model_name(model: str, name: str = "") -> ModelName:
    """Name a model of the settings: as it is given there, else as the catalogue, else as its file."""
    known = model in models.CATALOG
    folder = models.path(model) if known else Path(model).expanduser().absolute()
    return ModelName(name or (model if known else folder.name), str(folder))


def parse_keep_alive(value: str | float) -> float:
    """Seconds for which an idle model stays loaded, in Ollama's words: ``5m``, 300, 0 (not at all), -1 (for ever: inf).

    Raises ConfigError.
    """
    text = str(value).strip()
    if text.startswith("-"):
        parse_duration(text[1:])
        return math.inf
    return parse_duration(text)


class ServedModel:
    """One model. ``running``: requests that use it; the rest is for `ServedModels`."""

    def __init__(self, name: ModelName, given: str, open_runtime: Callable[[], Runtime]) -> None:
        self.name, self.given, self._open_runtime = name, given, open_runtime
        self._opening = threading.Lock()
        self._runtime: Runtime | None = None
        self.running, self.used, self.keep_alive, self.loading = 0, 0.0, math.inf, False
        #: Bytes that it takes while it is loaded, and seconds that loading takes: estimates, then as measured.
        self.nbytes, self.seconds = 0, 1.0

    @property
    def runtime(self) -> Runtime:
        """Its runtime, opened at the first use. Raises what opening its engine raises."""
        with self._opening:
            if self._runtime is None:
                self._runtime = self._open_runtime()
            return self._runtime

    @property
    def opened(self) -> bool:
        """True once it was used."""
        return self._runtime is not None

    @property
    def space(self) -> ModelSpace | None:
        """What its KV depends on; None before it was first opened."""
        return self._runtime.space if self._runtime is not None else None

    @property
    def max_tokens(self) -> int:
        """Positions of the model; 0 before it was first opened."""
        return self.space.max_tokens if self.space is not None else 0

    @property
    def child(self) -> ChildEngine | None:
        """Its engine, if that is open and can be unloaded: it runs in a process of its own."""
        engine = self._runtime.engine if self._runtime is not None else None
        return engine if isinstance(engine, ChildEngine) else None

    @property
    def loaded(self) -> bool:
        """True if it takes memory."""
        child = self.child
        return self._runtime is not None if child is None else child.state != "unloaded"

    def load(self, clock: Callable[[], float]) -> None:
        """Load it, and measure what that takes."""
        began, runtime = clock(), self.runtime
        if (child := self.child) is not None:
            child.start()
            self.nbytes = child.memory or self.nbytes
        self.seconds = clock() - began
        runtime.context_cache.prune()

    def unload(self) -> None:
        """End its process: its contexts in memory are lost, what was stored is not."""
        child, runtime = self.child, self._runtime
        assert child is not None
        assert runtime is not None
        self.nbytes = max(self.nbytes, child.memory)
        child.unload()
        runtime.context_cache.prune()
        log.info("unloaded", extra={"model": self.name.id})


class ServedModels:
    """All models of the daemon; the first is the one of the settings' section ``engine``. Thread-safe.

    Args:
        served: the models; their names differ.
        keep_alive: seconds after its last request for which a model stays loaded.
        budget: bytes that loaded models may take together; 0: any. A model that is larger is loaded alone.
        clock: seconds.
    """

    def __init__(
        self,
        served: Sequence[ServedModel],
        *,
        keep_alive: float = math.inf,
        budget: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.served, self._keep_alive, self._budget, self._clock = list(served), keep_alive, budget, clock
        self._change = threading.Condition()
        self._closed = False
        for model in self.served:
            model.used, model.keep_alive = clock(), keep_alive
            model.nbytes = model.nbytes or _file_bytes(Path(model.name.folder))
        self._thread = threading.Thread(target=self._run, name="ctxreuse-models", daemon=True)

    def start(self) -> None:
        """Begin to unload idle models."""
        self._thread.start()

    @property
    def first(self) -> ServedModel:
        """The model of requests that name none."""
        return self.served[0]

    @property
    def open(self) -> list[Runtime]:
        """The runtimes that were opened."""
        return [model.runtime for model in self.served if model.opened]

    def find(self, name: str) -> ServedModel:
        """The model of that name. Raises ApiError (404), naming all there are."""
        for model in self.served:
            if name in (model.name.id, model.given) or (name in ("", "default") and model is self.first):
                return model
        raise ApiError(
            404,
            f"the model {name!r} is not served here; there is {', '.join(repr(one.name.id) for one in self.served)}",
            type="not_found_error",
            code="model_not_found",
            param="model",
        )

    @contextlib.contextmanager
    def using(self, model: ServedModel, keep_alive: float | None = None) -> Iterator[None]:
        """Have a model loaded, and not unloaded meanwhile; may wait until others are idle.

        ``keep_alive``: seconds for which it stays loaded afterwards, in place of the setting.
        """
        with self._change:
            model.running += 1
        try:
            self._load(model)
            yield
        finally:
            with self._change:
                model.running -= 1
                model.used, model.keep_alive = self._clock(), self._keep_alive if keep_alive is None else keep_alive
                self._change.notify_all()

    def while_loaded(self, model: ServedModel, work: Callable[[], object]) -> None:
        """Run ``work`` if a model is loaded, which it stays meanwhile; afterwards it is as idle as it was."""
        with self._change:
            if not model.loaded or model.loading:
                return
            model.running += 1
        try:
            work()
        finally:
            with self._change:
                model.running -= 1
                self._change.notify_all()

    def use_first(self, work: Callable[[], T]) -> T:
        """Run ``work`` while the first model is loaded."""
        with self.using(self.first):
            return work()

    def _load(self, model: ServedModel) -> None:
        with self._change:
            if model.loaded and not model.loading:
                return
            while not model.loading and not self._make_room(model):
                self._change.wait()
            model.loading = True
        try:
            model.load(self._clock)
        finally:
            with self._change:
                model.loading = False
                self._change.notify_all()

    def _make_room(self, model: ServedModel) -> bool:
        """Unload the least valuable idle models until ``model`` fits; False if it must wait for requests of others."""
        while True:
            others = [one for one in self.served if one is not model and (one.loaded or one.loading)]
            if not self._budget or sum(one.nbytes for one in others) + model.nbytes <= self._budget:
                return True
            idle = [one for one in others if one.child is not None and not one.running and not one.loading]
            if not idle:
                return not any(one.running for one in others)
            now = self._clock()
            # Idle for long and soon loaded again: little is lost.
            max(idle, key=lambda one: (now - one.used) / max(one.seconds, 1e-3)).unload()

    def unload_idle(self) -> float:
        """Unload what has been idle for its time; return the seconds until the next may be."""
        with self._change:
            return self._unload_idle()

    def _unload_idle(self) -> float:
        left = math.inf
        for model in self.served:
            if model.running or model.loading or model.child is None or not model.loaded:
                continue
            rest = model.used + model.keep_alive - self._clock()
            if rest <= 0:
                model.unload()
            else:
                left = min(left, rest)
        return left

    def _run(self) -> None:
        with self._change:
            while not self._closed:
                left = self._unload_idle()
                self._change.wait(None if math.isinf(left) else min(left, 3600.0))

    def close(self) -> None:
        """Stop unloading."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread.is_alive():
            self._thread.join()


def _file_bytes(place: Path) -> int:
    """Bytes of a model's files: about what it takes in memory."""
    with contextlib.suppress(OSError):
        if place.is_file():
            return place.stat().st_size
        return sum(file.stat().st_size for file in place.iterdir() if file.is_file())
    return 0


def check_keep_alive(value: str | float) -> float:
    """As `parse_keep_alive`, of a request. Raises ApiError."""
    try:
        return parse_keep_alive(value)
    except ConfigError as error:
        raise ApiError(400, f"keep_alive: {error}", param="keep_alive") from None
