"""SGLang's own code of HiCache with our storage, without an engine: ``python run_sglang.py STORE``.

SGLang's packages cannot be imported without a GPU's kernels, so their ``__init__`` are left out; the base class and the
factory are imported as they are. Of the controller and of the host pool, whose modules need those kernels, the methods
that reach a storage are compiled from the wheel's source. Each line of standard input is a list [method, arguments] of
`Engine`, or ["open", settings], which makes one and answers with its error; the answer is a line of JSON.
"""

from __future__ import annotations
import __future__

import ast
import importlib.util
import json
import logging
import sys
import types
from pathlib import Path
from typing import Any

import torch

found = importlib.util.find_spec("sglang")
assert found is not None
assert found.submodule_search_locations
ROOT = Path(next(iter(found.submodule_search_locations)))
for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.storage"):
    module = types.ModuleType(name)
    module.__path__ = [str(ROOT.joinpath(*name.split(".")[1:]))]
    sys.modules[name] = module

from sglang.srt.mem_cache import hicache_storage  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402


def lifted(file: str, cls: str, methods: set[str], names: dict[str, Any]) -> type:
    """Return a class of some methods of one in SGLang's source."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    whole = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls)
    kept = [node for node in whole.body if isinstance(node, ast.FunctionDef) and node.name in methods]
    assert {node.name for node in kept} == methods
    made = ast.ClassDef(name=cls, bases=[], keywords=[], body=kept, decorator_list=[])
    code = ast.fix_missing_locations(ast.Module([made], []))
    exec(compile(code, file, "exec", __future__.annotations.compiler_flag), names)
    return names[cls]


POOL = lifted(
    "srt/mem_cache/pool_host/mha.py",
    "MHATokenToKVPoolHost",
    {"get_data_page", "get_dummy_flat_data_page", "set_from_flat_data_page", "get_page_buffer_meta"},
    {"torch": torch},
)
CONTROLLER = lifted(
    "srt/managers/cache_controller.py",
    "HiCacheController",
    {
        "_page_get_zero_copy", "_generic_page_get", "_page_set_zero_copy", "_generic_page_set", "_page_backup",
        "_storage_hit_query",
    },
    {
        "torch": torch,
        "logger": logging.getLogger("sglang"),
        "STORAGE_BATCH_SIZE": hicache_storage.STORAGE_BATCH_SIZE,
        "HiCacheStorageExtraInfo": hicache_storage.HiCacheStorageExtraInfo,
        "get_storage_hash_str": lambda hashes, last, page_size: hashes,
    },
)  # fmt: skip


class Engine:
    """A controller with a host pool of random KV over our storage."""

    def __init__(self, store: str, *, layout: str = "layer_first", v1: bool = True, **changed: Any) -> None:
        self.page, self.pages, layers, heads, dim = 16, 300, 3, 2, 8
        size = self.page * self.pages
        pool = POOL()
        pool.layout, pool.page_size, pool.size, pool.dtype = layout, self.page, size, torch.bfloat16
        pool.layer_num, pool.head_num, pool.head_dim, pool.device, pool.pin_memory = layers, heads, dim, "cpu", False
        pool.device_pool = types.SimpleNamespace(dtype=getattr(torch, changed.pop("dtype", "bfloat16")))
        shape = (2, layers, size, heads, dim) if layout == "layer_first" else (2, size, layers, heads, dim)
        pool.kv_buffer = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        self.pool = pool
        extra = {
            "backend_name": "ctxreuse", "module_path": "ctxreuse_cloud.connectors.sglang",
            "class_name": "CtxReuseStorage", "ctxreuse": {"path": store, "capacity": "64MB"},
        }  # fmt: skip
        extra["ctxreuse"] |= changed.pop("settings", {})
        settings: dict[str, Any] = {
            "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
            "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": layout == "page_first",
            "model_name": "model", "extra_config": extra,
        }  # fmt: skip
        config = hicache_storage.HiCacheStorageConfig(**settings | changed)
        self.storage = StorageBackendFactory.create_backend("dynamic", config, pool)
        self.storage.register_mem_pool_host(pool)
        self.storage.on_host_pools_registered()
        control = CONTROLLER()
        control.storage_backend, control.storage_host_pool, control.page_size = self.storage, pool, self.page
        control.page_get_func = control._page_get_zero_copy if v1 else control._generic_page_get
        control.page_set_func = control._page_set_zero_copy if v1 else control._generic_page_set
        self.control = control

    def _operation(self, hashes: list[str], first: int) -> Any:
        indices = torch.arange(first * self.page, (first + len(hashes)) * self.page)
        return types.SimpleNamespace(
            hash_value=hashes, host_indices=indices, prefix_keys=None, completed_tokens=0, request_id="r",
            token_ids=hashes, last_hash=None, is_terminated=lambda: False,
        )  # fmt: skip

    def backup(self, hashes: list[str], first: int) -> int:
        """Save pages; return how many tokens the controller counts as saved."""
        operation = self._operation(hashes, first)
        self.control._page_backup(operation)
        return int(operation.completed_tokens)

    def query(self, hashes: list[str]) -> int:
        """Return how many tokens the controller finds."""
        return int(self.control._storage_hit_query(self._operation(hashes, 0))[1])

    def fetch(self, hashes: list[str], into: int, like: int) -> tuple[int, bool]:
        """Load pages; return how many came, and if they equal those from the page ``like`` on."""
        operation = self._operation(hashes, into)
        count = self.control.page_get_func(operation, hashes, operation.host_indices, None)
        same = all(
            torch.equal(
                self.pool.get_data_page((into + i) * self.page), self.pool.get_data_page((like + i) * self.page)
            )
            for i in range(count)
        )
        return count, same

    def exists(self, key: str) -> bool:
        """Ask the storage itself."""
        return bool(self.storage.exists(key))

    def sidecar(self) -> str:
        """Register a pool of a hybrid model; return the error."""
        try:
            self.storage.register_mem_host_pool_v2(self.pool, hicache_storage.PoolName.MAMBA)
        except Exception as error:
            return str(error)
        return ""

    def close(self) -> bool:
        """Close the storage, twice."""
        self.storage.close()
        self.storage.close()
        return True


def main() -> None:
    store, engine = sys.argv[1], None
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        if method != "open":
            print(json.dumps(getattr(engine, method)(*arguments)), flush=True)
            continue
        try:
            if engine is not None:
                engine.close()
            engine = Engine(store, **arguments[0])
            print(json.dumps(""), flush=True)
        except Exception as error:
            print(json.dumps(str(error)), flush=True)


if __name__ == "__main__":
    main()
