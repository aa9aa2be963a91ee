"""Our tier of vLLM on a real store, with vLLM's names played: no call of the scheduler waits, and bounds hold.

`tests/connectors/test_tier.py` has vLLM itself.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxreuse.errors import ConfigError
from ctxreuse.pauses.hints import hint_label
from ctxreuse.store import TieredStore, open_store
from support.waiting import until

ROW = 4096
KEYS = [bytes([n]) * 32 + bytes(4) for n in range(8)]


class SecondaryTierManager:
    """What vLLM's class does when it is made."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, detector: Any) -> None:
        assert primary_kv_view.strides is not None
        self.block_size_bytes, self.tier_type = primary_kv_view.strides[0], tier_type


@dataclasses.dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class Stats(dict[str, int]):
    def increase_counter(self, name: str, count: int) -> None:
        self[name] = self.get(name, 0) + count


NAMES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0"},
    "vllm.platforms": {"current_platform": object()},
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": {"OffloadingConnectorStats": Stats},
    "vllm.v1.kv_offload.base": {
        "Locality": enum.Enum("Locality", ["LOCAL"]),
        "LookupResult": enum.Enum("LookupResult", ["HIT", "MISS"]),
        "Medium": enum.Enum("Medium", ["STORAGE"]),
        "OffloadingCounterMetadata": dict,
        "OffloadingEvent": types.SimpleNamespace,
        "RequestOffloadingContext": dict,
        "get_offload_block_hash": lambda key: key[:-4],
        "get_offload_group_idx": lambda key: int.from_bytes(key[-4:], "big"),
    },
    "vllm.v1.kv_offload.tiering.base": {"JobResult": JobResult, "SecondaryTierManager": SecondaryTierManager},
}


@dataclasses.dataclass
class Group:
    tokens_per_block: int = 16
    layer_names: tuple[str, ...] = ("layer",)
    group_id: int = 0


@dataclasses.dataclass
class Cache:
    tokens_per_hash: int = 16
    blocks_per_chunk: int = 1


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, names in NAMES.items():
        made = types.ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)
    name = "ctxreuse_cloud.connectors.vllm_tier"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    del sys.modules[name]


