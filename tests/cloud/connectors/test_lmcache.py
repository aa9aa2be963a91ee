"""Our adapter and serde for LMCache on a real store, with LMCache's names played after the classes of its wheel.

`tests/connectors/test_lmcache.py` has LMCache itself.
"""

from __future__ import annotations

import abc
import enum
import importlib
import os
import select
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ctxreuse.errors import ConfigError, FormatError
from support.chunks_of_kv import LAYERS, MODEL, chunk_of, keep_profile, kv, shape_of
from support.waiting import patient, until


class L2AdapterInterface:
    def __init__(self) -> None: ...


class Serializer(abc.ABC):
    @abc.abstractmethod
    def serialize(self, src: Any, dst: Any, key: Any) -> int: ...

    @abc.abstractmethod
    def estimate_serialized_size(self, layout_desc: Any) -> int: ...


class Deserializer(abc.ABC):
    @abc.abstractmethod
    def deserialize(self, src: Any, dst: Any, key: Any) -> None: ...


class AsyncSerdeProcessor:
    def __init__(self, serializer: Serializer, deserializer: Deserializer, max_workers: int = 1) -> None:
        self.serializer, self.deserializer, self.max_workers = serializer, deserializer, max_workers


class Bitmap:
    def __init__(self, size: int) -> None:
        self.marks = [False] * size

    def set(self, i: int) -> None:
        self.marks[i] = True


class Notifier:
    def __init__(self) -> None:
        self._ends = os.pipe()

    def fileno(self) -> int:
        return self._ends[0]

    def notify(self) -> None:
        os.write(self._ends[1], b"x")

    def close(self) -> None:
        for end in self._ends:
            os.close(end)


class Format(enum.Enum):
    KV_2LTD = 1

    def token_dim(self) -> int:
        return 2


