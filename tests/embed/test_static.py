"""The embedder of the extra, on its real vectors: what is alike is near, short vectors too, other files are refused."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from ctxreuse.embed import Embedder, open_embedder
from ctxreuse.errors import ConfigError

QUESTIONS = ["How is the weather in Paris?", "Where do ships moor?", "Who composed this symphony?"]
ANSWERS = ["It is sunny in the French capital.", "Boats are tied up in the harbour.", "Beethoven wrote that music."]


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return open_embedder()


@pytest.mark.parametrize("dimensions", [None, 128, 64])
def test_the_nearest_text_is_the_one_of_like_meaning(embedder: Embedder, dimensions: int | None) -> None:
    questions = embedder.embed(QUESTIONS, dimensions=dimensions).vectors
    answers = embedder.embed(ANSWERS, dimensions=dimensions).vectors
    assert questions.shape == (3, dimensions or embedder.dimensions)
    assert (questions @ answers.T).argmax(axis=1).tolist() == [0, 1, 2]
    assert np.linalg.norm(questions, axis=1) == pytest.approx(1.0, abs=1e-5)


def test_any_text_has_a_vector_and_long_ones_are_read_to_the_limit(embedder: Embedder) -> None:
    found = embedder.embed(["", "🌧☃\u2028", "a" * 3_000_000, "word " * 9000])
    assert np.isfinite(found.vectors).all()
    assert found.vectors[0].tolist() == [0.0] * embedder.dimensions
    assert found.tokens[0] == 0
    assert min(found.tokens[2:]) > embedder.max_tokens
    [same] = embedder.embed(["word " * 20_000]).vectors
    assert np.array_equal(same, found.vectors[3])
    alone = [embedder.embed([text]).vectors[0] for text in ANSWERS]
    assert np.array_equal(np.stack(alone), embedder.embed(ANSWERS).vectors), "a batch changes nothing"


def test_other_files_and_none_at_all_are_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.find_spec("wordllama")
    assert spec is not None
    [place] = spec.submodule_search_locations or ()
    copy = tmp_path / "wordllama"
    for folder in ("weights", "tokenizers"):
        shutil.copytree(Path(place) / folder, copy / folder)
    (copy / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    assert open_embedder().dimensions == 256
    weights = copy / "weights" / "l2_supercat_256.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2] + b"\0\1")
    with pytest.raises(ConfigError, match=r"ctxreuse\[embed\]"):
        open_embedder()
    shutil.rmtree(copy)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ctxreuse\[embed\]"):
        open_embedder()
