"""A KV connector for vLLM: contexts survive its restart, and engines of one machine share them.

Found by vLLM through one argument::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "CtxReuseConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "ctxreuse_cloud.connectors.vllm",
      "kv_connector_extra_config": {"path": "/var/lib/ctxreuse", "capacity": "20GB"}}'

vLLM makes two: one in its scheduler, which looks up what is stored, and one in its worker, which has the pages. The
worker is the store's writer if no other process is; the scheduler and all others read beside it.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np
from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ctxreuse.codec import Codec
from ctxreuse.errors import ConfigError, StoreError
from ctxreuse.identity.keys import ROOT
from ctxreuse.units import parse_bytes
from ctxreuse_cloud.connectors.access import DOOR_OPTIONS, open_door, read_options
from ctxreuse_cloud.connectors.changes import StoreChanges
from ctxreuse_cloud.connectors.hints import hint_orders
from ctxreuse_cloud.connectors.pages import LayerPages, PageLayout, PageShape, find_layout, host_memory
from ctxreuse_cloud.connectors.requests import RequestBlocks, StepPlan, StepProgress
from ctxreuse_cloud.connectors.sharing import SHARING_OPTIONS, blocks_of_page, read_sharing
from ctxreuse_cloud.connectors.spaces import EngineModel, space_of, torch_space_of
from ctxreuse_cloud.connectors.transfers import PageLoad, PageSaver

__all__ = ["CtxReuseConnector", "StepMetadata", "StoreMetadata", "TransferMetrics", "TransferStats"]

log = logging.getLogger(__name__)

#: Settings in ``kv_connector_extra_config``, with their defaults.
_OPTIONS = {**DOOR_OPTIONS, "save_memory": "256MiB", **SHARING_OPTIONS}
#: Bytes of stored KV that a worker maps when it starts.
_POPULATED = 1 << 30
#: Page of a layer that vLLM gives to no request.
_UNUSED_PAGE = 0


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's connector sends to the worker's for one step."""

    plan: StepPlan


@dataclass
class StoreMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What a worker's connector sends back: keys of blocks that are stored now, and of blocks that left the store."""

    stored: list[bytes]
    removed: list[bytes]

    def aggregate(self, other: StoreMetadata) -> StoreMetadata:
        """Add those of another worker."""
        return StoreMetadata(self.stored + other.stored, self.removed + other.removed)


