"""An edge lets a cloud's larger model answer, over real sockets, and goes on by itself whatever dies."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.cluster import DOCUMENTS, Cluster, Node, body
from support.tiny_text import save_model
from support.waiting import patient, until

pytestmark = pytest.mark.daemon

DOCUMENT = DOCUMENTS[0][:400]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The edge's own model: other weights, the same tokenizer."""
    return save_model(tmp_path_factory.mktemp("models") / "edge", seed=5, positions=4096)


def edge_of(cluster: Cluster, small: Path, name: str = "a", **settings: Any) -> Node:
    """An edge that lets the cloud answer, and whose link is up."""
    made = cluster.edge(name, engine__model=str(small), edge__verify="auto", **settings).start().ready()
    until(lambda: made.link()["state"] == "up")
    return made


def answered(node: Node, document: str = DOCUMENT, tokens: int = 64, **more: Any) -> tuple[str, dict[str, Any]]:
    """The text of an answer, and its usage."""
    found = httpx.post(
        node.url + "/v1/chat/completions", json=body(document, tokens=tokens, **more), timeout=patient(120)
    )
    assert found.status_code == 200, found.text
    said = found.json()
    return said["choices"][0]["message"]["content"], said["usage"]


def streamed(url: str, tokens: int, kill: Any, after: int) -> tuple[str, dict[str, Any]]:
    """The text of a streamed answer and its usage; ``kill`` is called after so many pieces."""
    asked = body(DOCUMENT, tokens=tokens, stream=True, stream_options={"include_usage": True})
    text, usage, count = "", {}, 0
    with httpx.stream("POST", url + "/v1/chat/completions", json=asked, timeout=patient(120)) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            count += 1
            if count == after:
                kill()
    return text, usage


def alone(cluster: Cluster, model: Path, name: str) -> Node:
    """A daemon that runs this model without any cloud."""
    node = cluster.edge(name, endpoint="tcp://127.0.0.1:9", engine__model=str(model))
    return node.start().ready()


def test_what_the_client_reads_is_the_clouds_answer(cluster: Cluster, model: Path, small: Path) -> None:
    cloud = cluster.cloud(workers=1)
    edge, large = edge_of(cluster, small), alone(cluster, model, "large")
    for more in ({}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}):
        expected, _ = answered(large, **more)
        for turn in range(3):  # the second and third are drafted from the first
            text, usage = answered(edge, **more)
            assert text == expected
            details = usage["completion_tokens_details"]
            assert (details["cloud_tokens"], details["verification"]) == (64, "cloud")
            assert usage["prompt_tokens_details"]["sources"]["cloud"] >= (turn > 0) * 384
    assert details["accepted_prediction_tokens"] > 0
    own, usage = answered(edge, ctxreuse={"verify": "off"})
    assert own == answered(alone(cluster, small, "small"))[0]
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0, "seconds_saved": 0.0,
        "cloud_tokens": 0, "verification": "off",
    }  # fmt: skip
    assert cloud.status()["transfers"]["verified"] == 6
