"""Documents of a question are put into the order whose KV is cached, and the answer's ``why`` says so."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import Answer, Memory, Session

from ctxreuse.errors import ConfigError
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import open_store
from support.shuffled import gate

DOCUMENTS = [text * 8 for text in ("The tower stands in Ness.", "Boats bring oil.", "Fog: the horn sounds twice.")]


@pytest.fixture
def stored(tmp_path: Path, engine: Any) -> Iterator[Memory]:
    with open_store(tmp_path / "kv", capacity=1 << 27) as store:
        runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0))
        with Memory.open(tmp_path / "m", runtime) as memory:
            yield memory
            memory.check()
        runtime.close()


def ask(memory: Memory, documents: list[str], question: str = "How often?", **more: Any) -> Answer:
    answer = memory.create().ask(question, documents=documents, max_tokens=1, **more)
    assert answer.text is not None
    memory.flush()
    return answer


def text_of(memory: Memory, answer: Answer) -> str:
    session = next(one for one in memory.sessions() if one.id == answer.session_id)
    return memory.session(session.name).turns()[0].content


def test_cached_documents_come_first_and_why_says_what_that_saved(stored: Memory) -> None:
    ask(stored, DOCUMENTS)
    answer = ask(stored, [DOCUMENTS[2], "A new one. " * 9, DOCUMENTS[0], DOCUMENTS[1]])
    why = answer.why()
    assert why.reordered is not None
    assert why.reordered.order == (2, 3, 0, 1)
    assert why.reordered.cached - why.reordered.as_given > len(DOCUMENTS[0] + DOCUMENTS[1])
    assert answer.usage.cached_tokens == why.reordered.cached
    kv = f"KV of {why.reordered.cached:,} tokens was cached for it, of {why.reordered.as_given:,} as given"
    assert f"The 4 documents were put into the order 3, 4, 1, 2: {kv}" in why.text
    assert text_of(stored, answer).startswith(DOCUMENTS[0] + "\n\n" + DOCUMENTS[1])


def test_the_order_given_can_be_kept(stored: Memory) -> None:
    ask(stored, DOCUMENTS)
    answer = ask(stored, DOCUMENTS[::-1], order="given")
    assert answer.why().reordered is None
    assert text_of(stored, answer) == "\n\n".join([*DOCUMENTS[::-1], "How often?"])


def test_the_model_is_told_the_ranking_on_request(stored: Memory) -> None:
    ask(stored, DOCUMENTS)
    answer = ask(stored, [DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[1]], order="ranked")
    line = "(Documents by relevance, best first: 3, 1, 2.)"
    assert text_of(stored, answer) == "\n\n".join([*DOCUMENTS, line, "How often?"])
    assert answer.usage.cached_tokens == len("".join(DOCUMENTS)) // 64 * 64


def test_random_questions_lose_no_document_and_are_predicted_exactly(stored: Memory) -> None:
    rng = random.Random(2)
    for _ in range(12):
        documents = rng.sample([*DOCUMENTS, "Ness lies north. " * 6, " indented", "x"], rng.randint(2, 5))
        answer = ask(stored, documents)
        whole, made = text_of(stored, answer), answer.why().reordered
        assert len(whole) == len("\n\n".join([*documents, "How often?"]))
        assert all(document + "\n\n" in whole for document in documents)
        if made is not None:
            assert answer.usage.cached_tokens == made.cached >= made.as_given
            order = [documents[index] for index in made.order]
            assert whole == "\n\n".join([*order, "How often?"])


def test_documents_whose_kv_is_found_anywhere_stay_as_given(tmp_path: Path, engine: Any) -> None:
    with open_store(tmp_path / "kv", capacity=1 << 27) as store:
        runtime = Runtime(engine, store, RuntimeOptions(gate=gate(engine), context_cache_bytes=0))
        with Memory.open(tmp_path / "m", runtime, max_kl=0.05) as memory:
            ask(memory, DOCUMENTS)
            answer = ask(memory, DOCUMENTS[::-1])
            assert answer.why().reordered is None
            assert answer.usage.tokens.relocated > len(DOCUMENTS[0])
        runtime.close()


def test_another_order_is_refused(stored: Memory) -> None:
    with pytest.raises(ConfigError, match="'best'"):
        stored.create().ask("?", documents=DOCUMENTS, order="best")  # type: ignore[arg-type]


def test_a_document_that_the_session_has_is_pointed_to_on_request(stored: Memory) -> None:
    tower, boats, short = "The tower stands in Ness. " * 16, "Boats bring oil in fog. " * 17, "Fog."

    def asked(session: Session, *documents: str, **how: Any) -> tuple[list[str], int]:
        answer = session.ask("How often?", documents=documents, max_tokens=1, **how)
        assert answer.text is not None
        return session.turns()[-2].content.split("\n\n"), answer.usage.tokens.prompt

    session = stored.create()
    session.tool(boats)  # a tool's result
    said, before = asked(session, tower, short, pointers=True)
    assert said == [tower, short, "How often?"]
    again, after = asked(session, boats, short, tower, pointers=True, order="given")
    assert again[1::2] == [short, "How often?"]
    for line, text in zip(again[::2], (boats, tower)):
        assert f"the text of {len(text)} characters above" in line
        assert text[:20] in line
    assert after - before < len(tower)
    assert asked(session.fork(), tower)[0][0] == tower  # as it is unless asked
    # In one question, too: behind its text, wherever the order puts that.
    stored.flush()
    moved, _ = asked(stored.create(), short, boats, boats, tower, pointers=True)
    assert moved.index(boats) < next(at for at, text in enumerate(moved) if text.startswith("(Here stands"))
    assert len(moved) == 5
