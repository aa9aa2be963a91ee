"""Documents as parts of a message: in another order they are moved, and the answer says so; by HTTP, in a real process
too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import Memory

from ctxreuse.metrics import SOURCES
from ctxreuse.reuse import ChunkProfileStore
from support.shuffled import card, tokens
from support.waiting import until

DOCUMENTS = [
    "The tower stands on the rock of Ness and its lamp turns once in twenty seconds. " * 3,
    "Boats from the village bring oil on the first Monday of each month. " * 3,
    "In fog the horn sounds twice a minute, and the keeper writes that down. " * 3,
]
RULES = {"role": "system", "content": "Answer from the documents, in one sentence. " * 2}


@pytest.fixture
def cards(tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shelf on which a card permits to move chunks of the tiny model."""
    monkeypatch.setenv("CTXREUSE_CARDS", str(tmp_path / "cards"))
    ChunkProfileStore().add(card(engine))
    return tmp_path / "cards"


def body(documents: list[str], question: str = "How often?", **more: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": text} for text in (*documents, question)]
    return {"messages": [RULES, {"role": "user", "content": parts}], "temperature": 0, "max_tokens": 4, **more}


def ask(http: Any, documents: list[str], **more: Any) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json=body(documents, **more))
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    details: dict[str, Any] = usage["prompt_tokens_details"]
    assert sum(details["sources"].values()) == usage["prompt_tokens"]
    assert sum(details["levels"].values()) == details["cached_tokens"]
    assert set(details["sources"]) == set(SOURCES)
    return details | {"prompt": usage["prompt_tokens"]}


LOSSY = {"ctxreuse": {"lossy": "kl-0.05"}}


def test_parts_of_a_message_in_another_order_are_moved(serve: Any, cards: Path) -> None:
    edge = serve(**{"edge.context_cache_bytes": 0})
    first = ask(edge.http, DOCUMENTS, **LOSSY)
    assert (first["cached_tokens"], first["gate"]) == (0, "")
    moved = ask(edge.http, DOCUMENTS[::-1], **LOSSY)
    assert moved["gate"] == "kl-0.020 by rotate"
    assert moved["moved"] > 0.8 * moved["prompt"]
    assert moved["approx"]
    exact = ask(edge.http, [DOCUMENTS[1], DOCUMENTS[0]])
    assert (exact["moved"], exact["gate"], exact["approx"]) == (0, "", False)
    text = edge.http.get("/metrics").text
    assert f"ctxreuse_relocated_tokens_total {float(moved['moved'])}" in text
    assert 'ctxreuse_chunk_reuse_requests_total{verdict="allowed"} 1.0' in text


def test_settings_allow_it_and_a_stream_says_it(serve: Any, cards: Path) -> None:
    edge = serve(**{"edge.context_cache_bytes": 0, "edge.max_kl": "kl-0.03"})
    ask(edge.http, DOCUMENTS)
    sent = body(DOCUMENTS[::-1], stream=True, stream_options={"include_usage": True})
    answer = edge.http.post("/v1/chat/completions", json=sent)
    last = [line for line in answer.text.split("\n\n") if line][-2]
    details = json.loads(last[6:])["usage"]["prompt_tokens_details"]
    assert details["moved"] > 300
    why = edge.http.get(f"/api/why/{answer.headers['x-request-id']}").json()
    assert f"{details['moved']:,} of these were relocated from other positions (kl-0.020 by rotate)." in why["text"]


def test_a_model_that_nobody_measured_is_refused_in_words(serve: Any, tmp_path: Path, engine: Any, cards: Path) -> None:
    ChunkProfileStore().add(card(engine, ("rotate", 0.4), ("v-15%", 0.3)))
    edge = serve(**{"edge.context_cache_bytes": 0})
    ask(edge.http, DOCUMENTS, **LOSSY)
    refused = ask(edge.http, DOCUMENTS[::-1], **LOSSY)
    assert refused["moved"] == 0
    assert refused["missed"] == "gate"
    assert refused["gate"].startswith("refused: not good enough: the best policy, v-15%, has a KL of 0.300")