class Memory:
    """LMCache's MemoryObj: bytes with a shape, of which a serde may have used fewer."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, data: npt.NDArray[np.uint8] | None = None) -> None:
        self.raw = np.zeros(torch.Size(shape).numel() * dtype.itemsize, np.uint8) if data is None else data
        self.metadata = types.SimpleNamespace(
            shape=torch.Size(shape), dtype=dtype, shapes=[torch.Size(shape)], dtypes=[dtype], fmt=Format.KV_2LTD
        )
        self.used = self.raw.nbytes

    @property
    def byte_array(self) -> memoryview:
        return self.raw[: self.used].data

    def get_shapes(self) -> list[torch.Size]:
        return list(self.metadata.shapes)

    def get_dtypes(self) -> list[torch.dtype]:
        return list(self.metadata.dtypes)

    def set_used_size(self, n: int) -> None:
        assert 0 <= n <= self.raw.nbytes
        self.used = n


class Key(types.SimpleNamespace):
    def __init__(self, name: bytes, salt: str = "") -> None:
        super().__init__(chunk_hash=name, model_name="m", kv_rank=1, object_group_id=0, cache_salt=salt)


Registry = dict[str, Callable[[dict[str, object]], AsyncSerdeProcessor]]


@pytest.fixture
def registered() -> Registry:
    return {}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, registered: Registry) -> Iterator[Any]:
    names: dict[str, dict[str, Any]] = {
        "lmcache": {},
        "lmcache.lmcache_native": {"Bitmap": Bitmap},
        "lmcache.v1.distributed.internal_api": {"L2StoreResult": lambda good, nbytes: (good, nbytes)},
        "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": L2AdapterInterface},
        "lmcache.v1.distributed.serde": {
            "AsyncSerdeProcessor": AsyncSerdeProcessor, "Serializer": Serializer, "Deserializer": Deserializer,
            "register_serde_factory": registered.__setitem__,
        },
        "lmcache.v1.platform": {"create_event_notifier": Notifier},
    }  # fmt: skip
    for name, found in names.items():
        made = types.ModuleType(name)
        vars(made).update(found)
        monkeypatch.setitem(sys.modules, name, made)
    ours = [f"ctxreuse_cloud.connectors.{name}" for name in ("lmcache_serde", "lmcache")]
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(ours[-1])
    for name in ours:
        del sys.modules[name]


@pytest.fixture
def adapter(module: Any, tmp_path: Path) -> Iterator[Any]:
    made = module.CtxReuseL2Adapter({"path": str(tmp_path / "store"), "capacity": "64MB"})
    yield made
    made.close()


@pytest.fixture
def serde(module: Any, registered: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncSerdeProcessor:
    assert module
    monkeypatch.setenv("CTXREUSE_CARDS", str(tmp_path / "profiles"))
    keep_profile(tmp_path / "profiles")
    return registered["ctxreuse"]({"model": MODEL, "level": "kl-0.01", "max_workers": 2})


def done(fd: int, result: Callable[[], Any]) -> Any:
    """The result of a task of the adapter, once its notifier says that there is one."""
    readable, _, _ = select.select([fd], [], [], patient(20))
    assert readable
    os.read(fd, 1)
    return result()


def stored(adapter: Any, *pairs: tuple[Key, Memory]) -> Any:
    task = adapter.submit_store_task([key for key, _ in pairs], [each for _, each in pairs])
    return done(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)[task]


def loaded(adapter: Any, *pairs: tuple[Key, Memory]) -> list[bool]:
    task = adapter.submit_load_task([key for key, _ in pairs], [each for _, each in pairs])
    marks: list[bool] = done(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task)).marks
    return marks


def layout(each: Memory) -> Any:
    return types.SimpleNamespace(shapes=each.get_shapes(), dtypes=each.get_dtypes())


def buffer(serde: AsyncSerdeProcessor, each: Memory) -> Memory:
    """The memory that LMCache has a chunk serialised to, or loaded to."""
    return Memory((serde.serializer.estimate_serialized_size(layout(each)),), torch.uint8)


def kv_memory(position: int, *, tokens: int = 64) -> Memory:
    return Memory(shape_of(1, tokens), torch.bfloat16, chunk_of(kv(position, tokens), "bfloat16", page=32))


def test_what_is_stored_is_found_and_loaded_and_apart_by_salt_and_shape(adapter: Any) -> None:
    chunk = kv_memory(0)
    assert stored(adapter, (Key(b"1"), chunk)) == (True, chunk.raw.nbytes)
    task = adapter.submit_lookup_and_lock_task([Key(b"1"), Key(b"1", "salt"), Key(b"2")], {})
    found = done(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
    assert found.marks == [True, False, False]
    into, other = Memory(shape_of(1, 64), torch.bfloat16), Memory(shape_of(2, 64), torch.bfloat16)
    assert loaded(adapter, (Key(b"1"), into), (Key(b"1"), other), (Key(b"2"), other)) == [True, False, False]
    np.testing.assert_array_equal(into.raw, chunk.raw)
    assert not other.raw.any()
    assert adapter.report_status()["loaded"] == 1
    stored(adapter, (Key(b"2"), chunk))
    adapter.delete([Key(b"2")])
    until(lambda: loaded(adapter, (Key(b"2"), into)) == [False])  # the store's writer removes it


def test_coded_chunks_go_through_the_store_in_as_many_bytes_as_they_need(
    adapter: Any, serde: AsyncSerdeProcessor
) -> None:
    chunks = [(Key(b"%d" % i), kv_memory(64 * i)) for i in range(3)]
    coded = []
    for key, chunk in chunks:
        each = buffer(serde, chunk)
        each.set_used_size(serde.serializer.serialize(chunk, each, key))
        coded.append((key, each))
    assert stored(adapter, *coded) == (True, sum(each.used for _, each in coded))
    assert sum(each.used for _, each in coded) < 0.6 * sum(chunk.raw.nbytes for _, chunk in chunks)
    for key, chunk in chunks:
        came, back = buffer(serde, chunk), Memory(shape_of(1, 64), torch.bfloat16)
        assert loaded(adapter, (key, came)) == [True]
        assert came.used < came.raw.nbytes
        serde.deserializer.deserialize(came, back, key)
        before, after = (torch.from_numpy(each.raw).view(torch.bfloat16).float() for each in (chunk, back))
        assert 0 < float((before - after).norm() / before.norm()) < 0.1
    came, back = buffer(serde, chunks[0][1]), Memory(shape_of(1, 64), torch.bfloat16)
    assert loaded(adapter, (chunks[0][0], came)) == [True]
    with pytest.raises(FormatError, match="another chunk"):
        serde.deserializer.deserialize(came, back, chunks[1][0])
    assert not back.raw.any()


def test_a_shorter_value_is_a_miss_where_kv_is_expected(adapter: Any, serde: AsyncSerdeProcessor) -> None:
    """The serde of an adapter was taken away, or added, over the same store."""
    chunk = kv_memory(0)
    coded = buffer(serde, chunk)
    coded.set_used_size(serde.serializer.serialize(chunk, coded, Key(b"1")))
    stored(adapter, (Key(b"1"), coded), (Key(b"2"), chunk))
    into = Memory(shape_of(1, 64), torch.bfloat16)
    assert loaded(adapter, (Key(b"1"), into), (Key(b"2"), buffer(serde, chunk))) == [False, False]
    assert not into.raw.any()


def test_objects_of_several_parts_or_strange_types_are_kept_without_loss(serde: AsyncSerdeProcessor) -> None:
    parts = kv_memory(0)
    parts.metadata.shapes = [torch.Size((1, LAYERS, 32, 128)), torch.Size((1, LAYERS, 64, 128))]
    parts.metadata.dtypes = [torch.bfloat16, torch.float8_e4m3fn]
    parts.used = sum(s.numel() * t.itemsize for s, t in zip(parts.get_shapes(), parts.get_dtypes()))
    eighths = Memory(
        (1, LAYERS, 64, 128), torch.float8_e4m3fn, np.arange(LAYERS * 64 * 128, dtype=np.int64).astype("u1")
    )
    for each in (parts, eighths):
        coded, back = buffer(serde, each), Memory((each.used,), torch.uint8)
        coded.set_used_size(serde.serializer.serialize(each, coded, Key(b"1")))
        back.metadata.shapes, back.metadata.dtypes = each.get_shapes(), each.get_dtypes()
        serde.deserializer.deserialize(coded, back, Key(b"1"))
        np.testing.assert_array_equal(back.raw, np.frombuffer(each.byte_array, np.uint8))


def test_settings_reach_the_codec_and_wrong_ones_are_refused(registered: Registry, serde: AsyncSerdeProcessor) -> None:
    assert serde.max_workers == 2
    for settings, message in (
        ({"mdel": "x"}, "serde has no setting 'mdel'"), ({"model": "another"}, "no calibration profile of 'another'"),
        ({}, "needs the profile of a model"), ({"level": "exact+rans", "max_workers": 0}, "Choose 1 to 256 threads"),
        ({"level": "exact+rans", "max_workers": "many"}, "max_workers is 'many'"),
        ({"model": MODEL, "level": "kl-9"}, "no such level"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            registered["ctxreuse"](dict(settings))
    assert registered["ctxreuse"]({"level": "exact+rans"}).max_workers == 1
