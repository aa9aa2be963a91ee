"""What the node of a cloud does with its idle time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from ctxreuse_cloud.node import CloudNode

from ctxreuse.config import BusConfig, CloudConfig, Settings
from support.freed_memory import freed_memory
from support.waiting import until


@pytest.mark.parametrize("running", [0, 1])
def test_freed_memory_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: int) -> None:
    monkeypatch.setattr("ctxreuse_cloud.proxy.proxy.Proxy.running", running)
    monkeypatch.setattr("ctxreuse_cloud.node._IDLE", 0.05)
    monkeypatch.setattr("ctxreuse_cloud.node._TRIM", 0.0)
    cloud = CloudConfig(store=str(tmp_path / "store"), prefill_workers=0)
    settings = Settings(cloud=cloud, bus=BusConfig(bind="tcp://127.0.0.1:0"))

    async def serve() -> None:
        async with CloudNode(settings).opened():
            with freed_memory() as returned:
                await asyncio.to_thread(until, lambda: returned() > 60 << 20)

    asyncio.run(serve())