def test_a_named_context_of_parts_is_a_source_too(serve: Any, cards: Path) -> None:
    edge = serve(**{"edge.context_cache_bytes": 0})
    parts = [{"type": "text", "text": text} for text in DOCUMENTS]
    made = edge.http.post(
        "/api/contexts", json={"name": "docs", "messages": [RULES, {"role": "user", "content": parts}]}
    )
    assert made.status_code == 201
    moved = ask(edge.http, DOCUMENTS[::-1], **LOSSY)
    assert moved["moved"] > 0.8 * moved["prompt"]
    again = ask(edge.http, [], context="docs")
    assert again["prompt"] > moved["prompt"]
    assert again["missed"] in ("", "new", "slow")  # so small a model computes about as fast as it reads


def test_what_is_pinned_is_computed_again_with_its_parts(serve: Any, cards: Path) -> None:
    edge = serve(**{"edge.context_cache_bytes": 0})
    parts = [{"type": "text", "text": text} for text in DOCUMENTS]
    sent = {"name": "docs", "messages": [RULES, {"role": "user", "content": parts}]}
    assert edge.http.post("/api/contexts", json=sent).status_code == 201
    runtime, store = edge.node.runtime, edge.node.store
    store.flush()
    noted = len(store.chunks)
    ids = edge.node.contexts.tokens(edge.node.contexts._ledger.session("docs"))
    assert noted > 0
    assert store.forget(runtime.keys(ids)) > 0
    assert edge.http.post("/api/contexts/docs/pin").json()["context"]["held"] > 0.9 * len(ids)
    assert len(store.chunks) == noted  # cut at the same places: under the same names


@pytest.mark.parametrize("parts", [[-5, 0, 10**12], [9, 3, 3], list(range(400))])
def test_parts_of_token_prompts_may_be_anything(serve: Any, cards: Path, parts: list[int]) -> None:
    edge = serve()
    ids = [int(n) % 250 for n in tokens(300, 3)]
    for order in (ids, ids[:20] + ids[150:] + ids[20:150]):
        sent = {"tokens": order, "parts": parts, "lossy": "kl-0.05"}
        answer = edge.http.post("/api/tokens/warm", json=sent)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert usage["prompt_tokens"] == 300
        assert sum(usage["by_source"].values()) == usage["cached_tokens"]
    assert edge.http.post("/api/tokens/warm", json={"tokens": ids, "parts": ["a"]}).status_code == 400


def test_a_real_process_and_a_memory_attached_to_it(process: Any, cards: Path, tmp_path: Path) -> None:
    daemon = process(CTXREUSE_CARDS=str(cards), CTXREUSE_EDGE__LIVE_BYTES="0")
    with daemon.ready() as http:
        first = ask(http, DOCUMENTS, **LOSSY)
        assert first["moved"] == 0
        until(lambda: http.get("/api/status").json()["store"]["stats"]["queued"] == 0)
        assert ask(http, DOCUMENTS[::-1], **LOSSY)["moved"] > 300
        with Memory.open(tmp_path / "m", daemon.url, max_kl=0.05) as memory:
            session = memory.session("s")
            session.system(RULES["content"])
            # Documents of a memory are texts of their own: what ends one belongs to it.
            answer = session.ask("How often?", documents=DOCUMENTS, max_tokens=3)
            assert answer.usage.prompt_tokens > 500
            assert answer.text is not None
            until(lambda: http.get("/api/status").json()["store"]["stats"]["queued"] == 0)
            other = memory.session("t")
            other.system(RULES["content"])
            usage = other.ask("How often?", documents=DOCUMENTS[::-1], max_tokens=3).usage
            assert usage.gate_decision == "kl-0.020 by rotate"
            assert usage.tokens.relocated > 0.8 * usage.prompt_tokens
    # The index is found again by the next process, however the first one ended.
    daemon.end(9)
    daemon = process(CTXREUSE_CARDS=str(cards))
    with daemon.ready() as http:
        assert ask(http, [DOCUMENTS[1], DOCUMENTS[2], DOCUMENTS[0]], **LOSSY)["moved"] > 300
    assert daemon.end()[0] == 0
