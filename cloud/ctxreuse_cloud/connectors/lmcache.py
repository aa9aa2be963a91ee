"""A store as the second level of LMCache: its chunks survive its server, in one bounded store.

Found by LMCache's server through one argument::

    lmcache server … --l2-adapter '{"type": "plugin", "module_path": "ctxreuse_cloud.connectors.lmcache",
      "class_name": "CtxReuseL2Adapter", "adapter_params": {"path": "/var/lib/ctxreuse", "capacity": "20GB"}}'

With ``"serde": {"type": "ctxreuse", …}`` behind the parameters chunks are coded first, see `lmcache_serde`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.serde import register_serde_factory
from lmcache.v1.platform import create_event_notifier

from ctxreuse_cloud.connectors.access import DOOR_OPTIONS, open_door, read_options
from ctxreuse_cloud.connectors.lmcache_serde import create_serde
from ctxreuse_cloud.connectors.values import Value, ValueSpace, ValueStore

__all__ = ["CtxReuseL2Adapter"]

log = logging.getLogger(__name__)


class CtxReuseL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """LMCache's interface over `ValueStore`.

    Reads and writes have a thread each, so a hit does not wait for what is saved. A task that succeeded is committed.
    Nothing is locked: what a lookup found is evicted last, and a load that comes too late fails, which LMCache allows.
    """

    def __init__(self, params: dict[str, Any], l1_memory_desc: object = None) -> None:
        """Open the store that ``params`` name. Raises ConfigError."""
        super().__init__()
        access, self._secret = open_door(read_options(params, DOOR_OPTIONS, "adapter_params"))
        self._values = ValueStore(access, writes=True)
        self._reads, self._writes = (ThreadPoolExecutor(1, f"ctxreuse-l2-{name}") for name in ("read", "write"))
        self._notifiers = {name: create_event_notifier() for name in ("store", "lookup", "load")}
        self._lock = threading.Lock()
        self._next = 0
        self._done: dict[str, dict[int, Any]] = {name: {} for name in self._notifiers}
        self._spaces: dict[tuple[str, int, int], ValueSpace] = {}
        self._counts = {"stored": 0, "unstored": 0, "loaded": 0, "missed": 0}

    def get_store_event_fd(self) -> int:
        """Return what becomes readable when a store task is done."""
        return int(self._notifiers["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return what becomes readable when a lookup is done."""
        return int(self._notifiers["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        """Return what becomes readable when a load task is done."""
        return int(self._notifiers["load"].fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Copy objects and commit them, behind the caller's back."""
        return self._submit("store", self._writes, lambda: self._store(keys, objects), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return the results of store tasks that are done, each once."""
        with self._lock:
            done, self._done["store"] = self._done["store"], {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: object = None) -> int:
        """Look keys up."""
        return self._submit("lookup", self._reads, lambda: self._find(keys), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return which keys of a lookup are stored, once; None while it is not done."""
        return self._take("lookup", task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing: nothing is locked."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Copy stored values into objects."""
        return self._submit("load", self._reads, lambda: self._load(keys, objects), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Any:
        """Return which keys of a load task were loaded, once; None while it is not done."""
        return self._take("load", task_id)

    def delete(self, keys: list[Any]) -> None:
        """Remove values."""
        self._values.drop([self._key(key) for key in keys], "forgotten")

    def report_status(self) -> dict[str, Any]:
        """Return counts of keys since the start."""
        with self._lock:
            return {"is_healthy": True, "type": type(self).__name__, **self._counts}

    def close(self) -> None:
        """Commit what is under way and close the store."""
        for pool in (self._reads, self._writes):
            pool.shutdown()
        self._values.close()
        for notifier in self._notifiers.values():
            notifier.close()

    def _submit(self, kind: str, pool: ThreadPoolExecutor, work: Callable[[], Any], failed: Any) -> int:
        with self._lock:
            self._next += 1
            task = self._next

        def run() -> None:
            result = failed
            try:
                result = work()
            except Exception:  # LMCache waits for a task's result for ever
                log.exception("a %s task of the store failed", kind)
            with self._lock:
                self._done[kind][task] = result
            self._notifiers[kind].notify()

        pool.submit(run)
        return task

    def _take(self, kind: str, task: int) -> Any:
        with self._lock:
            return self._done[kind].pop(task, None)

    def _store(self, keys: list[Any], objects: list[Any]) -> Any:
        data = [memoryview(each.byte_array) for each in objects]
        named = [self._value(*pair) for pair in zip(keys, objects, strict=True)]
        saved = self._values.save([(value, [part]) for value, part in zip(named, data)])
        self._count(saved, "stored", "unstored")
        return L2StoreResult(all(saved), sum(part.nbytes for part in data))

    def _find(self, keys: list[Any]) -> Any:
        return _bitmap(self._values.find([self._key(key) for key in keys]))

    def _load(self, keys: list[Any], objects: list[Any]) -> Any:
        loaded = [self._load_one(key, each) for key, each in zip(keys, objects, strict=True)]
        self._count(loaded, "loaded", "missed")
        return _bitmap(loaded)

    def _load_one(self, key: Any, each: Any) -> bool:
        # A serde's bytes are flat and may be fewer than the memory for them, which has room for the most.
        flat, into = len(each.metadata.shape) == 1, memoryview(each.byte_array)
        nbytes = self._values.load(self._value(key, each), [into], shorter=flat)
        if 0 < nbytes < into.nbytes:
            each.set_used_size(nbytes)
        return nbytes > 0

    def _count(self, done: list[bool], good: str, bad: str) -> None:
        with self._lock:
            self._counts[good] += sum(done)
            self._counts[bad] += len(done) - sum(done)

    def _space(self, key: Any) -> ValueSpace:
        facts = key.model_name, key.kv_rank, key.object_group_id
        if facts not in self._spaces:
            self._spaces[facts] = ValueSpace("lmcache", facts, self._secret)
        return self._spaces[facts]

    def _key(self, key: Any) -> bytes:
        return self._space(key).key(key.chunk_hash, key.cache_salt)

    def _value(self, key: Any, each: Any) -> Value:
        """Name the bytes of an object; LMCache's key does not say their type."""
        about = each.metadata
        shapes, dtypes = about.shapes or [about.shape], about.dtypes or [about.dtype]
        shape = f"{about.fmt} {[list(shape) for shape in shapes]} {dtypes}"
        axis = about.fmt.token_dim()
        tokens = about.shape[axis] if axis < len(about.shape) else 1  # a serde's objects are flat
        return self._space(key).value(key.chunk_hash, shape, tokens, key.cache_salt)


def _bitmap(found: Iterable[bool]) -> Any:
    marks = list(found)
    bitmap = Bitmap(len(marks))
    for i, there in enumerate(marks):
        if there:
            bitmap.set(i)
    return bitmap


# LMCache imports this module for the adapter, and looks for the serde beside it then.
register_serde_factory("ctxreuse", create_serde)
