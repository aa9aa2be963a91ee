"""Search by meaning beside words: vectors that follow the turns, an embedder that is missing, replaced or fails."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ctxreuse_agents import Memory, NewTurn

from ctxreuse.embed import Embeddings
from ctxreuse.store.recall import recall
from ctxreuse.store.recall import vectors as vectors_module
from ctxreuse.store.recall.vectors import VECTORS
from support.waiting import until


class Letters:
    """An embedder of the test's own: what letters a text has."""

    max_tokens = 1000

    def __init__(self, name: str = "letters", dimensions: int = 26) -> None:
        self.name, self.dimensions = name, dimensions
        self.texts: list[str] = []
        self.failing = False
        self.wait: threading.Event | None = None

    def embed(self, texts: Sequence[str], *, dimensions: int | None = None) -> Embeddings:
        if self.failing:
            raise RuntimeError("no more")
        if self.wait is not None and len(texts) > 1:
            self.wait.wait(60)
        self.texts += texts
        vectors = np.zeros((len(texts), self.dimensions), np.float32)
        for row, text in zip(vectors, texts):
            for letter in text.lower():
                if "a" <= letter <= "z":
                    row[(ord(letter) - 97) % self.dimensions] += 1
            row /= max(float(np.linalg.norm(row)), 1e-9)
        return Embeddings(vectors, [len(text) for text in texts])


def contents(memory: Memory, query: str, **limits: Any) -> list[str]:
    return [hit.turn.content for hit in memory.search(query, **limits)]


def test_what_is_said_in_other_words_is_found(tmp_path: Path) -> None:
    with Memory.open(tmp_path) as memory:
        texts = ["My puppy sleeps in the kitchen.", "The invoice was paid on Monday.", "Copper wire is expensive."]
        memory.create("a").extend([NewTurn("user", text) for text in texts])
        first = memory.search("dogs and other animals at home", explain=True)[0]
        assert first.turn.content == texts[0]
        assert first.explain["vectors"]["rank"] == 1
        assert first.explain["vectors"]["embedder"] == "wordllama-l2-256"
        assert "words" not in first.explain or first.explain["words"]["terms"] != ["dogs"]
    with Memory.open(tmp_path, embedder="none") as memory:
        assert contents(memory, "dogs") == []


def test_vectors_are_kept_on_disk_and_made_once(tmp_path: Path) -> None:
    embedder = Letters()
    with Memory.open(tmp_path, embedder=embedder) as memory:
        memory.create("a").extend([NewTurn("user", text) for text in ("abc", "xyz", "abx")])
        assert contents(memory, "cab")[0] == "abc"
        assert sorted(embedder.texts) == ["abc", "abx", "cab", "xyz"]
    again = Letters()
    with Memory.open(tmp_path, embedder=again) as memory:
        assert contents(memory, "zzyyxx")[0] == "xyz"
        assert again.texts == ["zzyyxx"]
        memory.session("a").user("xxyyzz")
        memory.index()
        assert again.texts == ["zzyyxx", "xxyyzz"]
        assert (tmp_path / "recall" / VECTORS).stat().st_size >= 4 * 26


@pytest.mark.parametrize("other", [Letters("others"), Letters("letters", 7)], ids=["name", "size"])
def test_an_embedder_that_is_replaced_makes_all_vectors_again(tmp_path: Path, other: Letters) -> None:
    other.texts.clear()
    with Memory.open(tmp_path, embedder=Letters()) as memory:
        memory.create("a").extend([NewTurn("user", text) for text in ("abc", "xyz")])
        contents(memory, "b")
    with Memory.open(tmp_path, embedder=other) as memory:
        hit = memory.search("zyx", explain=True)[0]
        assert hit.turn.content == "xyz"
        assert hit.explain["vectors"]["embedder"] == other.name
        assert sorted(other.texts) == ["abc", "xyz", "zyx"]


