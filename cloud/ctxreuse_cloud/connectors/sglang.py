"""A store as the storage of SGLang's hierarchical cache: pages outlive the engine.

Found by SGLang through its arguments::

    python -m sglang.launch_server … --enable-hierarchical-cache --hicache-storage-backend dynamic
      --hicache-storage-backend-extra-config '{"backend_name": "ctxreuse", "interface_v1": 1,
        "module_path": "ctxreuse_cloud.connectors.sglang", "class_name": "CtxReuseStorage",
        "ctxreuse": {"path": "/var/lib/ctxreuse", "capacity": "20GB"}}'
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from ctxreuse.errors import ConfigError
from ctxreuse_cloud.connectors.access import DOOR_OPTIONS, open_door, read_options
from ctxreuse_cloud.connectors.pages import host_memory
from ctxreuse_cloud.connectors.values import ValueSpace, ValueStore

__all__ = ["CtxReuseStorage"]


class CtxReuseStorage(HiCacheStorage):  # type: ignore[misc]
    """SGLang's interface over `ValueStore`; its keys chain the hashes of pages, with the request's salt before them.

    A page is one value: through ``batch_get_v1`` copied from and to the host pool's memory at once, else as a flat
    tensor. SGLang calls from one thread that loads and one that saves.
    """

    def __init__(self, storage_config: Any, kwargs: object = None) -> None:
        """Open the store of ``extra_config["ctxreuse"]``, of several ranks each in a folder of its own.

        Raises ConfigError.
        """
        extra = storage_config.extra_config or {}
        options = read_options(extra.get("ctxreuse") or {}, DOOR_OPTIONS, "ctxreuse of the backend's extra config")
        if not storage_config.model_name:
            raise ConfigError("SGLang names no model, so no KV can be kept of it", fix="Pass --model-path")
        rank = _rank_of(storage_config)
        if rank and not options["path"]:
            raise ConfigError("an engine of several ranks needs a path for its stores", fix="Set ctxreuse.path")
        if rank:
            options["path"] = str(Path(options["path"]) / rank)
        self._model, self._rank = str(storage_config.model_name), rank
        access, self._secret = open_door(options)
        self._values = ValueStore(access, writes=bool(storage_config.is_storage_writer))
        self._space: ValueSpace | None = None
        self._closed = False

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn how pages lie in memory, on which the meaning of their bytes depends."""
        super().register_mem_pool_host(mem_pool_host)
        pool = mem_pool_host
        # A pool stores all kinds of fp8 as uint8: what they are, the engine's own pool says.
        dtypes = f"{pool.dtype} {getattr(getattr(pool, 'device_pool', None), 'dtype', '')}"
        facts = type(pool).__name__, str(pool.layout), dtypes, int(pool.page_size)
        self._space = ValueSpace("sglang", (self._model, self._rank, *facts), self._secret)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: object) -> None:
        """Refuse pools beside that of KV: a page without its state would be wrong. Raises ConfigError."""
        raise ConfigError(
            f"the model keeps {host_pool_name} beside its KV, and pages of KV alone are understood",
            fix="Run it without this storage backend",
        )

    def exists(self, key: str) -> bool:
        """Return True if a page is stored."""
        return bool(self.batch_exists([key]))

    def batch_exists(self, keys: Sequence[str], extra_info: object = None) -> int:
        """Return how many of the first pages are stored."""
        space = self._known()
        found = self._values.find([space.key(key.encode()) for key in keys])
        return found.index(False) if False in found else len(found)

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: object = None) -> list[bool]:
        """Copy stored pages into the host pool, in order up to the first that is not there."""
        loaded = [False] * len(keys)
        for i, (key, parts) in enumerate(zip(keys, self._pages(keys, host_indices), strict=True)):
            if not self._load(key, parts):
                break
            loaded[i] = True
        return loaded

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: object = None) -> list[bool]:
        """Store pages of the host pool; returns when they are committed."""
        return self._save(keys, self._pages(keys, host_indices))

    def get(self, key: str, target_location: Any = None, target_sizes: object = None) -> Any:
        """Return a stored page in the flat tensor ``target_location``, or None."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: object = None) -> list[Any]:
        """Return stored pages in the flat tensors of ``target_locations``; None for those that are not there."""
        return [
            tensor if tensor is not None and self._load(key, [_bytes_of(tensor)]) else None
            for key, tensor in zip(keys, target_locations or [None] * len(keys), strict=True)
        ]

    def set(self, key: str, value: Any = None, target_location: object = None, target_sizes: object = None) -> bool:
        """Store a page, given as a tensor."""
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: object = None, target_sizes: object = None
    ) -> bool:
        """Store pages, given as tensors; True if all are committed."""
        whole = [value.contiguous() for value in values or []]
        return len(whole) == len(keys) and all(self._save(keys, [[_bytes_of(value)] for value in whole]))

    def close(self) -> None:
        """Close the store. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._values.close()

    def _known(self) -> ValueSpace:
        if self._space is None:
            raise ConfigError("SGLang uses a storage to which it gave no host pool")
        return self._space

    def _pages(self, keys: Sequence[str], host_indices: Any) -> list[list[memoryview]]:
        """Return the parts of each page in the pool's memory."""
        addresses, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        parts, rest = divmod(len(addresses), max(1, len(keys)))
        if rest or len(sizes) != len(addresses):
            raise ConfigError(f"SGLang's pool gives {len(addresses)} places for {len(keys)} pages")
        memory = [host_memory(address, size).data for address, size in zip(addresses, sizes)]
        return [memory[i * parts : (i + 1) * parts] for i in range(len(keys))]

    def _load(self, key: str, parts: Sequence[memoryview]) -> bool:
        return self._values.load(self._value(key, parts), parts) > 0

    def _save(self, keys: Sequence[str], pages: Sequence[Sequence[memoryview]]) -> list[bool]:
        return self._values.save([(self._value(key, parts), parts) for key, parts in zip(keys, pages, strict=True)])

    def _value(self, key: str, parts: Sequence[memoryview]) -> Any:
        """Name a page's bytes: those of a flat tensor have another order than those of a pool's parts."""
        shape = str([part.nbytes for part in parts])
        return self._known().value(key.encode(), shape, int(self.mem_pool_host.page_size))


def _bytes_of(tensor: Any) -> memoryview:
    return host_memory(tensor.data_ptr(), math.prod(tensor.shape) * tensor.element_size()).data


def _rank_of(config: Any) -> str:
    """Return which slice of each page this process has; "" if it has all."""
    ranks = [
        ("pp", config.pp_rank, config.pp_size),
        ("cp", config.attn_cp_rank, config.attn_cp_size),
        ("dcp", config.dcp_rank, config.dcp_size),
    ]
    if not config.is_mla_model:  # else all have equal pages, and one of them saves
        ranks.append(("tp", config.tp_rank, config.tp_size))
    named = [f"{name}{rank}of{size}" for name, rank, size in ranks if size > 1]
    return "-".join([*named, *([f"dp{config.dp_rank}"] if config.dp_rank else [])])
