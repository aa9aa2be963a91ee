"""Export and import: a round trip keeps everything, and hostile data makes nothing."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from ctxreuse_agents import Memory
from hypothesis import HealthCheck, given

from ctxreuse.errors import CtxReuseError, FormatError, SessionError
from support.examples import examples

SPACE = "ab" * 32


def ids(*tokens: int) -> str:
    return base64.b64encode(b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)).decode()


def good() -> dict[str, Any]:
    turn = {"role": "user", "content": "hi", "created": 1.5, "meta": {"k": [1, None]}, "tokens": {SPACE: ids(1, 2)}}
    return {
        "format": "ctxreuse.session",
        "version": 1,
        "name": "from elsewhere",
        "turns": [turn, {"role": "tool", "content": "", "created": 2}],
    }


def test_a_round_trip_keeps_all_but_the_ids_of_turns(tmp_path: Path, memory: Memory) -> None:
    session = memory.create("trip")
    session.system("caf\u00e9 \U0001f9ed")
    session.user("x", deep={"a": [1.5, True, None, "\u00e4"]})
    space_a, space_b = bytes(32), bytes(range(32))
    for turn in session.turns():
        memory.ledger.put_tokens(space_a, {turn.id: b"\1\0\0\0"})
        memory.ledger.put_tokens(space_b, {turn.id: b"\2\0\0\0\3\0\0\0"})
    data = json.loads(json.dumps(memory.export_json("trip")))
    with Memory.open(tmp_path / "other") as other:
        back = other.import_json(data)
        assert back.name == "trip"
        for ours, theirs in zip(session.turns(), back.turns(), strict=True):
            assert (ours.role, ours.content, ours.meta) == (theirs.role, theirs.content, theirs.meta)
            assert ours.created == theirs.created
            assert other.ledger.tokens(theirs.id, space_a) == b"\1\0\0\0"
            assert other.ledger.tokens(theirs.id, space_b) == b"\2\0\0\0\3\0\0\0"
        assert other.export_json(back) == data
        other.check()
    with pytest.raises(SessionError):
        memory.import_json(data)  # the name is taken
    assert memory.import_json(data, "another").name == "another"
    empty = memory.export_json(memory.create("empty"))
    assert memory.import_json(empty, "empty too").turns() == []


def test_an_answer_continues_in_another_memory_with_the_ids_it_was_sampled_with(
    tmp_path: Path, tiny: Callable[..., Any]
) -> None:
    settings: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    with Memory.open(tmp_path / "a", tiny()) as memory:
        session = memory.create("s")
        session.ask("Why?", **settings).text  # noqa: B018
        tokens = session.tokens().tolist()
        data = memory.export_json(session)
        expected = session.ask("And?", **settings).text
    with Memory.open(tmp_path / "b", tiny()) as memory:
        session = memory.import_json(data)
        assert session.tokens().tolist() == tokens
        assert session.ask("And?", **settings).text == expected


def test_bytes_in_meta_are_named_on_the_way_out(memory: Memory) -> None:
    session = memory.create("binary")
    session.user("x", raw=b"\1")
    with pytest.raises(SessionError, match="meta contains bytes"):
        memory.export_json(session)
    with pytest.raises(SessionError):
        memory.export_json("nobody")


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(format="zip"),
        lambda d: d.update(version=2),
        lambda d: d.pop("turns"),
        lambda d: d.update(extra=1),
        lambda d: d.update(turns={}),
        lambda d: d["turns"].append(None),
        lambda d: d["turns"][0].update(role=""),
        lambda d: d["turns"][0].update(role=7),
        lambda d: d["turns"][0].update(content=b"x"),
        lambda d: d["turns"][0].update(content="\ud800"),
        lambda d: d["turns"][0].update(created=-1),
        lambda d: d["turns"][0].update(created=float("nan")),
        lambda d: d["turns"][0].update(created=1e300),
        lambda d: d["turns"][0].update(surprise=1),
        lambda d: d["turns"][0].update(meta=[]),
        lambda d: d["turns"][0].update(meta={"k": 1 << 80}),
        lambda d: d["turns"][0].update(meta={"k": "\udfff"}),
        lambda d: d["turns"][0].update(meta={1: 2}),
        lambda d: d["turns"][0].update(tokens={SPACE: "###"}),
        lambda d: d["turns"][0].update(tokens={SPACE: "AAA="}),
        lambda d: d["turns"][0].update(tokens={SPACE: ids(3, -5)}),
        lambda d: d["turns"][0].update(tokens={SPACE: 5}),
        lambda d: d["turns"][0].update(tokens={"xyz": ids(1)}),
        lambda d: d["turns"][0].update(tokens={SPACE.upper(): ids(1)}),
        lambda d: d["turns"][0].update(tokens={f"{n:064x}": ids(1) for n in range(100)}),
        lambda d: d.update(name=""),
        lambda d: d.update(name="x" * 5000),
        lambda d: d.update(name="a\nb"),
    ],
)
def test_what_is_not_right_makes_nothing(memory: Memory, change: Callable[[dict[str, Any]], object]) -> None:
    data = good()
    assert len(memory.import_json(data, "control").turns()) == 2
    change(data)
    with pytest.raises((FormatError, SessionError)):
        memory.import_json(data)
    assert [session.name for session in memory.sessions()] == ["control"]


def test_nesting_without_end_is_refused(memory: Memory) -> None:
    data = good()
    nest: Any = 1
    for _ in range(5000):
        nest = [nest]
    data["turns"][0]["meta"] = {"k": nest}
    with pytest.raises((FormatError, SessionError)):
        memory.import_json(data)
    for junk in (None, [], "text", 5, {"format": nest}):
        with pytest.raises(FormatError):
            memory.import_json(junk)  # type: ignore[arg-type]
    assert memory.sessions() == []


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(SPACE) | st.just(ids(1)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@examples("light", suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.sampled_from(["format", "version", "name", "turns", "role", "content", "created", "meta", "tokens"]), v=ANY
)
def test_any_value_anywhere_is_taken_or_refused_cleanly(memory: Memory, at: str, v: Any) -> None:
    data = copy.deepcopy(good())
    (data if at in data else data["turns"][0])[at] = v
    before = memory.stats().text.sessions
    try:
        session = memory.import_json(data)
    except CtxReuseError:
        assert memory.stats().text.sessions == before
    else:
        assert memory.import_json(memory.export_json(session), f"copy of {session.id}").turns() is not None
        memory.delete(session)