def test_an_embedder_that_is_missing_leaves_the_words_until_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recall._open_shared.cache_clear()
    with monkeypatch.context() as without:
        without.setattr("ctxreuse.embed.static._PACKAGE", "a_package_that_is_not_installed")
        with Memory.open(tmp_path) as memory:
            memory.create("a").extend([NewTurn("user", text) for text in ("the dogs bark", "red boats")])
            assert contents(memory, "dog") == ["the dogs bark"]
            assert memory.search("dog", explain=True)[0].explain.keys() == {"words"}
    with Memory.open(tmp_path) as memory:
        assert contents(memory, "puppy")[0] == "the dogs bark"


def test_an_embedder_that_fails_leaves_the_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    embedder = Letters()
    with Memory.open(tmp_path, embedder=embedder) as memory:
        memory.create("a").user("abc def")
        embedder.failing = True
        assert contents(memory, "abc") == ["abc def"]
        assert "words alone" in caplog.text
        embedder.failing = False
        assert contents(memory, "abc") == ["abc def"]
        assert embedder.texts == []
    with Memory.open(tmp_path, embedder=embedder) as memory:
        assert "vectors" in memory.search("abc", explain=True)[0].explain


def test_a_search_waits_for_few_vectors_and_a_thread_makes_the_rest(tmp_path: Path) -> None:
    class Slow(Letters):
        def embed(self, texts: Sequence[str], *, dimensions: int | None = None) -> Embeddings:
            threading.Event().wait(0.005 * len(texts))
            return super().embed(texts, dimensions=dimensions)

    embedder = Slow()
    with Memory.open(tmp_path, embedder=embedder) as memory:
        memory.create("a").extend([NewTurn("user", f"word {chr(97 + n % 26) * 5}") for n in range(500)])
        assert len(contents(memory, "word", limit=500)) == 500, "words find what has no vector yet"
        assert len(embedder.texts) < 200
        until(lambda: len(embedder.texts) >= 501, seconds=60)


def test_what_was_not_embedded_when_a_process_ended_is_embedded_later(tmp_path: Path) -> None:
    with Memory.open(tmp_path, embedder="none") as memory:
        memory.create("a").extend([NewTurn("user", f"{chr(97 + n) * 4}") for n in range(26)])
        contents(memory, "aaaa")
    embedder = Letters()
    with Memory.open(tmp_path, embedder=embedder) as memory:
        assert contents(memory, "q")[0] == "qqqq"
        assert len(embedder.texts) == 27


def test_forgotten_turns_leave_no_vector(tmp_path: Path) -> None:
    with Memory.open(tmp_path, embedder=Letters()) as memory:
        secret = memory.create("secret")
        secret.extend([NewTurn("user", "qqqq"), NewTurn("user", "wwww")])
        memory.create("b").user("abc")
        assert contents(memory, "qq")[0] == "qqqq"
        file = tmp_path / "recall" / VECTORS
        codes = np.fromfile(file, np.int8).reshape(-1, 26)
        assert np.count_nonzero(codes.any(axis=1)) == 3
        memory.delete(secret)
        assert contents(memory, "qq") == []
        codes = np.fromfile(file, np.int8).reshape(-1, 26)
        assert np.count_nonzero(codes.any(axis=1)) == 1
        memory.session("b").user("xyz")
        assert contents(memory, "zyx")[0] == "xyz"
        memory.compact()
        assert not file.exists()
        assert contents(memory, "zyx")[0] == "xyz"


@pytest.mark.parametrize("harm", ["delete", "cut"])
def test_a_file_of_vectors_that_is_damaged_is_made_again(tmp_path: Path, harm: str) -> None:
    with Memory.open(tmp_path, embedder=Letters()) as memory:
        memory.create("a").extend([NewTurn("user", text) for text in ("abc", "xyz")])
        contents(memory, "b")
    file = tmp_path / "recall" / VECTORS
    file.unlink() if harm == "delete" else file.write_bytes(b"")
    with Memory.open(tmp_path, embedder=Letters()) as memory:
        assert contents(memory, "zyx")[0] == "xyz"


