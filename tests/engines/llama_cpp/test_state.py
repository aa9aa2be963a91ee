"""States that become other sequences' are those that would have been written anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctxreuse.engines import open_engine
from ctxreuse.engines.llama_cpp import LlamaEngine
from ctxreuse.engines.llama_cpp.state import MOST_STREAMS, LlamaState
from support.tiny_gguf import write_tiny_gguf


@pytest.mark.parametrize("window", [0, 24])
def test_a_state_as_another_sequence(tmp_path: Path, window: int) -> None:
    engine = open_engine(write_tiny_gguf(tmp_path / "tiny.gguf", window=window), threads=1)
    assert isinstance(engine, LlamaEngine)
    state, chance = LlamaState(engine._state, 37), np.random.default_rng(window)
    for at in state.places:
        rows = state.rows(*at)
        rows[:] = chance.integers(0, 1 << 16, rows.shape)
    first = state
    for slot, streams in [(0, 1), (3, 4), (MOST_STREAMS - 1, MOST_STREAMS), (1, MOST_STREAMS), (0, 4)]:
        expected = state.copy(37, slot=slot, streams=streams)
        state = state.as_sequence(slot, streams)
        assert np.array_equal(state.data, expected.data)
        assert all(np.array_equal(state.rows(*at), expected.rows(*at)) for at in state.places)
        assert np.shares_memory(state.data, first.data) == (not window)
        assert all(np.array_equal(first.rows(*at), expected.rows(*at)) for at in first.places)
