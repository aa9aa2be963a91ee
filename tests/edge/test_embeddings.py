"""Vectors over HTTP, as OpenAI's and Ollama's clients ask for them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from ctxreuse.embed import NAME
from ctxreuse.errors import ConfigError

TEXTS = ["The weather in Paris is sunny.", "It is warm in the French capital.", "The bank raised its rates."]


def post(edge: Any, path: str, status: int = 200, **body: Any) -> Any:
    answer = edge.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_floats_base64_and_ollamas_forms_are_the_same_vectors(edge: Any) -> None:
    found = post(edge, "/v1/embeddings", input=TEXTS, model=NAME)
    assert [one["index"] for one in found["data"]] == [0, 1, 2]
    assert found["model"] == NAME
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 15
    vectors = np.array([one["embedding"] for one in found["data"]], "<f4")
    near, far = float(vectors[0] @ vectors[1]), float(vectors[0] @ vectors[2])
    assert near > far + 0.1
    coded = post(edge, "/v1/embeddings", input=TEXTS, encoding_format="base64", dimensions=64)
    short = np.array([np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in coded["data"]])
    assert short.shape == (3, 64)
    assert short[0] == pytest.approx(vectors[0, :64] / np.linalg.norm(vectors[0, :64]), abs=1e-5)
    ollama = post(edge, "/api/embed", input=TEXTS, model=f"{NAME}:latest")
    assert np.array(ollama["embeddings"], "<f4") == pytest.approx(vectors)
    assert ollama["prompt_eval_count"] == found["usage"]["prompt_tokens"]
    assert post(edge, "/api/embeddings", prompt=TEXTS[0])["embedding"] == ollama["embeddings"][0]
    one = post(edge, "/v1/embeddings", input=TEXTS[0])
    assert one["data"] == found["data"][:1]


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"input": []}, 400, "input"),
        ({"input": ""}, 400, "empty"),
        ({"input": ["a", ""]}, 400, "input[1]"),
        ({"input": [1, 2]}, 400, "token ids"),
        ({"input": [[1, 2]]}, 400, "check_embedding_ctx_length"),
        ({"input": ["a"] * 2049}, 400, "2048"),
        ({"input": "a", "dimensions": 257}, 400, "256"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
        ({"input": "a", "model": "text-embedding-3-small"}, 404, NAME),
        ({"input": "word " * 9000}, 400, "8,192"),
    ],
)
def test_wrong_requests_are_refused_by_name(edge: Any, body: Any, status: int, word: str) -> None:
    assert word in post(edge, "/v1/embeddings", status, **body)["error"]["message"]


def test_long_texts_are_cut_for_ollama_unless_it_says_no(edge: Any) -> None:
    long = "word " * 9000
    assert post(edge, "/api/embed", input=[long])["prompt_eval_count"] > 8192
    assert "8,192" in post(edge, "/api/embed", 400, input=long, truncate=False)["error"]


def test_without_the_extra_it_says_what_to_install(edge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ConfigError("embeddings need the vectors of wordllama", fix="Run: pip install 'ctxreuse[embed]'")

    monkeypatch.setattr("ctxreuse_edge.node.open_embedder", missing)
    assert "ctxreuse[embed]" in post(edge, "/v1/embeddings", 400, input="a")["error"]["message"]