def test_limits_hold_for_what_vectors_find(tmp_path: Path) -> None:
    with Memory.open(tmp_path, embedder=Letters()) as memory:
        for n in range(300):
            memory.create(f"s{n}", namespace="bob", turns=[NewTurn("user", "abcabc" + "d" * (n % 3))])
        memory.create("mine", namespace="ann", turns=[NewTurn("user", "abcx", {"k": 1}), NewTurn("tool", "uvw")])
        memory.index()
        assert contents(memory, "cba", namespace="ann") == ["abcx"]
        assert contents(memory, "cba", where={"k": 1}) == ["abcx"]
        assert contents(memory, "wuv", role="tool") == ["uvw"]
        assert len(contents(memory, "cba", limit=1000)) == 301
        assert contents(memory, "", namespace="ann") == ["uvw", "abcx"], "no words: all, the newest first"
        assert contents(memory, "cba", namespace="ann/x") == []


def test_a_reader_finds_by_meaning_and_writes_nothing(tmp_path: Path) -> None:
    with Memory.open(tmp_path, embedder="none") as memory:
        memory.create("a").user("abc")
    with Memory.open(tmp_path, readonly=True, embedder=Letters()) as reader:
        assert contents(reader, "cba") == ["abc"]
        assert not (tmp_path / "recall").exists()


class Drawn:
    """Vectors of 256 numbers about some centres, drawn by the text: ``c3 …`` and ``q3 …`` are about centre 3."""

    name, dimensions, max_tokens = "drawn", 256, 1000

    def embed(self, texts: Sequence[str], *, dimensions: int | None = None) -> Embeddings:
        vectors = np.stack([self._vector(text) for text in texts])
        return Embeddings(vectors.astype(np.float32), [1] * len(texts))

    def _vector(self, text: str) -> Any:
        drawn = np.random.default_rng(int(text.split()[0][1:])).standard_normal(256)
        drawn += 0.7 * np.random.default_rng(list(text.encode())).standard_normal(256)
        return drawn / np.linalg.norm(drawn)


def test_of_many_vectors_those_with_the_same_signs_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"c{number % 40} t{number}" for number in range(4000)]
    queries = [f"q{centre} asked" for centre in range(0, 40, 5)]
    with Memory.open(tmp_path, embedder=Drawn()) as memory:
        for start in range(0, 4000, 500):
            new = [NewTurn("user", text, {"odd": n % 2}) for n, text in enumerate(texts[start : start + 500])]
            memory.create(f"s{start}").extend(new)
        memory.index()
        exact = {query: contents(memory, query, limit=10) for query in queries}
        odd = {query: contents(memory, query, limit=10, where={"odd": 1}) for query in queries}
    monkeypatch.setattr(vectors_module, "_EXACT", 1000)
    monkeypatch.setattr(vectors_module, "_COMPARED", 200)
    monkeypatch.setattr(vectors_module, "_TIMES", 2)
    with Memory.open(tmp_path, embedder=Drawn()) as memory:
        found = {query: contents(memory, query, limit=10) for query in queries}
        table = memory._state.recall._tables
        assert table is not None
        assert len(table.vectors._alike(Drawn().embed(queries[:1]).vectors[0], 200)) < 1000, "not all are compared"
        same = [len(set(found[query]) & set(exact[query])) for query in queries]
        assert sum(same) >= 0.95 * 10 * len(queries)
        assert {query: contents(memory, query, limit=10, where={"odd": 1}) for query in queries} == odd
        memory.delete("s0")
        memory.create("more").extend([NewTurn("user", f"c{n % 40} new{n}") for n in range(1500)])
        memory.index()
        left = contents(memory, queries[1], limit=20)
        assert not {text for text in left if text in texts[:500]}
        assert any("new" in text for text in left)
