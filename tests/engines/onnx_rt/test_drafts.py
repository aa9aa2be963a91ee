"""Drafts on onnxruntime: a pass checks several tokens, of graphs that give logits after the last one only too."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxreuse.engines import open_engine
from ctxreuse.engines.onnx_rt.model import GraphPart
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.testing.sealed import random_tokens

SAMPLING = SamplingParams(max_tokens=40, ignore_eos=True)


def opened(folder: Path, **options: Any) -> Any:
    return open_engine(folder, block_tokens=16, chunk=64, threads=1, **options)


def answered(engine: Any, speculate: Any, times: int = 4) -> tuple[list[list[int]], int, int]:
    """Answers to one prompt by a runtime whose passes all take the same time; their passes, and tokens of drafts that
    were right."""
    ticks = count()
    clock = lambda: float(next(ticks))  # noqa: E731
    runtime = Runtime(engine, None, RuntimeOptions(speculate=speculate, clock=clock))
    found = []
    for _ in range(times):
        found.append(runtime.complete(random_tokens(engine, 20, 1), SAMPLING))
        found[-1].drain()
    passes = runtime.steps.stats().passes
    runtime.close()
    return [one.tokens for one in found], passes, sum(one.usage.tokens.accepted for one in found)


def test_drafted_answers_are_those_of_plain_decoding_in_fewer_passes(
    onnx_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runs, run = opened(onnx_folder), list[int](), GraphPart.run

    def counted(self: GraphPart, binding: Any, given: Any, fed: Any, rows: int = 0) -> Any:
        if self.layers:
            runs.append(given.shape[2])
        return run(self, binding, given, fed, rows)

    assert engine._model.last_only, "as the builder makes it here"
    expected, plain, _ = answered(engine, "off")
    assert len(engine._model.parts) == 1, "nobody wanted drafts"
    with monkeypatch.context() as patch:
        patch.setattr(GraphPart, "run", counted)
        tokens, passes, accepted = answered(engine, "auto")
    assert tokens == expected
    assert accepted > 60
    assert passes == plain - accepted
    assert len(runs) <= passes + 1, "a pass with a draft runs the layers once"


def test_rows_of_a_draft_are_those_of_single_tokens(onnx_folder: Path) -> None:
    engine, other = opened(onnx_folder), opened(onnx_folder)
    assert engine.use_drafts() == ""
    ids = random_tokens(engine, 30, 2)
    one, two = engine.new_context(), other.new_context()
    engine.prefill(one, ids[:20])
    other.prefill(two, ids[:20])
    (found,) = engine.step([(one, ids[20:26])], rows=[6])
    for row, token in zip(found, ids[20:26]):
        expected = other.prefill(two, np.array([token], "<i4"))
        assert np.abs(row - expected).max() <= 1e-4 * np.abs(expected).max()


def test_without_the_package_onnx_the_reason_is_told_and_answers_are_the_same(
    onnx_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = opened(onnx_folder)
    expected, *_ = answered(engine, "off", 2)
    monkeypatch.setitem(sys.modules, "onnx", None)
    tokens, *_ = answered(engine, "auto", 2)
    assert tokens == expected
    assert "pip install onnx" in caplog.text


def test_an_engine_in_a_process_of_its_own_is_made_ready_too(onnx_folder: Path) -> None:
    engine = opened(onnx_folder, isolate=True)
    try:
        expected, plain, _ = answered(engine, "off")
        tokens, passes, accepted = answered(engine, "auto")
        assert (tokens, passes) == (expected, plain - accepted)
        assert accepted > 60
    finally:
        engine.close()
