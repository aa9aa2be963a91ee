"""Several answers to one request, their log-probabilities, and the prompt before them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ctxreuse.engines.sampling import log_softmax
from support.waiting import until

from .test_api import ask, events
from .test_worker import LONG, asked, finished

DRAWN: dict[str, Any] = {"temperature": 1.2, "seed": 11, "max_tokens": 12}


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_answer_i_of_n_is_that_of_seed_plus_i(edge: Any, path: str) -> None:
    prompt = {} if "chat" in path else {"prompt": "once upon a time"}
    alone = [ask(edge, path, **DRAWN | prompt | {"seed": 11 + i}).json() for i in range(4)]
    many = ask(edge, path, **DRAWN, **prompt, n=4).json()
    assert [one["index"] for one in many["choices"]] == [0, 1, 2, 3]
    assert [{**one, "index": 0} for one in many["choices"]] == [one["choices"][0] for one in alone]
    usage = many["usage"]
    assert usage["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == sum(one["usage"]["completion_tokens"] for one in alone)

    found = events(ask(edge, path, **DRAWN, **prompt, n=4, stream=True, stream_options={"include_usage": True}).text)
    texts = [""] * 4
    for choice in [c for event in found for c in event["choices"]]:
        texts[choice["index"]] += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
    assert texts == [text_of(choice) for choice in many["choices"]]
    ends = [(c["index"], c["finish_reason"]) for e in found for c in e["choices"] if c["finish_reason"]]
    assert ends == [(i, choice["finish_reason"]) for i, choice in enumerate(many["choices"])]
    assert found[-1]["usage"] | {"prompt_tokens_details": None} == usage | {"prompt_tokens_details": None}
    order = [c["index"] for e in found for c in e["choices"] if c.get("delta", {}).get("content") or c.get("text")]
    assert order != sorted(order), "the answers come side by side"


def test_a_client_that_leaves_cancels_all_answers(edge: Any) -> None:
    with asked(edge, "/v1/chat/completions", LONG | {"n": 3, "stream": True}):
        until(lambda: edge.node.runtime.steps.stats().contexts > 9)
    until(lambda: finished(edge, "cancelled") == 3)
    until(lambda: edge.node.pool.active == 0)
    edge.node.runtime.context_cache.check()


@pytest.mark.parametrize("n", [1, 2])
def test_best_of_gives_the_likeliest(edge: Any, n: int) -> None:
    body = DRAWN | {"prompt": "once upon a time", "logprobs": 0}
    alone = [ask(edge, "/v1/completions", **body | {"seed": 11 + i}).json()["choices"][0] for i in range(5)]
    means = [float(np.mean(one["logprobs"]["token_logprobs"] or [0])) for one in alone]
    best = sorted(range(5), key=lambda i: -means[i])[:n]
    found = ask(edge, "/v1/completions", **body, n=n, best_of=5).json()
    assert [one["text"] for one in found["choices"]] == [alone[i]["text"] for i in best]
    assert [one["index"] for one in found["choices"]] == list(range(n))
    given, expected = found["choices"][0]["logprobs"], alone[best[0]]["logprobs"]
    assert given["tokens"] == expected["tokens"]
    np.testing.assert_allclose(given["token_logprobs"], expected["token_logprobs"], atol=1e-4)


def test_logprobs_are_those_of_the_model_itself(edge: Any) -> None:
    """Whatever bias, temperature and penalties do to what is drawn."""
    runtime, text = edge.node.runtime, edge.node.runtime.text
    ids = text.encode("once upon a time")
    how = DRAWN | {"logit_bias": {"66": 4}, "presence_penalty": 1, "ignore_eos": True}
    choice = ask(edge, "/v1/completions", **how, prompt=ids.tolist(), logprobs=3).json()["choices"][0]
    report = choice["logprobs"]
    drawn = runtime.engine.prefill(runtime.engine.new_context(), ids)
    scores = log_softmax(drawn)
    best = [int(i) for i in np.argsort(-scores)[:3]]
    spelt = text.vocabulary().tokens
    named = {spelt[i].decode("utf-8", "replace"): float(scores[i]) for i in best}
    first = report["top_logprobs"][0]
    assert all(math.isclose(first[name], value, abs_tol=1e-4) for name, value in named.items())
    assert first[report["tokens"][0]] == report["token_logprobs"][0]
    assert len(report["tokens"]) == 12
    assert all(3 <= len(tops) <= 4 or len(set(tops)) < 4 for tops in report["top_logprobs"])
    assert report["text_offset"][0] == 0
    assert report["text_offset"] == sorted(report["text_offset"])


def test_chat_logprobs_whole_and_streamed(edge: Any) -> None:
    how = DRAWN | {"logprobs": True, "top_logprobs": 2, "n": 2}
    whole = ask(edge, **how).json()["choices"]
    for choice in whole:
        content = choice["logprobs"]["content"]
        said = bytes(byte for token in content for byte in token["bytes"]).decode("utf-8", "replace")
        assert said == choice["message"]["content"]
        for token in content:
            assert len(token["top_logprobs"]) == 2
            assert token["top_logprobs"][0]["logprob"] >= token["logprob"] - 1e-6
            assert token["logprob"] <= 0
    streamed: list[list[Any]] = [[], []]
    for event in events(ask(edge, **how, stream=True).text):
        for choice in event["choices"]:
            streamed[choice["index"]] += (choice["logprobs"] or {"content": []})["content"]
    for got, choice in zip(streamed, whole):
        expected = choice["logprobs"]["content"]
        assert [(one["token"], one["bytes"]) for one in got] == [(one["token"], one["bytes"]) for one in expected]
        # The second prompt is a cached one, computed in other passes.
        scores = [[one["logprob"] for one in report] for report in (got, expected)]
        np.testing.assert_allclose(*scores, atol=1e-4)
    plain = ask(edge, **DRAWN, logprobs=True).json()["choices"][0]
    assert all(token["top_logprobs"] == [] for token in plain["logprobs"]["content"])


def test_echo_gives_the_prompt_first(edge: Any) -> None:
    body = DRAWN | {"prompt": "once upon a time", "n": 2}
    plain = ask(edge, "/v1/completions", **body).json()["choices"]
    echoed = ask(edge, "/v1/completions", **body, echo=True).json()["choices"]
    assert [one["text"] for one in echoed] == ["once upon a time" + one["text"] for one in plain]
    texts = ["", ""]
    for event in events(ask(edge, "/v1/completions", **body, echo=True, stream=True).text):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [one["text"] for one in echoed]
    nothing = ask(edge, "/v1/completions", **body | {"max_tokens": 0, "n": 1}, echo=True).json()["choices"]
    assert [one["text"] for one in nothing] == ["once upon a time"]


def test_log_probabilities_of_a_prompt_are_those_of_answering_it(edge: Any) -> None:
    letters = {"structured_outputs": {"regex": "[a-z ]{6}"}}  # else its tokens would be bytes of no character
    how = {"temperature": 0, "max_tokens": 6, "logprobs": 2, **letters}
    prompt = "once upon a time there was a lighthouse " * 4
    said = ask(edge, "/v1/completions", prompt=prompt, **how).json()["choices"][0]
    full = ask(edge, "/v1/completions", prompt=prompt + said["text"], **how | {"max_tokens": 0}, echo=True).json()
    report = full["choices"][0]["logprobs"]
    assert "".join(report["tokens"]) == full["choices"][0]["text"] == prompt + said["text"]
    assert (report["token_logprobs"][0], report["top_logprobs"][0]) == (None, None)
    count = len(said["logprobs"]["tokens"])
    assert report["tokens"][-count:] == said["logprobs"]["tokens"]
    np.testing.assert_allclose(report["token_logprobs"][-count:], said["logprobs"]["token_logprobs"], atol=1e-3)
    assert report["text_offset"][-count:] == [len(prompt) + at for at in said["logprobs"]["text_offset"]]
    # With an answer behind it.
    both = ask(edge, "/v1/completions", prompt=prompt, **how, echo=True, prompt_logprobs=3).json()["choices"][0]
    assert both["logprobs"]["tokens"] == report["tokens"]
    listed = both["prompt_logprobs"]
    assert listed[0] is None
    assert len(listed) == len(report["tokens"]) - count
    for place, own in zip(listed[1:], report["token_logprobs"][1:]):
        assert 3 <= len(place) <= 4
        assert min(abs(one["logprob"] - own) for one in place.values()) < 1e-3
        assert sorted(one["rank"] for one in place.values())[:3] == [1, 2, 3]
        assert all(one["logprob"] <= 0 and one["decoded_token"] for one in place.values())
    assert "prompt_logprobs" not in said


def test_a_chat_tells_the_log_probabilities_of_its_prompt(edge: Any) -> None:
    answer = ask(edge, prompt_logprobs=0, max_tokens=2).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert [len(place) for place in answer["prompt_logprobs"][1:]] == [1] * (answer["usage"]["prompt_tokens"] - 1)
    again = ask(edge, max_tokens=2).json()["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 1, "echo": True, "stream": True}, "echo"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_what_is_refused_is_named(edge: Any, more: dict[str, Any], param: str) -> None:
    answer = ask(edge, "/v1/completions", prompt="x", **more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
