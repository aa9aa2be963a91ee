"""A store as a secondary tier of vLLM's own offloading: what its host memory gives up is kept, over its end, too.

Found by vLLM through one argument::

    vllm serve MODEL_FOLDER --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8000000000,
        "secondary_tiers": [{"type": "CtxReuseTier", "module_path": "ctxreuse_cloud.connectors.vllm_tier",
          "path": "/var/lib/ctxreuse/tier", "capacity": "20GB"}]}}'

vLLM copies pages between its GPU and host memory; this tier, in the scheduler's process, sees chunks of host memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from ctxreuse.errors import ConfigError
from ctxreuse.models import file_digest, weights_digest
from ctxreuse.pauses.envelope import HintOrder
from ctxreuse.recent import keep_newest
from ctxreuse.units import parse_bytes
from ctxreuse_cloud.connectors.access import DOOR_OPTIONS, open_door, read_options
from ctxreuse_cloud.connectors.hints import hint_orders
from ctxreuse_cloud.connectors.values import Value, ValueSpace, ValueStore

__all__ = ["CtxReuseTier"]

log = logging.getLogger(__name__)

#: Settings of the tier, with their defaults.
_OPTIONS = {**DOOR_OPTIONS, "save_memory": "1GiB"}
#: Bytes of a block hash below which it is none of SHA-256. Others can be forged, and their seed changes at each start.
_HASH_BYTES = 32
#: Chunks whose coming and going is announced; of more, the oldest go without a word.
_ANNOUNCED = 1 << 18
#: Fields of vLLM's parallel settings that say which part of each layer lies where in a chunk.
_RANKS = ("rank", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
#: What is counted beside vLLM's own metrics of tiers.
_COUNTS = {
    "ctxreuse_vllm_tier_saved_chunks": "Chunks that are in the store after they were handed to it",
    "ctxreuse_vllm_tier_unsaved_chunks": "Chunks that were not saved: the store is slow, full or another's to write",
    "ctxreuse_vllm_tier_loaded_chunks": "Chunks that were loaded from the store",
    "ctxreuse_vllm_tier_failed_chunks": "Chunks that were found and could not be loaded: their tokens are computed",
}


class CtxReuseTier(SecondaryTierManager):  # type: ignore[misc]
    """vLLM's interface over `ValueStore`.

    Its scheduler calls, so calls only enqueue, or look into the index; a thread copies and commits what is stored, and
    another one loads. A chunk that is damaged or was evicted since its lookup is a failed load: vLLM computes it.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        """Open the store that ``settings`` name. Raises ConfigError for bad ones, and for a model without weights."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        options = read_options(settings, _OPTIONS, f"the secondary tier {tier_type}")
        self.locality = Locality.LOCAL
        # What waits stays in vLLM's memory; the other half is for what is loaded.
        self._save_memory = min(parse_bytes(options["save_memory"]), primary_kv_view.nbytes // 2)
        config = offloading_spec.config
        self._tokens = {
            group.group_id: group.tokens_per_block * config.cache.blocks_per_chunk for group in config.groups
        }
        facts = _facts_of(offloading_spec, self.block_size_bytes)
        access, secret = open_door(options)
        self._space = ValueSpace("vllm-tier", facts, secret)
        self._values = ValueStore(access, writes=True)
        self._rows: Any = np.asarray(primary_kv_view).view(np.uint8)
        self._reads, self._writes = (ThreadPoolExecutor(1, f"ctxreuse-tier-{name}") for name in ("read", "write"))
        self._lock = threading.Lock()
        self._done: list[JobResult] = []
        self._waiting = 0
        self._counts: Counter[str] = Counter()
        #: Chunks of each request that failed to load: found again, they would be loaded, and fail, without end.
        self._failed: dict[str, set[bytes]] = {}
        #: Of requests with KV hints: what they ask for, and the chunks of their contexts.
        self._hints: dict[str, tuple[list[HintOrder], set[bytes]]] = {}
        #: vLLM's keys of chunks by the store's, where vLLM publishes events.
        self._names: dict[bytes, bytes] = {}
        self._changes = self._values.changes() if offloading_spec.kv_events_config.enable_kv_cache_events else None
        self._warned = False

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Return if a chunk is stored."""
        self._note([key], req_context)
        if key in self._failed.get(req_context.req_id, ()) or not self._usable([key]):
            return LookupResult.MISS
        (found,) = self._values.find([self._space.key(key)], use=False)
        return LookupResult.HIT if found else LookupResult.MISS

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Count chunks as used, in a thread, so they are not evicted next."""
        self._note(keys, req_context)
        self._writes.submit(self._values.find, [self._space.key(key) for key in keys])

    def submit_store(self, job_metadata: Any) -> None:
        """Copy chunks and commit them, in a thread; at once a failed job if too many wait for that."""
        self._note(job_metadata.keys, job_metadata.req_context)
        size = len(job_metadata.keys) * self.block_size_bytes
        with self._lock:
            # A job that waits alone is taken whatever its size.
            taken = self._usable(job_metadata.keys) and (not self._waiting or self._waiting + size <= self._save_memory)
            self._waiting += size if taken else 0
        if taken:
            self._submit(self._writes, self._store, job_metadata)
        else:
            self._finish(job_metadata, 0.0, [])

    def submit_load(self, job_metadata: Any) -> None:
        """Copy stored chunks into host memory, in a thread."""
        self._submit(self._reads, self._load, job_metadata)

    def get_finished_jobs(self) -> list[JobResult]:
        """Return the results of jobs that are done, each once."""
        with self._lock:
            done, self._done = self._done, []
        return done

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Ask for what is computed newly, not for what vLLM has already."""
        with self._lock:
            self._failed[req_context.req_id] = set()
        if orders := hint_orders(req_context.kv_hints):
            self._hints[req_context.req_id] = orders, set()
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget a request; what its KV hints ask for its chunks is done behind the stores before."""
        with self._lock:
            self._failed.pop(req_context.req_id, None)
        orders, chunks = self._hints.pop(req_context.req_id, ((), set()))
        ends = {key: req_context.get_offload_key_position(key) or 0 for key in chunks}
        for order in orders:
            wanted = [key for key, end in ends.items() if order.tokens is None or 0 < end <= order.tokens]
            self._writes.submit(self._values.hint, [self._space.key(key) for key in wanted], order)

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Return which chunks came into the store and which left it since the last call, if vLLM publishes events."""
        if self._changes is None:
            return
        for keys, removed in zip(self._changes.take(), (False, True)):
            with self._lock:
                find = self._names.pop if removed else self._names.get
                names = [name for key in keys if (name := find(key, None)) is not None]
            if names:
                yield OffloadingEvent(
                    keys=names,
                    medium=self.medium,
                    removed=removed,
                    locality=self.locality,
                    ownership=self.tier_type,
                    removal_expected=True,
                )

    def drain_jobs(self) -> None:
        """Return when no job touches vLLM's memory any more."""
        wait([pool.submit(int) for pool in (self._reads, self._writes)])  # one thread each: what came before is done

    def shutdown(self) -> None:
        """Commit what is under way, let vLLM's memory go and close the store. A second call does nothing."""
        for pool in (self._reads, self._writes):
            pool.shutdown()
        if self._rows is not None:
            self._rows = None
            if self._changes is not None:
                self._changes.close()
            self._values.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingCounterMetadata]:
        """Return the counters for vLLM's ``/metrics``."""
        return {name: OffloadingCounterMetadata(documentation=about) for name, about in _COUNTS.items()}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the counts since the last call."""
        with self._lock:
            counts, self._counts = +self._counts, Counter()
        stats = OffloadingConnectorStats()
        for name, count in counts.items():
            stats.increase_counter(name, count)
        return stats if counts else None

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[Any], list[bytes]], job: Any) -> None:
        def run() -> None:
            start, good = time.monotonic(), []
            try:
                good = work(job)
            except Exception:  # vLLM keeps the chunks of a job without a result for ever
                log.exception("a job of the store failed")
            self._finish(job, time.monotonic() - start, good)

        pool.submit(run)

    def _note(self, keys: Collection[bytes], request: Any) -> None:
        """Add chunks to the context of a request with KV hints."""
        if (hinted := self._hints.get(request.req_id)) is not None:
            hinted[1].update(keys)

    def _store(self, job: Any) -> list[bytes]:
        if self._changes is not None:
            with self._lock:
                self._names.update((self._space.key(key), key) for key in job.keys)
                self._names = keep_newest(self._names, _ANNOUNCED)
        try:
            saved = self._values.save([(self._value(key), [row]) for key, row in self._chunks(job)])
            return [key for key, mark in zip(job.keys, saved, strict=True) if mark]
        finally:
            with self._lock:
                self._waiting -= len(job.keys) * self.block_size_bytes

    def _load(self, job: Any) -> list[bytes]:
        return [key for key, row in self._chunks(job) if self._values.load(self._value(key), [row])]

    def _finish(self, job: Any, seconds: float, good: list[bytes]) -> None:
        """Report a job of which some chunks succeeded."""
        bad = len(job.keys) - len(good)
        result = JobResult(
            job_id=job.job_id,
            success=not bad,
            successful_keys=good if bad and good and job.is_promotion else None,
            transfer_time=seconds,
            transfer_bytes=len(good) * self.block_size_bytes,
        )
        words = ("loaded", "failed") if job.is_promotion else ("saved", "unsaved")
        with self._lock:
            for word, count in zip(words, (len(good), bad)):
                self._counts[f"ctxreuse_vllm_tier_{word}_chunks"] += count
            if job.is_promotion and bad and (failed := self._failed.get(job.req_context.req_id)) is not None:
                failed.update(set(job.keys).difference(good))
            self._done.append(result)

    def _chunks(self, job: Any) -> list[tuple[bytes, memoryview]]:
        """Return the keys of a job with their chunks in vLLM's memory."""
        return [(key, self._rows[chunk].data) for key, chunk in zip(job.keys, job.chunk_ids, strict=True)]

    def _usable(self, keys: Collection[bytes]) -> bool:
        if all(len(get_offload_block_hash(key)) >= _HASH_BYTES for key in keys):
            return True
        if not self._warned:
            self._warned = True
            log.warning("KV is neither loaded nor saved: vLLM hashes blocks by other means than SHA-256")
        return False

    def _value(self, key: bytes) -> Value:
        """Name a chunk: vLLM's hash chains those of the blocks before, and the first holds the request's salt."""
        return self._space.value(key, str(self.block_size_bytes), self._tokens.get(get_offload_group_idx(key), 1))


def _facts_of(spec: Any, row_bytes: int) -> tuple[str, ...]:
    """Return all that the bytes of a chunk depend on, but its tokens: model, types, layout, ranks.

    Versions of vLLM are apart: nothing it says of a page would tell that the order of bytes within has changed.
    """
    config = spec.config
    parts = [config.model.dtype, *map(dataclasses.asdict, (*config.groups, config.cache))]
    layout = [config.kv_cache_layout, config.canonical_layout, spec.replicated_layout]
    ranks = [getattr(config.parallel, name) for name in _RANKS]
    about = json.dumps([parts, layout, ranks, row_bytes, config.worker_kv_bytes_per_block])
    return vllm_version, type(current_platform).__name__, _model_of(config.model.name), about


def _model_of(name: str) -> str:
    """Return what identifies a model's weights: those in files by their bytes, which are read once, others by name."""
    if not name:
        raise ConfigError("vLLM names no model, so no KV can be kept of it")
    path = Path(name).expanduser()
    if path.is_dir():
        config = path / "config.json"
        read = config.read_bytes() if config.is_file() else b""
        return f"{weights_digest(path)} {hashlib.sha256(read).hexdigest()}"
    return file_digest(path) if path.is_file() else f"hub:{name}"
