"""Other memories on the same texts, vectors and questions, in a Python that has them: mem0, and LangGraph's store.

Run as a program of that Python, which need not have ctxreuse: ``python memories.py NAME FOLDER``. In the folder are
``texts.json``, ``questions.json`` and their vectors as ``.npy``; what each found, and the time that it took, is printed
as JSON. The vectors are given: no time to make them is in the figures.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["found_by"]

#: Hits of a question.
HITS = 5
#: Texts added one by one, for the time of an addition; the rest goes into the store as it likes best.
ADDED = 100


def found_by(name: str, folder: Path) -> dict[str, Any]:
    """Return what a memory finds: for each question the numbers of texts, and seconds of searches and additions."""
    numpy = importlib.import_module("numpy")
    texts, questions = (json.loads((folder / f"{what}.json").read_text()) for what in ("texts", "questions"))
    vectors = {what: numpy.load(folder / f"{what}.npy").tolist() for what in ("texts", "questions")}
    known = dict(zip(texts, vectors["texts"])) | dict(zip(questions, vectors["questions"]))
    add, search = {"mem0": _mem0, "langgraph": _langgraph}[name](texts, known, folder)
    added = _timed(add, list(range(ADDED)))[1]
    found, wall, processor = [], [], []
    search(questions[0])
    for question in questions:
        began, used = time.perf_counter(), time.process_time()
        found.append(search(question))
        processor.append(time.process_time() - used)
        wall.append(time.perf_counter() - began)
    return {"found": found, "wall": wall, "processor": processor, "added": added}


def _timed(call: Callable[[int], object], values: list[int]) -> tuple[list[object], list[float]]:
    results, seconds = [], []
    for value in values:
        began = time.perf_counter()
        results.append(call(value))
        seconds.append(time.perf_counter() - began)
    return results, seconds


class _Given:
    """The vectors that were made before, in the form that mem0 calls."""

    def __init__(self, known: dict[str, list[float]]) -> None:
        self._known = known
        self.config: Any = None

    def embed(self, text: str, memory_action: str | None = None) -> list[float]:
        return self._known[text]

    def embed_batch(self, texts: list[str], memory_action: str | None = None) -> list[list[float]]:
        return [self._known[text] for text in texts]


def _mem0(texts: list[str], known: dict[str, list[float]], folder: Path) -> tuple[Any, Any]:
    """mem0 with its default store in a folder; nothing is inferred, so no model is called."""
    size = len(known[texts[0]])
    store = {"path": str(folder / "qdrant"), "embedding_model_dims": size, "on_disk": True}
    config = {
        "vector_store": {"provider": "qdrant", "config": {**store, "collection_name": "bench"}},
        "llm": {"provider": "openai", "config": {"api_key": "none"}},
        "embedder": {"provider": "openai", "config": {"api_key": "none", "embedding_dims": size}},
        "history_db_path": str(folder / "history.db"),
    }
    memory = importlib.import_module("mem0").Memory.from_config(config)
    memory.embedding_model = _Given(known)
    ids: dict[str, int] = {}

    def add(number: int) -> None:
        made = memory.add(texts[number], user_id="u", infer=False)
        ids[made["results"][0]["id"]] = number

    rest = range(ADDED, len(texts))
    uuid = importlib.import_module("uuid")
    for start in range(ADDED, len(texts), 1000):
        part = list(rest[start - ADDED : start - ADDED + 1000])
        names = [str(uuid.UUID(int=number)) for number in part]
        ids.update(zip(names, part))
        payloads = [{"data": texts[number], "user_id": "u"} for number in part]
        memory.vector_store.insert([known[texts[number]] for number in part], payloads, names)

    def search(question: str) -> list[int]:
        hits = memory.search(question, top_k=HITS, filters={"user_id": "u"}, threshold=0.0)
        return [ids[hit["id"]] for hit in hits["results"]]

    return add, search


def _langgraph(texts: list[str], known: dict[str, list[float]], folder: Path) -> tuple[Any, Any]:
    """LangGraph's store in memory, which compares a question with all vectors."""
    embed = lambda given: [known[text] for text in given]  # noqa: E731
    index = {"dims": len(known[texts[0]]), "embed": embed, "fields": ["text"]}
    store = importlib.import_module("langgraph.store.memory").InMemoryStore(index=index)

    def add(number: int) -> None:
        store.put(("u",), str(number), {"text": texts[number]})

    for number in range(ADDED, len(texts)):
        add(number)

    def search(question: str) -> list[int]:
        return [int(hit.key) for hit in store.search(("u",), query=question, limit=HITS)]

    return add, search


if __name__ == "__main__":
    print(json.dumps(found_by(sys.argv[1], Path(sys.argv[2]))))
