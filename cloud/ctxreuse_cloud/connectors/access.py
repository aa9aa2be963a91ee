"""One store for all doors of a process: opened for writing by the first process that wants to, beside it by others.

A process may open an LMDB file once only, so a scheduler and a worker that share a process share the store, too. A
store that cannot be opened now is tried again later: until then all lookups miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ctxreuse.config import StoreConfig
from ctxreuse.errors import ConfigError, StoreError, StoreOwnedError
from ctxreuse.pauses.envelope import HintOrder
from ctxreuse.store import TieredStore, open_store
from ctxreuse.store.lmdb.owner import attended
from ctxreuse.store.prefix_pins import PrefixPins
from ctxreuse.units import parse_bytes

__all__ = ["DOOR_OPTIONS", "StoreAccess", "open_door", "read_options", "share_store"]

log = logging.getLogger(__name__)

#: Seconds between two attempts to open a store, or to become its writer.
_RETRY = 5.0
#: Seconds for which a context is pinned where its hint says no time.
_UNENDED = 3600.0


#: Settings of a door to another engine's cache, with their defaults.
DOOR_OPTIONS = {"path": "", "capacity": "8GB", "secret_file": ""}


class StoreAccess:
    """A store that is opened on demand. Any thread may call; see `share_store`."""

    def __init__(self, config: StoreConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self._clock = config, clock
        self.users = 1
        self._lock = threading.Lock()
        self._store: TieredStore | None = None
        self._pins: PrefixPins | None = None
        #: Opens what else uses the store while this process writes it, and is closed before it.
        self.serve: Callable[[TieredStore], ExitStack] | None = None
        self._served: ExitStack | None = None
        self._writes = False
        self._retry_at = self._write_at = float("-inf")
        self._said = ""

    def reading(self) -> TieredStore | None:
        """Return the store, opened beside its writer if this process is not it; None while it cannot be opened."""
        with self._lock:
            if self._store is None and self._clock() >= self._retry_at:
                self._open(writes=False)
            return self._store

    def writing(self) -> TieredStore | None:
        """Return the store if this process is its writer, or can become it now; else None."""
        with self._lock:
            if not self._writes and self._clock() >= self._write_at:
                self._write_at = self._clock() + _RETRY
                if self._store is None or not attended(self.config.folder()):
                    self._open(writes=True)
            return self._store if self._writes else None

    def _open(self, *, writes: bool) -> None:
        try:
            if self._store is not None:
                self._store.close()  # one process may open its file once only
                self._store = None
            self._store, self._writes = open_store(self.config, readonly=not writes), writes
            self._said = ""
            if writes and self._pins_file.is_file():  # what was pinned before the process ended
                self._begin_pins()
            if writes and self.serve is not None:
                self._served = self.serve(self._store)
        except StoreOwnedError:
            self._open(writes=False)
        except StoreError as error:
            self._retry_at = self._clock() + _RETRY
            if str(error) != self._said:
                log.warning("KV is neither loaded nor saved: %s", error)
                self._said = str(error)

    def hint(self, keys: Sequence[bytes], order: HintOrder, tenant: str = "") -> None:
        """Do what a hint on a context asks for, if this process writes the store; a store that fails ignores it.

        Its policy learns of all, and what is retained is pinned for the time named. All pins take a quarter of the
        capacity at most, and where that is short those of the ``tenant`` that has the most end first.
        """
        store = self.writing()
        if store is None:
            return
        try:
            store.on_pause(keys, order.label)
            with self._lock:
                if self._store is not store:
                    return  # closed meanwhile
                pins = self._begin_pins()
        except StoreError as error:
            log.warning("a hint was ignored: %s", error)
            return
        if order.name in ("pin", "retain"):
            pins.keep(keys, order.seconds or _UNENDED, tenant)
        elif order.name == "demote":
            pins.release(keys, tenant)

    @property
    def _pins_file(self) -> Path:
        return self.config.folder() / "hinted.json"

    def _begin_pins(self) -> PrefixPins:
        """Return the pins, which a thread keeps from now on. Call with the lock, as the writer."""
        if self._pins is None:
            assert self._store is not None
            self._pins = PrefixPins(self._store, self._pins_file)
            self._pins.start()
        return self._pins

    def populate(self, nbytes: int) -> None:
        """Map the most recently used blocks, up to ``nbytes``, in a thread: their first read pays no page faults.

        Those cost 0.2 ms of processor time a MB, ten times what a later read of the same pages does.
        """
        threading.Thread(target=self._populate, args=(nbytes,), name="ctxreuse-populate", daemon=True).start()

    def _populate(self, left: int) -> None:
        try:
            store = self.reading()
            for key in store.recent() if store is not None else ():
                with self._lock:
                    if left <= 0 or self._store is not store or store is None:
                        return
                with store.read() as reader:  # a short one each: the writer reuses no page that is being read
                    view = reader.peek(key)
                    left -= len(view.buffer) if view is not None else 0
                    del view
        except StoreError as error:
            log.debug("blocks were not mapped ahead: %s", error)

    def close(self) -> None:
        """Close the store when the last of those that share it calls."""
        with _lock:
            self.users -= 1
            if self.users > 0:
                return
            _shared.pop(self.config.folder().absolute(), None)
        with self._lock:
            store, self._store, self._writes = self._store, None, False
            self._retry_at = self._write_at = float("inf")
            pins, self._pins = self._pins, None
            served, self._served = self._served, None
        if served is not None:
            served.close()
        if pins is not None:
            pins.close()
        if store is not None:
            store.close()


_lock = threading.Lock()
_shared: dict[Path, StoreAccess] = {}


def share_store(config: StoreConfig) -> StoreAccess:
    """Return this process's access to a store, to be closed once for each call.

    Raises ConfigError if the process uses the folder with other settings.
    """
    with _lock:
        found = _shared.get(config.folder().absolute())
        if found is None:
            found = _shared[config.folder().absolute()] = StoreAccess(config)
            return found
        if found.config != config:
            raise ConfigError("one process uses a store with two settings", where=str(config.folder()))
        found.users += 1
        return found


def read_options(given: Mapping[str, Any], known: Mapping[str, str], where: str) -> dict[str, str]:
    """Return settings, those of ``known`` for the ones not given. Raises ConfigError for an unknown one."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"{where} has no setting {unknown[0]!r}", fix=f"It has {', '.join(known)}")
    return {**known, **{name: str(value) for name, value in given.items()}}


def open_door(options: Mapping[str, str]) -> tuple[StoreAccess, bytes]:
    """Return access to the store that `DOOR_OPTIONS` name, and the secret for keys of tenants.

    Raises ConfigError for a size that is none, a secret that cannot be read, or a store in use with other settings.
    """
    secret = b""
    if options["secret_file"]:
        try:
            secret = Path(options["secret_file"]).expanduser().read_bytes()
        except OSError as error:
            raise ConfigError(f"the secret of tenants cannot be read: {error.strerror}", where=error.filename) from None
    config = StoreConfig(path=options["path"], capacity=parse_bytes(options["capacity"]))
    return share_store(config), secret
