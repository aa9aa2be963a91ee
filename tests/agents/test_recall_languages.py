"""Search in other languages than English: forms of words by a language's stems, and meaning across languages."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import Memory, NewTurn

from ctxreuse.errors import ConfigError
from ctxreuse.store.recall import recall


def contents(memory: Memory, query: str, **limits: Any) -> list[str]:
    return [hit.turn.content for hit in memory.search(query, **limits)]


@pytest.mark.parametrize(
    ("language", "text", "query"),
    [
        ("de", "Die Häuser am Hafen wurden verkauft.", "haus"),
        ("es", "Las canciones que cantábamos de niños.", "canción"),
        ("fr", "Les chevaux galopaient ensemble.", "galopait"),
        ("ru", "Собаки лаяли всю ночь.", "собакой"),
        ("it", "Abbiamo mangiato benissimo.", "mangiare"),
        ("en", "The dogs were barking.", "bark"),
    ],
)
def test_a_word_is_found_in_the_forms_of_its_language(tmp_path: Path, language: str, text: str, query: str) -> None:
    with Memory.open(tmp_path, embedder="none", language=language) as memory:
        memory.create("a").extend([NewTurn("user", text), NewTurn("user", "nothing 123")])
        [hit] = memory.search(query, explain=True)
        assert hit.turn.content == text
        assert hit.snippet
        assert contents(memory, f'"{text}"') == [text], "as a phrase"
        assert contents(memory, "nothing") == ["nothing 123"], "a word of another language is found as it stands"


def test_an_index_of_another_language_is_made_again(tmp_path: Path) -> None:
    with Memory.open(tmp_path, embedder="none") as memory:
        memory.create("a").user("Wir haben die Katzen gefüttert.")
        assert contents(memory, "Katze") == []
    with Memory.open(tmp_path, embedder="none", language="de") as memory:
        assert contents(memory, "Katze") == ["Wir haben die Katzen gefüttert."]
    with Memory.open(tmp_path, embedder="none", language="de", readonly=True) as memory:
        assert len(contents(memory, "Katze")) == 1
    with Memory.open(tmp_path, embedder="none") as memory:
        assert contents(memory, "Katze") == []
        assert len(contents(memory, "Katzen")) == 1


def test_a_language_that_is_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no language 'deutsch'.*de"):
        Memory.open(tmp_path, language="deutsch")
    real = importlib.import_module

    def without(name: str) -> Any:
        if name == "snowballstemmer":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ConfigError, match=r"ctxreuse\[languages\]"):
        Memory.open(tmp_path, language="de")
    Memory.open(tmp_path).close()


def test_what_is_said_in_another_language_is_found(tmp_path: Path) -> None:
    texts = ["Meine Hunde heißen Rex und Mia.", "La factura se pagó en mayo.", "我每天早上跑五公里。"]
    with Memory.open(tmp_path, embedder="multilingual") as memory:
        memory.create("a").extend([NewTurn("user", text) for text in texts])
        memory.index()
        for question, text in zip(["names of my pets", "When was the invoice paid?", "Treibe ich Sport?"], texts):
            first = memory.search(question, explain=True)[0]
            assert first.turn.content == text
            assert first.explain["vectors"]["rank"] == 1
        assert contents(memory, "factura")[0] == texts[1]


def test_without_its_extra_search_goes_on_by_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recall._open_shared.cache_clear()
    monkeypatch.setattr("ctxreuse.embed.multilingual._PACKAGE", "a_package_that_is_not_installed")
    with Memory.open(tmp_path, embedder="multilingual") as memory:
        memory.create("a").user("the dogs bark")
        assert contents(memory, "dog") == ["the dogs bark"]
    assert "ctxreuse[multilingual]" in caplog.text
