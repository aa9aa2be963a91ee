"""A connector's store is served to devices: requests find what they put, and they find what the engine saved."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import numpy as np
import pytest
from ctxreuse_cloud.connectors.access import StoreAccess
from ctxreuse_cloud.connectors.requests import RequestBlocks, StepProgress
from ctxreuse_cloud.connectors.sharing import Sharing, blocks_of_page, read_sharing
from ctxreuse_cloud.connectors.transfers import PageSaver

from ctxreuse.bus.transport import BusClient
from ctxreuse.config import StoreConfig
from ctxreuse.errors import ConfigError
from ctxreuse.identity.keys import prefix_keys
from ctxreuse.peer.sync.sync import Sync
from support.paged import PagedEngine
from support.waiting import until

TOKENS = np.arange(160, dtype=np.int32)
NONE = {"share_with": "", "tenant": "", "max_kl": "", "bus": "", "bus_key": "", "bus_allow": "", "secret_file": ""}


def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("tokens", [16, 32, 96])
def test_pages_that_hold_no_whole_blocks_are_refused(tokens: int) -> None:
    assert blocks_of_page(64, 64) == 1
    assert blocks_of_page(128, 64) == 2
    with pytest.raises(ConfigError, match="--block-size 64 or 128"):
        blocks_of_page(tokens, 64)


def test_settings_say_what_is_wrong(tmp_path: Path) -> None:
    assert read_sharing(NONE, saves=True) is None
    assert read_sharing(NONE | {"share_with": "torch"}, saves=True) is not None
    for given, reason in (
        ({"bus": "tcp://127.0.0.1:7353"}, 'no use without "share_with"'),
        ({"share_with": "llama.cpp"}, "cannot be shared with 'llama.cpp'"),
        ({"share_with": "torch", "bus": "tcp://127.0.0.1:1", "secret_file": "s"}, "its own secret"),
        ({"share_with": "torch", "bus_key": "key"}, '"bus_key" without "bus"'),
        ({"share_with": "torch", "max_kl": "much"}, "max_kl is 'much'"),
        ({"share_with": "torch", "max_kl": "-1"}, "max_kl is -1"),
        ({"share_with": "torch", "max_kl": "0.05"}, "cannot save"),
    ):
        with pytest.raises(ConfigError, match=reason):
            read_sharing(NONE | given, saves=True)
    lossy = read_sharing(NONE | {"share_with": "torch", "max_kl": "0.05"}, saves=False)
    assert lossy is not None
    assert lossy.max_kl == 0.05
    with pytest.raises(ConfigError, match="only an engine that saves"):
        read_sharing(NONE | {"share_with": "torch", "bus": "tcp://127.0.0.1:7353"}, saves=False)
    for bus, reason in (("tcp://0.0.0.0:7353", "plain TCP beyond this machine"), ("nonsense", "tcp://")):
        sharing = read_sharing(NONE | {"share_with": "torch", "bus": bus}, saves=True)
        assert sharing is not None
        with pytest.raises(ConfigError, match=reason):
            sharing.server(StoreConfig(path=str(tmp_path)))


def served(folder: Path, bus: str) -> tuple[StoreAccess, Sharing]:
    sharing = read_sharing(NONE | {"share_with": "torch", "bus": bus}, saves=True)
    assert sharing is not None
    access = StoreAccess(StoreConfig(path=str(folder), capacity=64 << 20))
    access.serve = sharing.server(access.config)
    assert access.writing() is not None
    return access, sharing


@pytest.mark.daemon
def test_a_device_and_an_engine_find_what_the_other_stored(tmp_path: Path) -> None:
    bus, engine = address(), PagedEngine()
    access, sharing = served(tmp_path / "engine", bus)
    device = StoreAccess(StoreConfig(path=str(tmp_path / "device"), capacity=64 << 20))
    with BusClient(bus) as link:
        until(lambda: link.state == "up")
        assert link.welcome is not None
        save(device, engine, [engine.run(TOKENS, [1, 2, 3, 4, 5], "default")])
        store, found = device.reading(), access.reading()
        assert store is not None
        assert found is not None
        sync = Sync(store, [link])
        assert sync.sync_now().links[0].sent_blocks == 5
        sync.close()
        planned = RequestBlocks(engine.space.digest, 32, sharing.secret(access.config))

        def stored(keys: list[bytes]) -> int:
            return found.match(keys).blocks

        assert planned.match("a", [*TOKENS, 1], "local", 0, stored) == 160  # type: ignore[arg-type]
        assert planned.match("b", [*TOKENS, 1], "another", 0, stored) == 0  # type: ignore[arg-type]
        for request, tenant in (("c", "local"), ("d", "another")):
            planned.match(request, TOKENS + 1000, tenant, 0, stored)  # type: ignore[arg-type]
            save(access, engine, planned.step([StepProgress(request, 160, [6, 7, 8, 9, 10])]).saves)
        keys = prefix_keys(engine.space.digest, link.welcome.salt, TOKENS + 1000, 32)
        until(lambda: link.announced(keys) == 5)
        assert found.stats().blocks == 15
        assert (match := link.match(engine.space.digest, keys, 20.0)) is not None
        assert match.blocks == 5
    device.close()
    access.close()
    with socket.socket() as free:
        assert free.connect_ex(("127.0.0.1", int(bus.rpartition(":")[2]))) != 0, "a closed store is not served"


def save(access: StoreAccess, engine: PagedEngine, runs: list) -> None:  # type: ignore[type-arg]
    saver = PageSaver(access, engine.space, engine.pages, 8 << 20)
    saver.save(runs)
    saver.close()
    store = access.writing()
    assert store is not None
    store.flush()


def test_a_taken_port_costs_the_devices_not_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with caplog.at_level(logging.ERROR):
            access, _ = served(tmp_path, f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        assert "devices are not served" in caplog.text
        engine = PagedEngine()
        save(access, engine, [engine.run(TOKENS, [1, 2, 3, 4, 5])])
        store = access.reading()
        assert store is not None
        assert store.stats().blocks == 5
        access.close()