@dataclass
class TransferStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of one interval: tokens loaded and saved, blocks that failed or were not saved, seconds of loading."""

    data: dict[str, float] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget the counts."""
        self.data = {}

    def aggregate(self, other: TransferStats) -> TransferStats:
        """Add those of another worker or interval."""
        names = {*self.data, *other.data}
        return TransferStats({name: self.data.get(name, 0) + other.data.get(name, 0) for name in names})

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for vLLM's log."""
        return {name: round(value, 4) for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Return True if nothing happened."""
        return not any(self.data.values())


class TransferMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counts of `TransferStats` as ``ctxreuse_vllm_*_total`` beside vLLM's own metrics."""

    _ABOUT: ClassVar = {
        "loaded_tokens": "Tokens whose KV was loaded from the store",
        "load_seconds": "Seconds until all layers of the loads of a step were in place",
        "failed_blocks": "Blocks that were found and could not be loaded: their tokens are computed",
        "saved_tokens": "Tokens whose KV was saved to the store",
        "unsaved_blocks": "Blocks that were not saved: no memory, no room, or another process writes the store",
    }

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._by_name = {
            name: self._counter_cls(
                name=f"ctxreuse_vllm_{name}_total", documentation=about, labelnames=self._labelnames
            )
            for name, about in self._ABOUT.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one interval."""
        for name, counter in self._by_name.items():
            counter.labels(*self.per_engine_labelvalues[engine_idx]).inc(transfer_stats_data.get(name, 0))


class CtxReuseConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """vLLM's interface over `RequestBlocks` (in its scheduler) or `PageLoad` and `PageSaver` (in its worker).

    Only exact blocks are loaded. A miss, a damaged block or a store that cannot be opened costs time: vLLM computes.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Make one side. Raises ConfigError for a model or a setting that it cannot serve."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        # A cache that fails a request would be worse than none. vLLM reads this after it has made the scheduler's side.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        extra = self._kv_transfer_config.kv_connector_extra_config
        options = read_options(extra, _OPTIONS, "kv_connector_extra_config")
        self._model = _model_of(vllm_config, kv_cache_config)
        self._sharing = sharing = read_sharing(options, saves=self._kv_transfer_config.is_kv_producer)
        #: Whose the requests without ``cache_salt`` are, and how lossy what they load may be.
        self._tenant, self._max_kl = (sharing.tenant, sharing.max_kl) if sharing else ("", None)
        text_config = vllm_config.model_config.hf_text_config
        self._space = torch_space_of(self._model, text_config) if sharing else space_of(self._model)
        self._page_blocks = blocks_of_page(self._model.page_tokens, self._space.block_tokens)
        self._save_memory = parse_bytes(options["save_memory"])
        self._access, secret = open_door(options)
        if sharing is not None:
            log.info("KV is shared with the torch engine, in the space %s", self._space.digest.hex()[:16])
            secret = secret or sharing.secret(self._access.config)
        events = vllm_config.kv_events_config
        self._announces = bool(events is not None and events.enable_kv_cache_events)
        size = self._space.block_tokens
        self._blocks = RequestBlocks(
            self._space.digest, size, secret, announces=self._announces, page_blocks=self._page_blocks
        )
        self._changes: StoreChanges | None = None
        self._events: list[Any] = []
        self._layers: dict[str, int] = {name: i for i, name in enumerate(_layer_names(kv_cache_config))}
        self._pages: list[LayerPages] = []
        self._tensors: list[Any] = []
        self._codec = cache(partial(Codec.open, self._space))
        self._saver: PageSaver | None = None
        self._load: PageLoad | None = None
        self._failed: set[int] = set()
        self._counts: dict[str, float] = {}
        self._closed = False

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what is not saved is a miss later."""
        return False

    # ---- The scheduler's side ----------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens are stored beyond those that vLLM has, to be loaded in the step itself."""
        if not _is_plain(request):
            return 0, False
        tenant = request.cache_salt or self._tenant
        found = self._blocks.match(request.request_id, request.all_token_ids, tenant, num_computed_tokens, self._stored)
        return found if self._kv_transfer_config.is_kv_consumer else 0, False

    def _stored(self, keys: Any) -> int:
        store = self._access.reading()
        try:
            return store.match(keys, self._max_kl).blocks if store is not None else 0
        except StoreError as error:
            log.warning("a lookup failed and counts as a miss: %s", error)
            return 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the pages that tokens shall be loaded into."""
        if num_external_tokens > 0:
            self._blocks.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Return what the worker loads and saves in the step."""
        return StepMetadata(self._blocks.step(self._progress(scheduler_output)))

    def _progress(self, step: Any) -> Iterable[StepProgress]:
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        running = step.scheduled_cached_reqs
        computed.update(zip(running.req_ids, running.num_computed_tokens))
        for request, start in computed.items():
            end = start + step.num_scheduled_tokens[request]
            yield StepProgress(request, end, self._kv_cache_manager.get_block_ids(request)[0])

    def update_connector_output(self, connector_output: Any) -> None:
        """Learn which pages the worker could not load."""
        if connector_output.invalid_block_ids:
            self._blocks.failed(connector_output.invalid_block_ids)
        changed = connector_output.kv_connector_worker_meta
        if isinstance(changed, StoreMetadata):
            for block, tenant in self._blocks.stored(changed.stored):
                salt = "" if tenant == self._tenant else tenant
                self._events.append(
                    BlockStored(
                        block_hashes=[block.key],
                        parent_block_hash=None if block.parent == ROOT else block.parent,
                        token_ids=np.frombuffer(block.tokens, "<i4").tolist(),
                        block_size=self._space.block_tokens,
                        lora_id=None,
                        medium=MEDIUM_STORAGE,
                        lora_name=None,
                        extra_keys=[(salt,)] if salt else None,
                    )
                )
            if changed.removed:
                self._events.append(BlockRemoved(block_hashes=changed.removed, medium=MEDIUM_STORAGE))

    def take_events(self) -> list[Any]:
        """Return what vLLM shall publish of the store, in its own format: hashes are our keys."""
        events, self._events = self._events, []
        return events

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Forget a request; its pages are copied already. Its KV hints go to the store with the next step."""
        self._blocks.finished(request.request_id, hint_orders(getattr(request, "kv_hints", None)))
        return False, None

    # ---- The worker's side -------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Learn where the pages lie, and in which layout. Raises ConfigError if they are not understood."""
        names = sorted(kv_caches, key=lambda name: self._layers.get(name, -1))
        if set(names) != set(self._layers):
            raise ConfigError(f"vLLM registers pages of other layers than it configured: {sorted(set(names))[:3]}")
        self._tensors = [kv_caches[name] for name in names]
        layout: PageLayout | None = None
        for i, (name, tensor) in enumerate(zip(names, self._tensors)):
            heads, dim = self._model.layers[i]
            if tensor.device.type != "cpu":
                raise ConfigError(
                    f"KV pages lie on {tensor.device}, and this connector reads pages in host memory only",
                    fix="Run vLLM on the CPU, or without this connector",
                )
            if tuple(tensor.shape[1:]) != (heads, self._model.page_tokens, 2 * dim):
                raise ConfigError(
                    f"KV pages of shape {tuple(tensor.shape)} are not [pages, heads, tokens, 2 * dim]", where=name
                )
            shape = PageShape(
                tensor.shape[0], heads, self._model.page_tokens, dim, self._space.dtype, tuple(tensor.stride())
            )
            memory = host_memory(tensor.data_ptr(), shape.nbytes)
            if layout is None:
                layout = self._layout_of(name, tensor, memory, shape)
                log.info("KV pages are %s: %d layers of %s", layout.name, len(names), shape)
            self._pages.append(LayerPages(memory, shape, layout, self._space.block_tokens))
        if self._sharing is not None:
            self._access.serve = self._sharing.server(self._access.config)
        # The first worker that saves at all is the writer.
        store = self._access.writing() if self._kv_transfer_config.is_kv_producer else None
        self._access.populate(_POPULATED)
        if self._announces and store is not None:
            self._changes = StoreChanges(store)
        self._saver = PageSaver(self._access, self._space, self._pages, self._save_memory)
        # An offline engine may end without a word; the store, opened above, ends itself after this.
        atexit.register(self.shutdown)

    def _layout_of(self, name: str, tensor: Any, memory: Any, shape: PageShape) -> PageLayout:
        """Have vLLM write known K and V into an unused page, and see where they lie."""
        layer = self._vllm_config.compilation_config.static_forward_context[name]
        made = np.random.default_rng(0)  # not torch's generator, which answers are sampled with
        k, v = (tensor.new_tensor(made.standard_normal((shape.tokens, shape.heads, shape.dim))) for _ in range(2))
        slots = tensor.new_ones(shape.tokens).long().cumsum(0) - 1 + _UNUSED_PAGE * shape.tokens
        layer.impl.do_kv_cache_update(layer, k, v, tensor, slots)
        planes = [plane.transpose(0, 1).contiguous() for plane in (k, v)]
        known = [host_memory(plane.data_ptr(), plane.numel() * plane.element_size()) for plane in planes]
        found = find_layout(memory, shape, _UNUSED_PAGE, known[0], known[1])
        tensor[_UNUSED_PAGE].zero_()
        return found

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to load, layer by layer."""
        plan = self._get_connector_metadata().plan
        if plan.loads:
            self._load = PageLoad(
                self._access, self._space, self._pages, plan.loads, max_kl=self._max_kl, codec=self._codec
            )

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when a layer's pages are loaded."""
        if self._load is not None:
            self._load.ensure(self._layers[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: pages are copied when all layers of a step are computed."""

    def wait_for_save(self) -> None:
        """End the loads of the step and copy the pages to be saved; storing them goes on behind."""
        plan = self._get_connector_metadata().plan
        if self._load is not None:
            failed, loaded, seconds = self._load.finish()
            self._load = None
            self._failed |= {block // self._page_blocks for block in failed}
            self._add("failed_blocks", len(failed))
            self._add("loaded_tokens", loaded * self._space.block_tokens)
            self._add("load_seconds", seconds)
        if self._saver is not None and plan.saves and self._kv_transfer_config.is_kv_producer:
            bad = self._failed
            # What follows a page that was not loaded was computed over wrong KV.
            runs = [run for run in plan.saves if not bad or not self._follows(run, bad)]
            self._saver.save(runs)
        if self._kv_transfer_config.is_kv_producer:
            for context in plan.hinted:
                self._access.hint(context.keys, context.order, context.tenant)

    def _follows(self, run: Any, bad: set[int]) -> bool:
        plan = self._get_connector_metadata().plan
        size = self._page_blocks
        spoiled = {load[-1].key for load in plan.loads if any(block.page // size in bad for block in load)}
        return run[0].parent in spoiled or any(block.page // size in bad for block in run)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return pages that were not loaded: vLLM computes their tokens again."""
        failed, self._failed = self._failed, set()
        return failed

    def build_connector_worker_meta(self) -> StoreMetadata | None:
        """Return what came into the store and left it since the last step, if vLLM publishes events."""
        stored, removed = self._changes.take() if self._changes is not None else ([], [])
        return StoreMetadata(stored, removed) if stored or removed else None

    def get_kv_connector_stats(self) -> TransferStats | None:
        """Return the counts since the last call."""
        if self._saver is None:
            return None
        for name, blocks in self._saver.take_counts().items():
            saved = name == "saved"
            self._add(
                "saved_tokens" if saved else "unsaved_blocks", blocks * (self._space.block_tokens if saved else 1)
            )
        counts, self._counts = self._counts, {}
        return TransferStats(counts) if counts else None

    def _add(self, name: str, value: float) -> None:
        if value:
            self._counts[name] = self._counts.get(name, 0) + value

    def shutdown(self) -> None:
        """Store what was copied, then close the store. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        if self._saver is not None:
            self._saver.close()
        self._access.close()

    # ---- What vLLM asks of the class ---------------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return True: layers are waited for one by one."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        """Return counts that crossed a process boundary."""
        return TransferStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> TransferMetrics:
        """Return the counters for vLLM's ``/metrics``."""
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _is_plain(request: Any) -> bool:
    """Return True if token ids and salt alone decide a request's KV: no adapter, image or embedding does."""
    return not (request.lora_request or request.mm_features or request.prompt_embeds is not None)


def _layer_names(kv_cache_config: Any) -> list[str]:
    groups = kv_cache_config.kv_cache_groups
    specs = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        raise ConfigError(
            f"the model keeps its context in {len(groups)} groups of {', '.join(specs)}; one of FullAttentionSpec is "
            "understood",
            fix="For a model with sliding windows pass --disable-hybrid-kv-cache-manager",
        )
    names: list[str] = list(groups[0].layer_names)
    return names


def _model_of(vllm_config: Any, kv_cache_config: Any) -> EngineModel:
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    if parallel.world_size != 1:
        raise ConfigError(
            f"the model is spread over {parallel.world_size} workers, and one is understood",
            fix="Use --tensor-parallel-size 1 and --pipeline-parallel-size 1",
        )
    if cache.cache_dtype not in ("auto", "bfloat16", "float16"):
        raise ConfigError(f"KV is quantised as {cache.cache_dtype}", fix="Pass --kv-cache-dtype auto")
    names = _layer_names(kv_cache_config)
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    text = model.hf_text_config
    return EngineModel(
        model=model.model,
        commit=getattr(model.hf_config, "_commit_hash", None) or "",
        architecture=(model.hf_config.architectures or ["?"])[0],
        config=model.hf_config.to_dict(),
        options={
            "quantization": model.quantization,
            "load_format": str(vllm_config.load_config.load_format),
            "dtype": str(model.dtype),
            "seed": model.seed if str(vllm_config.load_config.load_format) == "dummy" else None,
        },
        dtype=str(spec.dtype).removeprefix("torch."),
        layers=tuple((spec.num_kv_heads, spec.head_size) for _ in names),
        rope=getattr(text, "rope_parameters", None),
        vocab_size=model.get_vocab_size(),
        max_tokens=int(getattr(text, "max_position_embeddings", None) or model.max_model_len),
        page_tokens=spec.block_size,
    )
