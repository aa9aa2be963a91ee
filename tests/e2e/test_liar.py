"""Devices whose keys are valid and whose blocks are not to be used, as processes over real sockets."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxreuse.bus.protocol.base import PutRequest
from ctxreuse.engines import open_engine
from ctxreuse.identity.keys import prefix_keys
from ctxreuse.peer.serve.engine import compute_blocks
from support.cluster import DOCUMENTS, Cluster
from support.lies import forged, lies
from support.waiting import patient, until

pytestmark = pytest.mark.daemon

BLOCKS = 29  # whole blocks of a document


def put(link: Any, engine: Any, seed: int, lie: Any = None) -> list[bytes]:
    """Give a context of six blocks, some of which may be lies; its keys."""
    until(lambda: link.state == "up")
    ids = np.random.default_rng(seed).integers(3, 250, 6 * 64).astype("<i4")
    blocks = [made.data for made in compute_blocks(engine, link.welcome.salt, ids, 0)]
    if lie is not None:
        blocks = [forged(data, lie, number) for number, data in enumerate(blocks)]
    keys = prefix_keys(engine.space.digest, link.welcome.salt, ids, 64)
    request = PutRequest(engine.space.digest, keys, [data.nbytes for data in blocks])
    assert len(link.put(request, blocks.__getitem__, timeout=patient(30)).taken) == 6
    return keys


def test_a_cloud_with_workers_catches_a_liar_and_nobody_gets_what_it_gave(cluster: Cluster, model: Path) -> None:
    engine = open_engine(str(model))
    space = engine.space.digest
    cloud = cluster.cloud(workers=1)
    until(lambda: cloud.status()["workers"]["spaces"], 120)

    def found(link: Any, keys: list[bytes]) -> int:
        match = link.match(space, keys, patient(20))
        return match.blocks if match is not None else -1

    liar, other = cluster.link("liar", space), cluster.link("other", space)
    try:
        before = put(liar, engine, 0)
        until(lambda: found(other, before) == 6)  # sound, as far as anybody can tell
        told = put(liar, engine, 1, lies(len(engine.space.layers), 6, 64, 0)["V of a deep layer x1.5"])
        until(lambda: cloud.status()["transfers"].get("audit:false"))
        assert (found(other, told), found(other, before)) == (0, 0)
        until(lambda: {key[:8] for key in before} <= other.withdrawn)
        mine = put(other, engine, 2)
        until(lambda: found(other, mine) == 6)
        assert cloud.said("peer liar is quarantined")
    finally:
        liar.close()
        other.close()


def test_what_a_revoked_device_gave_is_gone_over_a_restart(cluster: Cluster) -> None:
    cloud = cluster.cloud()
    a, b = cluster.edge("a").start(), cluster.edge("b").start()
    a.ready(), b.ready()
    until(lambda: a.link()["state"] == b.link()["state"] == "up")
    text, _ = a.ask(DOCUMENTS[0])
    until(lambda: (b.link()["announced"] or 0) >= BLOCKS)
    fetched = b.ask(DOCUMENTS[0])[1]["cloud"] // 64
    assert fetched >= 1
    until(lambda: b.blocks() >= BLOCKS)

    cluster.revoke("a")
    until(lambda: a.link()["state"] == "refused")
    until(lambda: cloud.blocks() == 0)
    until(lambda: b.said(f"{fetched} fetched blocks are dropped"))
    own = BLOCKS + 1 - fetched  # at most what b computed before the blocks that came met it, which it may give again
    assert b.blocks() <= own
    cloud.end(signal.SIGKILL)
    cloud.start().ready()
    c = cluster.edge("c").start().ready()
    until(lambda: c.link()["state"] == "up")
    again, sources = c.ask(DOCUMENTS[0])
    assert again == text
    assert sources["cloud"] // 64 <= own
    assert b.ask(DOCUMENTS[0])[0] == text
