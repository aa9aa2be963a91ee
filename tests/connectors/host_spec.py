"""vLLM's spec of tiers where pages lie in host memory: its own copies pages of GPUs only, and refuses any other."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """Replaces vLLM's worker, and nothing else."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker, over the memory that the scheduler's side maps too."""
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        # vLLM's own worker leaves this to an end that an offline engine does not come to.
        atexit.register(Path(region.mmap_path).unlink, missing_ok=True)
        return HostWorker(kv_caches, region)


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies pages at once, those of a single group, one page a chunk."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region, self._done = region, list[TransferResult]()
        self._pairs = []
        for each in kv_caches.tensors:
            pages = each.tensor.view(torch.int8).view(-1, each.page_size_bytes)
            self._pairs.append((pages, region.create_next_worker_view(each.page_size_bytes)))

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for pages, chunks in self._pairs:
            chunks[torch.from_numpy(dst_spec.block_ids).long()] = pages[torch.from_numpy(src_spec.block_ids).long()]
        self._done.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for pages, chunks in self._pairs:
            pages[torch.from_numpy(dst_spec.block_ids).long()] = chunks[torch.from_numpy(src_spec.block_ids).long()]
        self._done.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: copies are made when they are asked for."""

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()
