"""Opaque values go to a real store and come back whole, apart by model, shape and tenant; damaged ones are misses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ctxreuse_cloud.connectors.access import DOOR_OPTIONS, open_door, read_options
from ctxreuse_cloud.connectors.values import Value, ValueSpace, ValueStore

from ctxreuse.block.format import BlockWriter, Plane, layout_of
from ctxreuse.errors import ConfigError
from ctxreuse.identity.keys import ROOT
from ctxreuse.store import open_store
from support.waiting import patient

SPACE = ValueSpace("test", ("model", 0))


def payload(seed: int, nbytes: int = 50_000) -> memoryview:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).data


def value(seed: int, shape: str = "[2, 5] bfloat16", tenant: str = "", space: ValueSpace = SPACE) -> Value:
    return space.value(b"%d" % seed, shape, 64, tenant)


def opened(folder: Path, **options: str) -> ValueStore:
    access, _ = open_door(read_options({"path": str(folder), **options}, DOOR_OPTIONS, "test"))
    return ValueStore(access, writes=True)


@pytest.fixture
def values(tmp_path: Path) -> Iterator[ValueStore]:
    found = opened(tmp_path, capacity="64MB")
    yield found
    found.close()


def loaded(values: ValueStore, which: Value, nbytes: int = 50_000) -> bytes | None:
    into = bytearray(nbytes)
    if values.load(which, [memoryview(into)]):
        return bytes(into)
    assert not any(into)
    return None


def test_values_come_back_in_parts_of_other_sizes(values: ValueStore) -> None:
    data = payload(1)
    assert values.save([(value(1), [data[:10_000], data[10_000:]]), (value(2), [payload(2)])]) == [True, True]
    assert values.save([(value(1), [payload(9)])]) == [True]  # stored before: a hash names one content
    assert loaded(values, value(1)) == bytes(data)
    parts = [bytearray(1), bytearray(49_999)]
    assert values.load(value(1), [memoryview(part) for part in parts])
    assert b"".join(parts) == bytes(data)
    assert values.find([value(n).key for n in (1, 2, 3)]) == [True, True, False]
    values.drop([value(1).key], "forgotten")
    assert values.find([value(1).key, value(2).key]) == [False, True]


@pytest.mark.parametrize(
    "other",
    [
        value(1, tenant="a"),
        value(1, space=ValueSpace("test", ("other", 0))),
        value(1, space=ValueSpace("test", ("model", 1))),
        value(1, space=ValueSpace("test", ("model0",))),
        value(1, space=ValueSpace("other", ("model", 0))),
        ValueSpace("test", ("model", 0), b"secret").value(b"1", "[2, 5] bfloat16", 64),
    ],
)
def test_another_tenant_model_rank_or_door_misses(values: ValueStore, other: Value) -> None:
    values.save([(value(1), [payload(1)])])
    assert values.find([other.key]) == [False]
    assert loaded(values, other) is None
    assert loaded(values, value(1)) == bytes(payload(1))


def test_a_value_shorter_than_its_memory_is_loaded_only_if_that_is_expected(values: ValueStore) -> None:
    data = payload(1)
    values.save([(value(1), [data])])
    into = [bytearray(30_000), bytearray(30_000), bytearray(5)]
    parts = [memoryview(part) for part in into]
    assert values.load(value(1), parts) == 0
    assert not any(map(any, into))
    assert values.load(value(1), parts, shorter=True) == 50_000
    assert b"".join(into) == bytes(data) + bytes(10_005)
    assert values.load(value(1), parts[:1], shorter=True) == 0


def test_bytes_of_another_type_miss_and_make_room_for_the_new_ones(values: ValueStore) -> None:
    values.save([(value(1), [payload(1)])])
    new = value(1, shape="[2, 5] float16")
    assert loaded(values, value(1), 49_999) is None
    assert loaded(values, new) is None
    assert values.save([(new, [payload(2)])]) == [True]
    assert loaded(values, new) == bytes(payload(2))


def test_a_damaged_value_is_a_miss_and_can_be_stored_again(tmp_path: Path) -> None:
    values = opened(tmp_path)
    values.save([(value(n), [payload(n)]) for n in (1, 2)])
    values.close()
    file = tmp_path / "blocks" / "data.mdb"
    data = bytearray(file.read_bytes())
    at = data.index(bytes(payload(1)[:64]))
    data[at + 20_000] ^= 1
    file.write_bytes(data)
    values = opened(tmp_path)
    assert loaded(values, value(1)) is None
    assert values.find([value(1).key, value(2).key]) == [False, True]
    assert loaded(values, value(2)) == bytes(payload(2))
    assert values.save([(value(1), [payload(1)])]) == [True]
    assert loaded(values, value(1)) == bytes(payload(1))
    values.close()


def test_a_block_that_is_no_value_is_a_miss_and_leaves(tmp_path: Path) -> None:
    which = value(1)
    writer = BlockWriter(
        layout_of((Plane(0, "k", "uint8", (50_000,)),)),
        kind="block", space=which.space, key=which.key, parent=ROOT, end=len(which.ids), tokens=which.ids,
    )  # fmt: skip
    with open_store(tmp_path) as store:
        assert store.put(which.key, writer.seal())
    values = opened(tmp_path)
    assert values.find([which.key]) == [True]
    assert loaded(values, which) is None
    assert values.save([(which, [payload(1)])]) == [True]
    assert loaded(values, which) == bytes(payload(1))
    values.close()


def test_what_was_stored_outlives_a_kill(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, __file__, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "stored\n"
    beside = opened(tmp_path)  # another process writes
    assert loaded(beside, value(7)) == bytes(payload(7))
    assert beside.save([(value(8), [payload(8)])]) == [False]
    beside.close()
    child.send_signal(signal.SIGKILL)
    child.wait(patient(10))
    child.stdout.close()
    values = opened(tmp_path)
    assert loaded(values, value(7)) == bytes(payload(7))
    assert values.save([(value(8), [payload(8)])]) == [True]
    values.close()


def test_a_full_store_evicts_and_keeps_its_size(tmp_path: Path) -> None:
    values = opened(tmp_path, capacity="4MB")
    for n in range(20):
        values.save([(value(n), [payload(n, 500_000)])])
        assert values.find([value(0).key]) == [True]  # used each time
    found = values.find([value(n).key for n in range(20)])
    assert found[0]
    assert 3 <= sum(found) < 9
    assert loaded(values, value(0), 500_000) == bytes(payload(0, 500_000))
    values.close()


def test_a_store_that_cannot_be_opened_misses(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    values = opened(tmp_path / "file")
    assert values.save([(value(1), [payload(1)])]) == [False]
    assert values.find([value(1).key]) == [False]
    assert loaded(values, value(1)) is None
    values.close()


def test_settings_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter_params has no setting 'pth'.*It has path, capacity, secret_file"):
        read_options({"pth": "x"}, DOOR_OPTIONS, "adapter_params")
    with pytest.raises(ConfigError, match="secret of tenants cannot be read"):
        open_door({**DOOR_OPTIONS, "path": str(tmp_path), "secret_file": str(tmp_path / "none")})


if __name__ == "__main__":
    store = opened(Path(sys.argv[1]))
    assert store.save([(value(7), [payload(7)])]) == [True]
    print("stored", flush=True)
    signal.pause()
