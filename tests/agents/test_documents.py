"""Questions over documents: one durable turn whose parts keep their ids in any order, and what of them is reused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from ctxreuse_agents import AsyncMemory, Memory, Message
from ctxreuse_agents.segments import Segment, unpack
from hypothesis import given

from ctxreuse.errors import ContextTooLongError, SessionError
from ctxreuse.runtime import Runtime, RuntimeOptions, Usage
from ctxreuse.store import open_store
from support.shuffled import gate

SHORT = {"max_tokens": 4, "ignore_eos": True}
TRIMS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DOCUMENTS = ["The tower stands in Ness.", "Boats bring oil.", "Fog: the horn sounds twice."]


def test_documents_and_question_are_one_durable_turn(tmp_path: Path, engine: Any) -> None:
    with Memory.open(tmp_path / "m", engine) as memory:
        session = memory.session("s")
        answer = session.ask("How often?", documents=DOCUMENTS, **SHORT)
        assert answer.text
        (question, _) = session.turns()
        assert question.content == "\n\n".join([*DOCUMENTS, "How often?"])
        ends = question.meta["cuts"]
        assert [question.content[a:b] for a, b in pairwise([0, *ends])] == [text + "\n\n" for text in DOCUMENTS]
        assert session.messages()[0] == Message("user", question.content, None, tuple(ends))
        before = session.tokens()
    with Memory.open(tmp_path / "m", engine) as memory:
        session = memory.session("s")
        assert session.tokens().tolist() == before.tolist()
        copy = memory.import_json(json.loads(json.dumps(memory.export_json(session))), "copy")
        assert copy.tokens().tolist() == before.tolist()
        assert copy.turns()[0].meta == {"cuts": ends}
        memory.check()


@pytest.mark.parametrize("template", [None, TRIMS], ids=["plain", "trimming"])
def test_parts_come_back_with_the_ids(tmp_path: Path, tiny: Callable[..., Any], template: str | None) -> None:
    engine = tiny() if template is None else tiny(template)
    with Memory.open(tmp_path / "m", engine) as memory:
        session = memory.session("s")
        session.system("Be kind.")
        session.ask("first?", documents=DOCUMENTS, **SHORT).text  # noqa: B018
        session.ask("second?", documents=DOCUMENTS[::-1], **SHORT).text  # noqa: B018
        segments = memory._state.engine()[1]
        held, cuts = segments.outline(session.turns())
        # Made anew from text and meta they are the same as what was kept with the turns.
        again = memory.create()
        for turn in session.turns():
            again.append(turn.role, turn.content, **{k: v for k, v in turn.meta.items() if k == "cuts"})
        ids, same = segments.outline(again.turns())
        assert engine.text.decode(ids, markers=True) == engine.text.render(session.messages(), generate=False)
        assert segments.prompt(session.turns()).cuts == cuts
        edges = [0, *cuts, len(held)]
        spans = [engine.text.decode(held[a:b].tolist(), markers=True) for a, b in pairwise(edges)]
        for document in DOCUMENTS:
            assert spans.count(document + "\n\n") == 2
        assert [cut for cut in same if cut <= 40] == [cut for cut in cuts if cut <= 40]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.sets(st.integers(0, 21)), st.booleans())
def test_segments_survive_being_packed(ids: list[int], cuts: set[int], whole: bool) -> None:
    inner = tuple(sorted(cut for cut in cuts if 0 < cut < len(ids)))
    found = unpack(Segment(np.array(ids, "<i4"), whole, inner).pack(), 301)
    assert found is not None
    assert (found.ids.tolist(), found.whole, found.cuts) == (ids, whole, inner)


@pytest.mark.parametrize("raw", [[-2], [-2, 5], [5, -2], [5, -2, -2, 6], [-1, -2, 5], [5, -3, 6], [5, -1, 6]])
def test_segments_that_nothing_packed_are_none(raw: list[int]) -> None:
    assert unpack(np.array(raw, "<i4").tobytes()) is None


@pytest.mark.parametrize("cuts", ["12", [1.5], {"a": 1}, [True], [-5, 2**62], [0, 17]])
def test_cuts_that_are_none_are_left_alone(asked: Memory, cuts: Any) -> None:
    session, plain = asked.create(), asked.create()
    session.user("Ness has a tower.", cuts=cuts)
    plain.user("Ness has a tower.")
    assert session.tokens().tolist() == plain.tokens().tolist()


@pytest.mark.parametrize("documents", ["one text", [b"bytes"], [1], ["\ud800"]])
def test_documents_that_are_no_texts_add_no_turn(asked: Memory, documents: Any) -> None:
    session = asked.create()
    with pytest.raises(SessionError, match="document"):
        session.ask("?", documents=documents)
    assert session.turns() == []


def test_documents_that_do_not_fit_add_no_turn(asked: Memory) -> None:
    session = asked.create()
    with pytest.raises(ContextTooLongError):
        session.ask("?", documents=["long " * 500] * 2)
    assert session.turns() == []


def test_asyncio_asks_over_documents_too(tmp_path: Path, engine: Any) -> None:
    async def run() -> list[int]:
        async with await AsyncMemory.open(tmp_path / "m", engine) as memory:
            session = await memory.create()
            async with await session.ask("How often?", documents=DOCUMENTS, **SHORT) as answer:
                assert (await answer.usage()).gate_decision == ""
                await answer.text()
            return list((await session.turns())[0].meta["cuts"])

    cuts = asyncio.run(run())
    assert len(cuts) == 3


LONG = [document * 8 for document in DOCUMENTS]


@pytest.fixture
def moving(tmp_path: Path, engine: Any) -> Iterator[Memory]:
    """A memory whose sessions may reuse documents at other positions."""
    with open_store(tmp_path / "kv", capacity=1 << 27) as store:
        runtime = Runtime(engine, store, RuntimeOptions(gate=gate(engine), context_cache_bytes=0))
        with Memory.open(tmp_path / "m", runtime, max_kl=0.05) as memory:
            yield memory
            memory.check()
        runtime.close()


def asked(memory: Memory, documents: list[str], **more: Any) -> Usage:
    session = memory.create(**more)
    session.system("Answer from the documents in one short sentence.")
    answer = session.ask("How often?", documents=documents, max_tokens=3)
    assert answer.text is not None
    memory.flush()
    assert answer.usage.cached_tokens == sum(answer.usage.tokens.by_source.values()) < answer.usage.prompt_tokens
    return answer.usage


def test_documents_in_any_order_and_number_are_moved(moving: Memory) -> None:
    first = asked(moving, LONG)
    assert (first.tokens.relocated, first.gate_decision) == (0, "")
    for documents in (LONG[::-1], LONG[1:], [LONG[2], LONG[0]], [LONG[1]]):
        usage = asked(moving, documents)
        assert usage.gate_decision == "kl-0.020 by rotate"
        assert usage.tokens.relocated > 0.7 * sum(map(len, documents))
        assert usage.prompt_tokens - usage.cached_tokens < 140
    new = "Nobody has asked about this one before now. " * 4
    mixed = asked(moving, [LONG[2], new, LONG[0]])
    assert mixed.tokens.relocated > 0.8 * len(LONG[0] + LONG[2])
    assert mixed.prompt_tokens - mixed.cached_tokens > len(new)
    # It was computed behind moved rows, and is found from elsewhere all the same.
    assert asked(moving, [new, LONG[1]]).tokens.relocated > 0.8 * len(LONG[1] + new)


def test_an_exact_session_among_them_moves_nothing(moving: Memory) -> None:
    asked(moving, LONG)
    exact = asked(moving, LONG[::-1], max_kl=0.0)
    assert (exact.tokens.relocated, exact.gate_decision, exact.approximate) == (0, "", False)
    assert asked(moving, LONG[::-1]).cached_tokens > 0


def test_a_session_goes_on_and_explains_itself(moving: Memory) -> None:
    asked(moving, LONG)
    session = moving.create()
    session.system("Answer from the documents in one short sentence.")
    answer = session.ask("How often?", documents=LONG[::-1], max_tokens=70, ignore_eos=True)
    usage = (answer.text, answer.usage)[1]
    assert (
        f"{usage.tokens.relocated:,} of these were relocated from other positions (kl-0.020 by rotate)."
        in session.why().text
    )
    moving.flush()
    second = session.ask("And when?", documents=[LONG[1]], max_tokens=3).usage
    # The first turn is stored now, as its answer hangs on it; the new document comes from where it stood first.
    assert second.tokens.relocated > 0.8 * len(LONG[1])
    assert second.cached_tokens > 0.9 * second.prompt_tokens
    assert second.approximate
    assert session.warm().cached_tokens > 0.8 * second.prompt_tokens
