"""Processes share a context at lossy levels: only who allows it gets any, and the card comes over the link."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ctxreuse.block.format import parse
from ctxreuse.codec import ProfileStore, write_profile
from ctxreuse.engines import open_engine
from ctxreuse.identity.keys import ROOT, prefix_keys
from ctxreuse.testing.profiles import plain_profile
from support.cluster import DOCUMENTS, Cluster, body
from support.waiting import patient, until

pytestmark = pytest.mark.daemon


@pytest.fixture(scope="module")
def card(model: Path) -> bytes:
    engine = open_engine(str(model), threads=1)
    ids = np.random.default_rng(0).integers(0, 256, 1024).astype("<i4")
    context = engine.new_context(len(ids))
    engine.prefill(context, ids)
    keys = prefix_keys(engine.space.digest, bytes(16), ids, engine.space.block_tokens)
    views = [parse(data) for data in engine.export(context, keys, ROOT, 0)]
    return write_profile(plain_profile(engine.space, views, theta=lambda _: 10000.0, joint=True))


def ask(node: Any, document: str, lossy: str | None = None) -> tuple[str, Any]:
    more = {} if lossy is None else {"ctxreuse": {"lossy": lossy}}
    answer = httpx.post(node.url + "/v1/chat/completions", json=body(document, **more), timeout=patient(120))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens_details"]


def test_who_allows_a_level_gets_it_and_who_does_not_gets_exact_blocks(
    cluster: Cluster, card: bytes, tmp_path: Path
) -> None:
    ProfileStore(tmp_path / "cloud-cards").add(card)
    cloud = cluster.cloud()
    a = cluster.edge("a").start().ready()
    text, details = ask(a, DOCUMENTS[2])
    assert not details["approx"]
    relay = cluster.relay(rate=20e6 / 8)
    b = cluster.edge("b", endpoint=relay.endpoint, edge__lossy="kl-0.05", edge__sync=False)
    c = cluster.edge("c", endpoint=relay.endpoint, edge__sync=False)
    b.start().ready()
    c.start().ready()
    until(lambda: cloud.blocks() >= 29)
    until(lambda: list((tmp_path / "b-cards").glob("*/*.card")))
    assert os.path.getsize(next((tmp_path / "b-cards").glob("*/*.card"))) == len(card)
    for edge in (b, c):
        until(lambda edge=edge: (edge.link()["announced"] or 0) >= 29)  # type: ignore[misc]
    _, details = ask(b, DOCUMENTS[2])
    assert details["approx"]
    assert details["sources"]["cloud"] > 0
    assert sum(count for name, count in details["levels"].items() if name.startswith("kl-0.0")) > 0
    sent = cloud.status()["levels"]
    assert any(name.startswith("kl-") for name in sent)
    # Whoever allows nothing gets the very same answer as the device that computed.
    exact, details = ask(c, DOCUMENTS[2])
    assert exact == text
    assert not details["approx"]
    assert set(details["levels"]) <= {"exact", "exact+rans"}
    # One request may allow less than the daemon does: what is here lossily is not used for it.
    exact, details = ask(b, DOCUMENTS[2], lossy="")
    assert (exact, details["approx"]) == (text, False)
    refused = httpx.post(
        b.url + "/v1/chat/completions", json=body("x", ctxreuse={"lossy": "rather good"}), timeout=patient(60)
    )
    assert refused.status_code == 400
    assert "lossy" in refused.text
    metrics = httpx.get(b.url + "/metrics", timeout=patient(60)).text
    assert 'ctxreuse_calibration_profiles_total{what="taken"} 1.0' in metrics
    assert 'ctxreuse_reused_tokens_total{level="lossy"}' in metrics
