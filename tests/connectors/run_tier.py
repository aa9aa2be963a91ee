"""vLLM's own manager of tiers with our tier, without an engine: ``python run_tier.py STORE MODEL``.

Its scheduler's side is made as vLLM makes it: `TieringOffloadingSpec` from settings, memory in /dev/shm, its factory of
tiers. The worker's side, which needs a GPU, is played: `Tiers.store` writes a chunk where the manager says,
`Tiers.load` compares it there. Each line of standard input is a list [method, arguments] of `Tiers`, or
["open", settings], which makes one and answers with its error; the answer is a line of JSON that begins with ANSWER.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Collection
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload import config as offload
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.request import Request

#: Bytes of a chunk, and chunks that host memory has room for.
ROW, ROOM = 16384, 12


class Tiers:
    """A manager of two tiers: host memory of `ROOM` chunks over our store."""

    def __init__(
        self, store: str, model: str, *, tier: dict[str, Any] | None = None, events: bool = False, **changed: Any
    ) -> None:
        settings = {
            "type": "CtxReuseTier", "module_path": "ctxreuse_cloud.connectors.vllm_tier",
            "path": store, "capacity": "64MB", **(tier or {}),
        }  # fmt: skip
        row, block = changed.get("row", ROW), changed.get("block", 16)
        config = offload.OffloadingConfig(
            groups=tuple(
                offload.OffloadingGroupConfig(tokens_per_block=block, layer_names=(f"layer.{i}",), group_id=i)
                for i in range(2)
            ),
            worker_kv_bytes_per_block=row,
            enable_kv_cache_events=events,
            extra_config={"cpu_bytes_to_use": row * ROOM, "secondary_tiers": [settings]},
            engine_id=f"ctxreuse_test_{os.getpid()}",
            model=offload.OffloadingModelConfig(name=model, dtype=changed.get("dtype", "bfloat16")),
            cache=offload.OffloadingCacheConfig(tokens_per_hash=block, blocks_per_chunk=1),
            parallel=offload.OffloadingParallelConfig(
                rank=0, world_size=1, tp_size=changed.get("tp_size", 1), pp_size=1, pcp_size=1, dcp_size=1,
                data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None,
                is_parallelism_agnostic=False,
            ),
            kv_cache_layout=changed.get("layout", "BLHNC"),
        )  # fmt: skip
        self.manager: Any = TieringOffloadingSpec(config).get_manager()
        self.memory = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self._requests = 0

    def _request(self) -> ReqContext:
        self._requests += 1
        context = ReqContext(req_id=f"r{self._requests}")
        self.manager.on_new_request(context)
        return context

    def _step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def idle(self) -> int:
        """Let vLLM's manager step until no transfer is under way; return how many steps it took."""
        steps = 0
        while self.manager.has_pending_work():
            self._step()
            time.sleep(0.001)
            steps += 1
        return steps

    def hashes(self, tokens: list[int], salt: str = "") -> list[str]:
        """Return the keys that vLLM itself gives the whole blocks of a prompt."""
        init_none_hash(sha256)
        request = Request(
            request_id="r", prompt_token_ids=tokens, sampling_params=SamplingParams(max_tokens=1), pooling_params=None,
            cache_salt=salt or None, block_hasher=get_request_block_hasher(16, sha256),
        )  # fmt: skip
        return [make_offload_key(block, 0).hex() for block in request.block_hashes]

    def store(self, keys: list[str], *, settle: bool = True) -> list[str]:
        """Hand chunks to vLLM's manager, as a request's prefill does; return those that it took."""
        context = self._request()
        prepared = self.manager.prepare_store([bytes.fromhex(key) for key in keys], context)
        taken = list(prepared.keys_to_store) if prepared is not None else []
        if taken:
            for key, chunk in zip(taken, prepared.store_spec.chunk_ids, strict=True):
                self.memory[chunk] = payload(key, self.memory.shape[1])
            self.manager.complete_store(taken, context)
        self.manager.on_request_finished(context)
        self._step()
        if settle:
            self.idle()
        return [key.hex() for key in taken]

    def load(self, keys: list[str]) -> list[bool]:
        """Look chunks up one after another, as a request does; return which came. Fails if one has other bytes."""
        context = self._request()
        came = [self._came(bytes.fromhex(key), context) for key in keys]
        self.manager.on_request_finished(context)
        self._step()
        return came

    def _came(self, key: bytes, context: ReqContext) -> bool:
        while (found := self.manager.lookup(key, context)) in (LookupResult.HIT_PENDING, LookupResult.RETRY):
            self._step()
            time.sleep(0.001)
        if found is LookupResult.MISS:
            return False
        (chunk,) = self.manager.prepare_load([key], context).chunk_ids
        same = np.array_equal(self.memory[chunk], payload(key, self.memory.shape[1]))
        self.manager.complete_load([key], context)
        assert same, "a chunk came back with other bytes"
        return True

    def events(self) -> dict[str, list[str]]:
        """Return the keys that vLLM's manager says our tier has stored, and removed, since the last call."""
        found: dict[str, list[str]] = {"stored": [], "removed": []}
        for event in self.manager.take_events():
            if event.ownership == "CtxReuseTier":
                found["removed" if event.removed else "stored"] += [key.hex() for key in event.keys]
        return found

    def touch(self, keys: list[str]) -> bool:
        """Count chunks as used, in all tiers."""
        self.manager.touch([bytes.fromhex(key) for key in keys], self._request())
        return True

    def empty(self) -> int:
        """Empty host memory, as vLLM does when it sleeps; return how many of its chunks are free."""
        self.manager.reset_cache()
        return int(self.manager.primary_tier._get_num_free_chunks())

    def counts(self) -> dict[str, float]:
        """Return what was counted since the last call, of our tier and of vLLM's."""
        stats = self.manager.get_stats()
        return {name.split(":(")[0]: value for name, value in stats.reduce().items()} if stats is not None else {}

    def many(self, seed: int, steps: int) -> dict[str, int]:
        """Do random operations; whatever was stored once must come back, whole, and nothing else."""
        made = random.Random(seed)
        names = [make_offload_key(made.randbytes(32), made.randrange(2)).hex() for _ in range(60)]
        stored: set[str] = set()
        done = {"stored": 0, "came": 0, "missed": 0}
        for _ in range(steps):
            keys = made.sample(names, made.randrange(1, 6))
            match made.choice(("store", "store", "load", "load", "load", "touch", "empty")):
                case "store":
                    self.idle()  # one that waits behind another may be left out
                    taken = self.store(keys, settle=made.random() < 0.5)
                    stored.update(taken)
                    done["stored"] += len(taken)
                case "load":
                    came = self.load(keys)
                    if came != [key in stored for key in keys]:  # host memory was full of what is under way
                        self.idle()
                        came = self.load(keys)
                    assert came == [key in stored for key in keys], "a lookup differs from the model"
                    done["came"] += sum(came)
                    done["missed"] += len(came) - sum(came)
                case "touch":
                    self.touch(keys)
                case "empty":
                    assert self.empty() == ROOM, "chunks stay pinned"
        return done

    def close(self) -> bool:
        """End vLLM's manager and its tiers, twice."""
        self.memory = np.empty((0, 0), np.uint8)
        tier = self.manager.secondary_tiers[0]
        self.manager.shutdown()
        tier.shutdown()
        return True


def payload(key: Collection[int], size: int) -> np.ndarray:
    """Return the bytes of a chunk."""
    return np.random.default_rng(list(key)).integers(0, 256, size, np.uint8)


def main() -> None:
    store, model, tiers = sys.argv[1], sys.argv[2], None
    print("ANSWER", json.dumps("ready"), flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            if method == "open":
                if tiers is not None:
                    tiers.close()
                tiers = Tiers(store, **{"model": model} | arguments[0])
                answer: Any = ""
            else:
                answer = getattr(tiers, method)(*arguments)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
            print(answer, file=sys.stderr, flush=True)
        print("ANSWER", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