class Tier:
    """A tier over eight chunks of memory."""

    def __init__(self, module: Any, store: Path, *, events: bool = False, **settings: str) -> None:
        ranks = dict.fromkeys(("rank", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
        config = types.SimpleNamespace(
            model=types.SimpleNamespace(name=settings.pop("model", "name"), dtype="bfloat16"), groups=[Group()],
            cache=Cache(), parallel=types.SimpleNamespace(**ranks), worker_kv_bytes_per_block=ROW,
            kv_cache_layout="BLHNC", canonical_layout=False,
        )  # fmt: skip
        self.memory = np.random.default_rng(1).integers(-128, 128, (8, ROW), np.int8)
        published = types.SimpleNamespace(enable_kv_cache_events=events)
        spec = types.SimpleNamespace(config=config, replicated_layout=False, kv_events_config=published)
        self.view = self.memory.data
        self.own = module.CtxReuseTier(spec, self.view, "CtxReuseTier", path=str(store), **settings)
        self.request = types.SimpleNamespace(req_id="r", kv_hints=None)
        self._jobs = 0

    def job(self, keys: list[bytes], *, load: bool = False, request: Any = None) -> Any:
        self._jobs += 1
        return types.SimpleNamespace(
            job_id=self._jobs, keys=keys, chunk_ids=np.arange(len(keys), dtype=np.int32), is_promotion=load,
            req_context=request or self.request,
        )  # fmt: skip

    def done(self) -> list[JobResult]:
        self.own.drain_jobs()
        return list(self.own.get_finished_jobs())

    def found(self, keys: list[bytes]) -> list[bool]:
        return [self.own.lookup(key, self.request).name == "HIT" for key in keys]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What a commit waits for."""
    from ctxreuse_cloud.connectors.values import ValueStore

    opened, save = threading.Event(), ValueStore.save

    def wait(self: ValueStore, values: Any) -> list[bool]:
        opened.wait()
        return save(self, values)

    monkeypatch.setattr(ValueStore, "save", wait)
    return opened


def test_jobs_are_done_behind_the_scheduler_and_reported_once(
    module: Any, tmp_path: Path, gate: threading.Event
) -> None:
    tier = Tier(module, tmp_path)
    tier.own.submit_store(tier.job(KEYS))
    assert tier.found(KEYS) == [False] * 8
    assert tier.own.get_finished_jobs() == []
    gate.set()
    (result,) = tier.done()
    assert (result.job_id, result.success, result.transfer_bytes) == (1, True, 8 * ROW)
    assert tier.own.get_finished_jobs() == []
    assert tier.found(KEYS) == [True] * 8
    before = tier.memory.copy()
    tier.memory[:] = 0
    tier.own.submit_load(tier.job(KEYS, load=True))
    assert [result.success for result in tier.done()] == [True]
    assert np.array_equal(tier.memory, before)
    assert tier.own.get_stats() == {"ctxreuse_vllm_tier_saved_chunks": 8, "ctxreuse_vllm_tier_loaded_chunks": 8}
    assert tier.own.get_stats() is None
    tier.own.shutdown()


def test_what_waits_to_be_stored_is_bounded(module: Any, tmp_path: Path, gate: threading.Event) -> None:
    tier = Tier(module, tmp_path)  # of eight, four may wait
    tier.own.submit_store(tier.job(KEYS[:3]))
    tier.own.submit_store(tier.job(KEYS[3:5]))  # over it
    tier.own.submit_store(tier.job(KEYS[5:6]))
    assert [(result.job_id, result.success) for result in tier.own.get_finished_jobs()] == [(2, False)]
    gate.set()
    assert [(result.job_id, result.success) for result in tier.done()] == [(1, True), (3, True)]
    tier.own.submit_store(tier.job(KEYS[3:]))  # alone, whatever its size
    assert [result.success for result in tier.done()] == [True]
    assert tier.found(KEYS) == [True] * 8
    assert tier.own.get_stats()["ctxreuse_vllm_tier_unsaved_chunks"] == 2
    tier.own.shutdown()


def test_a_chunk_that_failed_is_not_found_again_by_its_request(module: Any, tmp_path: Path) -> None:
    tier = Tier(module, tmp_path)
    tier.own.submit_store(tier.job(KEYS[:3]))
    tier.done()
    tier.own.on_new_request(tier.request)
    bad = tier.job(KEYS[:3], load=True)
    bad.keys = [KEYS[0], KEYS[7], KEYS[2]]  # evicted since its lookup
    tier.own.submit_load(bad)
    (result,) = tier.done()
    assert (result.success, result.successful_keys) == (False, [KEYS[0], KEYS[2]])
    tier.own.submit_store(tier.job(KEYS))
    tier.done()
    assert tier.found([KEYS[0], KEYS[7]]) == [True, False]
    tier.own.on_request_finished(tier.request)
    assert tier.found([KEYS[0], KEYS[7]]) == [True, True]
    # A load that ends after its request leaves nothing behind.
    tier.own.submit_load(tier.job([b"\xfe" * 36], load=True))
    assert [result.success for result in tier.done()] == [False]
    tier.own.on_new_request(tier.request)
    assert tier.found([KEYS[7]]) == [True]
    tier.own.shutdown()


def test_an_error_in_a_job_is_a_failed_one(module: Any, tmp_path: Path) -> None:
    tier = Tier(module, tmp_path)
    outside = tier.job(KEYS[:2])
    outside.chunk_ids = np.array([0, 99])
    tier.own.submit_store(outside)
    assert [result.success for result in tier.done()] == [False]
    tier.own.submit_store(tier.job(KEYS[:2]))
    assert [result.success for result in tier.done()] == [True]
    tier.own.shutdown()


def test_hashes_that_can_be_forged_are_neither_kept_nor_found(module: Any, tmp_path: Path) -> None:
    tier = Tier(module, tmp_path)
    short = [bytes([n]) * 16 + bytes(4) for n in range(2)]
    tier.own.submit_store(tier.job(short))
    assert [result.success for result in tier.own.get_finished_jobs()] == [False]
    assert tier.found(short) == [False, False]
    tier.own.shutdown()


def test_its_end_commits_what_waits_and_lets_the_memory_go(module: Any, tmp_path: Path, gate: threading.Event) -> None:
    tier = Tier(module, tmp_path)
    for key in KEYS[:4]:
        tier.own.submit_store(tier.job([key]))
    ending = threading.Thread(target=tier.own.shutdown)
    ending.start()
    gate.set()
    ending.join()
    tier.own.shutdown()
    tier.view.release()
    with open_store(tmp_path, readonly=True) as opened:
        assert opened.stats().blocks == 4


def test_what_a_touch_counts_is_evicted_last(module: Any, tmp_path: Path) -> None:
    tier = Tier(module, tmp_path, capacity="100KB")
    tier.own.submit_store(tier.job(KEYS))
    for n in range(40):
        tier.done()
        tier.own.touch(KEYS[:2], tier.request)
        tier.own.submit_store(tier.job([bytes([100 + n]) * 36]))
    tier.done()
    until(lambda: not all(tier.found(KEYS)))
    assert tier.found(KEYS)[:2] == [True, True]
    tier.own.shutdown()


def test_what_comes_and_goes_is_announced_if_vllm_publishes_events(module: Any, tmp_path: Path) -> None:
    tier = Tier(module, tmp_path / "quiet")
    tier.own.submit_store(tier.job(KEYS))
    tier.done()
    assert list(tier.own.take_events()) == []
    tier.own.shutdown()

    tier = Tier(module, tmp_path / "loud", events=True, capacity="100KB")
    stored, removed = set[bytes](), set[bytes]()
    for n in range(60):
        tier.own.submit_store(tier.job([bytes([n]) * 36]))
        tier.done()
        for event in tier.own.take_events():
            (removed if event.removed else stored).update(event.keys)
            assert (event.medium.name, event.locality.name, event.ownership) == ("STORAGE", "LOCAL", "CtxReuseTier")
    assert stored == {bytes([n]) * 36 for n in range(60)}
    until(lambda: not list(tier.own.take_events()))
    there = {key for key in stored if tier.found([key]) == [True]}
    assert 0 < len(there) < 30
    assert stored - removed == there
    tier.own.shutdown()


def test_a_request_with_hints_keeps_its_chunks_longer_or_lets_them_go(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def action(name: str, payload: dict[str, Any]) -> dict[str, Any]:
        return {"action_id": name, "action_type": name, "action_version": "1.0", "payload": payload}

    told: dict[int, set[bytes]] = {}
    monkeypatch.setattr(TieredStore, "on_pause", lambda _, keys, label: told.setdefault(label, set()).update(keys))
    retain = {"directives": [{"priority": 50, "start": 0, "end": 40}]}
    actions = [action("kv.retain", retain), action("kv.demote", {}), action("kv.none", {})]
    hints = {"protocol_version": "0.1", "message_id": "m", "actions": actions}
    places = {KEYS[0]: 16, KEYS[1]: 32, KEYS[2]: 48}
    request = types.SimpleNamespace(req_id="hinted", kv_hints=hints, get_offload_key_position=places.get)
    tier = Tier(module, tmp_path)
    tier.own.on_new_request(request)
    tier.own.on_new_request(tier.request)
    tier.own.lookup(KEYS[0], request)
    tier.own.submit_store(tier.job(KEYS[1:3], request=request))
    tier.own.submit_store(tier.job(KEYS[5:7]))
    tier.own.on_request_finished(request)
    tier.own.on_request_finished(tier.request)
    tier.done()
    retained, demoted = (told.pop(hint_label(name)) for name in ("retain", "demote"))
    assert not told
    assert (len(retained), len(demoted)) == (2, 3), "the third chunk reaches beyond the 40 tokens"
    assert retained < demoted
    tier.own.shutdown()


def test_settings_and_models_that_are_none_are_refused(module: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"secondary tier CtxReuseTier has no setting 'pth'"):
        Tier(module, tmp_path, pth="x")
    with pytest.raises(ConfigError, match="names no model"):
        Tier(module, tmp_path, model="")
    with pytest.raises(ConfigError, match=r"holds no \*.safetensors"):
        Tier(module, tmp_path, model=str(tmp_path))
    assert set(module.CtxReuseTier.build_metric_definitions({})) >= {"ctxreuse_vllm_tier_failed_chunks"}
