"""The edge daemon on an ONNX folder, and the engine on real weights."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest

from ctxreuse.engines import open_engine
from ctxreuse.engines.generate import generate
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.text import Message
from ctxreuse.models.build import build
from ctxreuse.testing.engine import resume, seal
from support.sidecar import Edge
from support.waiting import patient, until

QUESTION = {"messages": [{"role": "user", "content": "What is in the box? " * 16}], "temperature": 0, "max_tokens": 8}


@pytest.mark.daemon
def test_a_daemon_answers_from_disk_after_a_kill(onnx_folder: Path, tmp_path: Path) -> None:
    answers = []
    for _ in range(2):
        edge = Edge(tmp_path, onnx_folder)
        try:
            with httpx.Client(base_url=edge.url, timeout=patient(60)) as http:
                until(lambda: http.get("/readyz").status_code == 200, 60)
                answers.append(http.post("/v1/chat/completions", json=QUESTION).json())
                until(lambda: http.get("/api/status").json()["store"]["stats"]["queued"] == 0)
            edge.process.kill()
        finally:
            edge.end()
        (tmp_path / "edge" / "edge.json").unlink()  # a killed daemon leaves it
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["completion_tokens"] == 8
    assert answers[0]["usage"]["prompt_tokens_details"]["sources"]["disk"] == 0
    assert answers[1]["usage"]["prompt_tokens_details"]["sources"]["disk"] >= 256


@pytest.mark.model
def test_smollm2_at_int4_answers_the_same_restored_as_computed() -> None:
    engine = open_engine(build("smollm2", "int4", progress=False))
    assert engine.text is not None
    size = engine.space.block_tokens
    story = "The lighthouse at Harrow Point was founded in 1839 by Captain Josiah Bellweather. " * 12
    messages = [Message("system", "Answer from the passage. " + story), Message("user", "Who founded the lighthouse?")]
    ids = engine.text.encode(engine.text.render(messages, generate=True))
    end = (len(ids) - 1) // size * size
    sealed = seal(engine, ids[:end])
    how, context = SamplingParams(max_tokens=24), engine.new_context()
    whole = list(generate(engine, engine.text, context, engine.prefill(context, ids), how))
    copy, logits = resume(engine, sealed, end, ids[end:])
    again = list(generate(engine, engine.text, copy, logits, how))
    assert [piece.token for piece in again] == [piece.token for piece in whole]
    assert "Bellweather" in "".join(piece.text for piece in whole)
    assert np.array_equal(copy.tokens, context.tokens)
