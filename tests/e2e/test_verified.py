"""An edge lets a cloud's larger model answer, over real sockets, and goes on by itself whatever is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ctxreuse.codec import model_digest
from ctxreuse.engines import open_engine
from ctxreuse.engines.generate import AnswerDecoder
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.text import Message
from ctxreuse.judge import Judged, JudgeProfile, JudgeProfileStore
from ctxreuse.runtime import Runtime
from support.cluster import DOCUMENTS, Cluster, Node, body
from support.tiny_text import save_model
from support.waiting import patient, until

pytestmark = pytest.mark.daemon

DOCUMENT, LONG = DOCUMENTS[0][:400], 300


class Nodes:
    """A cloud, an edge with a model of its own, and what both models say alone, in float32, in this process."""

    def __init__(self, folder: Path, model: Path) -> None:
        small = save_model(folder / "small", seed=5, positions=4096)
        self.cluster = Cluster(folder, model)
        self.cloud = self.cluster.cloud(workers=1)
        self.edge = self.cluster.edge("a", engine__model=str(small), edge__verify="auto").start()
        self.large, self.small = (Runtime(open_engine(str(one), threads=1), None) for one in (model, small))
        self.edge.ready()
        self.up(1)
        text = self.large.text
        assert text is not None
        asked = body(DOCUMENT)["messages"]
        prompt = text.render([Message(one["role"], one["content"]) for one in asked], generate=True)
        self.text, self.prompt = text, text.encode(prompt)

    def up(self, times: int) -> None:
        """The link is up, to a cloud whose engine is."""
        until(lambda: (link := self.edge.link())["state"] == "up" and link["up"] >= times)
        until(lambda: self.cloud.status()["workers"]["processes"][0]["state"] in ("idle", "busy"))

    def tokens(self, runtime: Runtime, before: Any, count: int, **how: Any) -> list[int]:
        """The answer of a model alone to the prompt and the tokens ``before``."""
        sampling = SamplingParams(max_tokens=count, ignore_eos=True, **how)
        answer = runtime.complete([*self.prompt.tolist(), *before], sampling)
        answer.drain()
        return answer.tokens

    def said(self, tokens: list[int]) -> str:
        """The text of an answer of these tokens."""
        sampling = SamplingParams(max_tokens=len(tokens), ignore_eos=True)
        decoder = AnswerDecoder(self.text, self.large.space, self.prompt, sampling)
        return "".join(decoder.take(token).text for token in tokens)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path_factory.mktemp("verified"), model)
    yield made
    made.cluster.close()


def answered(edge: Node, tokens: int, **more: Any) -> tuple[str, dict[str, Any]]:
    """The text of an answer, and its usage."""
    asked = body(DOCUMENT, tokens=tokens, **more)
    found = httpx.post(edge.url + "/v1/chat/completions", json=asked, timeout=patient(120))
    assert found.status_code == 200, found.text
    said = found.json()
    return said["choices"][0]["message"]["content"], said["usage"]


def killed_in_between(edge: Node, kill: Callable[[], object]) -> tuple[str, dict[str, Any], str]:
    """The text of a long streamed answer, its usage and its id; ``kill`` is called after some pieces."""
    asked = body(DOCUMENT, tokens=LONG, stream=True, stream_options={"include_usage": True})
    text, usage, name, count = "", dict[str, Any](), "", 0
    with httpx.stream("POST", edge.url + "/v1/chat/completions", json=asked, timeout=patient(120)) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage, name = event.get("usage") or usage, event["id"]
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            count += 1
            if count == 20:
                kill()
    return text, usage, name


def test_what_the_client_reads_is_what_the_clouds_model_says_alone(nodes: Nodes) -> None:
    for how in ({}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}):
        expected = nodes.said(nodes.tokens(nodes.large, [], 64, **how))
        for turn in range(3):  # the second and third are drafted from the first
            text, usage = answered(nodes.edge, 64, **how)
            assert text == expected
            details = usage["completion_tokens_details"]
            assert (details["cloud_tokens"], details["verification"]) == (64, "cloud")
            assert usage["prompt_tokens_details"]["sources"]["cloud"] >= (turn > 0) * 384
    assert details["accepted_prediction_tokens"] > 0
    own, usage = answered(nodes.edge, 64, ctxreuse={"verify": "off"})
    assert own == nodes.said(nodes.tokens(nodes.small, [], 64))
    details = usage["completion_tokens_details"]
    assert (details["cloud_tokens"], details["verification"]) == (0, "off")
    assert nodes.cloud.status()["transfers"]["verified"] >= 6


def test_steps_of_the_device_are_judged_by_the_cloud_once_it_is_trusted(nodes: Nodes) -> None:
    wanted = {"ctxreuse": {"verify": "steps"}}
    text, usage = answered(nodes.edge, 96, **wanted)
    assert text == nodes.said(nodes.tokens(nodes.small, [], 96))
    assert usage["completion_tokens_details"]["verification"] == "judge"
    judged = Judged(0.9, -1e9, 100)
    JudgeProfileStore(nodes.cloud.cards).add(JudgeProfile(model_digest(nodes.large.space), {"likelihood": judged}))
    text, usage = answered(nodes.edge, 96, **wanted)
    assert text == nodes.said(nodes.tokens(nodes.small, [], 96))
    details = usage["completion_tokens_details"]
    assert (details["cloud_tokens"], details["verification"]) == (0, "steps")
    assert sum(step["drafted"] for step in details["steps"]) == 96
    assert all(step["accepted"] and step["score"] < 0 for step in details["steps"])
    wanted["ctxreuse"]["step_threshold"] = 1e9  # type: ignore[assignment]
    text, usage = answered(nodes.edge, 96, **wanted)
    assert text == nodes.said(nodes.tokens(nodes.large, [], 96))
    details = usage["completion_tokens_details"]
    assert details["cloud_tokens"] == 96 == sum(step["rewritten"] for step in details["steps"])


@pytest.mark.parametrize("what", ["engine", "cloud"])
def test_kill_9_in_mid_answer(nodes: Nodes, what: str) -> None:
    def kill() -> None:
        if what == "cloud":
            nodes.cloud.end(signal.SIGKILL)
        else:
            os.kill(nodes.cloud.status()["workers"]["processes"][0]["pid"], signal.SIGKILL)

    text, usage, name = killed_in_between(nodes.edge, kill)
    details = usage["completion_tokens_details"]
    verified, reason = details["cloud_tokens"], details["verification"]
    assert reason == {"engine": "failed", "cloud": "cut"}[what]
    assert 20 <= verified < LONG
    tokens = nodes.tokens(nodes.large, [], verified)
    tokens += nodes.tokens(nodes.small, tokens, LONG - verified)
    assert text == nodes.said(tokens)
    why = httpx.get(f"{nodes.edge.url}/api/why/{name}", timeout=patient(60)).json()
    assert f"A cloud's model said {verified:,} tokens of the answer; the rest is of the model here" in why["text"]
    if what == "cloud":
        text, usage = answered(nodes.edge, 16)
        assert text == nodes.said(nodes.tokens(nodes.small, [], 16))
        assert usage["completion_tokens_details"]["verification"] == "down"
        nodes.cloud.start().ready()
    nodes.up(2 if what == "cloud" else 1)
    text, usage = answered(nodes.edge, 64)
    assert text == nodes.said(nodes.tokens(nodes.large, [], 64))
    assert usage["completion_tokens_details"]["verification"] == "cloud"
