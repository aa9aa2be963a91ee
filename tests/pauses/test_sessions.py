"""Sessions: states by what is said and what is not, hints that decay, bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.errors import ConfigError
from ctxreuse.pauses import HINTS, Estimator, Hint, Pause, PauseKind, Sessions, infer, kind_of, tools_in
from ctxreuse.pauses.hints import hint_label, weight
from ctxreuse.pauses.kinds import CLOSED, END_OF_TURN, LABELS, LENGTH, SUPERSEDED, TOOL_CALL, UNKNOWN, tool_class
from oracle.policy.pauses import hint_of
from support.examples import examples


def taught(**settings: Any) -> tuple[Sessions[str], float]:
    """Tools took two seconds, people ten minutes."""
    sessions: Sessions[str] = Sessions(**settings)
    now = 1000.0
    for n in range(30):
        for kind, away in ((TOOL_CALL, 2.0), (END_OF_TURN, 600.0)):
            sessions.begin(f"old {n % 5}", now)
            sessions.pause(f"old {n % 5}", PauseKind(kind), now + 1.0)
            now += 1.0 + away
    for n in range(5):
        sessions.forget(f"old {n}")
    return sessions, now


def test_who_waits_for_a_tool_is_worth_more_until_the_tool_is_late() -> None:
    sessions, now = taught()
    for name, kind in (("tool", TOOL_CALL), ("user", END_OF_TURN), ("over", CLOSED), ("gone", SUPERSEDED)):
        sessions.begin(name, now)
        sessions.pause(name, PauseKind(kind), now)
    assert sessions.ranked(now + 1)[-2:] == ["user", "tool"]
    late = sessions.ranked(now + 500)
    assert late.index("user") > late.index("tool")
    assert set(late[:2]) == {"over", "gone"}
    sessions.check()


def test_a_running_request_counts_by_itself_where_nobody_says_why_it_stopped() -> None:
    sessions: Sessions[int] = Sessions()
    now = 0.0
    for n in range(60):
        sessions.begin(n % 3, now)
        now += 5.0
    state = sessions.state(0, now)
    assert state is not None
    assert state.pause.stop == "running"
    assert sessions.estimator.survival(Pause("running"), 0.0, 30.0) < 0.3
    assert sessions.state(99, now) is None
    assert sessions.worth(99, now) == 0.0


def test_what_goes_on_is_learnt_from_before_it_ends() -> None:
    def chance(away: int) -> float:
        sessions, now = taught()
        for n in range(away):
            sessions.begin(f"away {n}", now)
            sessions.pause(f"away {n}", PauseKind(END_OF_TURN), now)
        for step in range(200):  # somebody else's traffic; they never come back
            sessions.begin("busy", now + 60 * step)
            sessions.pause("busy", PauseKind(TOOL_CALL), now + 60 * step + 1)
        learnt = Estimator()
        assert learnt.load(sessions.estimator.dump())
        return learnt.survival(Pause("end_of_turn"), 700.0, 600.0)

    assert chance(20) > chance(0)


def test_an_expected_return_is_believed_until_it_is_late() -> None:
    sessions, now = taught()
    for name, expect in (("soon", 5.0), ("later", 500.0), ("unknown", None), ("nonsense", float("nan"))):
        sessions.begin(name, now)
        sessions.pause(name, PauseKind(END_OF_TURN), now, expect=expect)
    assert sessions.worth("soon", now) > 5 * sessions.worth("later", now)
    assert sessions.worth("nonsense", now) == pytest.approx(sessions.worth("unknown", now), rel=0.2)
    assert sessions.worth("later", now + 480) > 2 * sessions.worth("later", now)
    assert sessions.worth("soon", now + 60) == pytest.approx(sessions.worth("unknown", now + 60), rel=0.3)
    assert sessions.rates("soon", now)[:5].max() < sessions.rates("unknown", now)[:5].max()


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_decays_to_nothing(name: str) -> None:
    hint = Hint.given(name, 100.0)
    first = hint.factor(100.0)
    assert (first < 1) is (name == "demote")
    strengths = [abs(hint.factor(100.0 + t) - 1) for t in (0, 60, 300, 3000, 30_000)]
    assert strengths == sorted(strengths, reverse=True)
    assert hint.factor(100.0 + 30_000) == pytest.approx(1.0, abs=1e-6)
    assert hint.factor(0.0) == first, "a clock that was set back does not make it stronger"
    short = Hint.given(name, 100.0, until=108.0)
    assert abs(short.factor(108.0) - 1) < 0.4 * abs(first - 1)
    assert hint_of(hint_label(name)) == name
    assert Hint.given(name, 0.0, until=float("inf")).factor(10 * 86400.0) == pytest.approx(1.0, abs=1e-3)


@given(st.lists(st.tuples(st.sampled_from(HINTS), st.floats(0, 1e6)), max_size=8), st.floats(0, 1e7))
def test_hints_together_are_bounded(given_: list[tuple[str, float]], now: float) -> None:
    hints = {name: Hint.given(name, at) for name, at in given_}
    assert 1 / 64 <= weight(hints, now) <= 512


def test_pins_cannot_fill_a_memory() -> None:
    sessions, now = taught(most=10)
    for n in range(50):
        sessions.begin(f"{n}", now + n)
        sessions.hint(f"{n}", "pin", now + n, until=now + 1e9)
        sessions.check()
        assert len(sessions.ranked(now + n)) == len(sessions) <= 10
    assert not sessions.hint("nobody", "pin", now)
    with pytest.raises(ConfigError):
        sessions.hint("49", "forever", now)


def test_who_comes_back_or_is_pinned_after_a_ranking_is_not_forgotten_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rankings, ranked = [], Sessions.ranked
    monkeypatch.setattr(Sessions, "ranked", lambda self, now: rankings.append(now) or ranked(self, now))
    sessions: Sessions[int] = Sessions(most=256)
    for n in range(256):
        sessions.begin(n, float(n))
        sessions.pause(n, PauseKind(END_OF_TURN), n + 0.5)
    sessions.begin(1000, 300.0)  # a ranking, which names the next three to go as well
    least = ranked(sessions, 300.0)[:2]
    sessions.begin(least[0], 301.0)
    for n in range(1001, 1004):
        sessions.begin(n, 302.0)
        sessions.check()
    assert least[0] in sessions
    assert least[1] not in sessions
    assert len(rankings) == 2
    least = ranked(sessions, 303.0)[:1]
    sessions.hint(least[0], "pin", 303.0)
    for n in range(2000, 2040):
        sessions.begin(n, 304.0)
    assert least[0] in sessions
    assert len(sessions) == 256
    assert len(rankings) <= 14


def test_a_return_tells_what_it_had_waited_for() -> None:
    sessions: Sessions[int] = Sessions(Estimator())
    for n in range(30):
        sessions.begin(n, 0.0)
        sessions.pause(n, PauseKind(END_OF_TURN), 1.0)
        sessions.begin(n, 3.0, was=PauseKind(TOOL_CALL))
    tool, turn = (sessions.estimator.survival(Pause(stop), 0.0, 10.0) for stop in ("tool", "end_of_turn"))
    assert tool < 0.2
    assert turn > 2 * tool


@examples("light")
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("begin", "pause", "hint", "forget")),
            st.integers(0, 6),
            st.integers(0, LABELS - 1),
            st.sampled_from((0.0, 0.3, 30.0, 4000.0, -5.0)),
        ),
        max_size=60,
    )
)
def test_any_sequence(steps: list[tuple[str, int, int, float]]) -> None:
    sessions: Sessions[int] = Sessions(most=4)
    now = 50.0
    for what, session, label, later in steps:
        now += later
        if what == "begin":
            sessions.begin(session, now, was=PauseKind.of(label) if label % 3 == 0 else None)
        elif what == "pause":
            sessions.pause(session, PauseKind.of(label), now, expect=later if label % 5 == 0 else None)
        elif what == "hint":
            sessions.hint(session, HINTS[label % len(HINTS)], now)
        else:
            sessions.forget(session)
        sessions.check()
        ranked = sessions.ranked(now)
        assert len(ranked) == len(set(ranked)) == len(sessions)
        values = [sessions.worth(one, now) for one in ranked]
        assert values == sorted(values)
        assert all(value >= 0 for value in values)


def test_labels_and_kinds() -> None:
    for label in range(-3, LABELS + 40):
        kind = PauseKind.of(label)
        assert 0 <= kind.label < LABELS
        assert PauseKind.of(kind.label) == kind
    assert PauseKind(TOOL_CALL, calls=True).stop == kind_of("tool:bash").stop == "tool"
    assert kind_of("tool:my_new_tool").reason == TOOL_CALL
    assert kind_of("length").reason == LENGTH
    assert infer("tool_calls", ["read_file"]).tool.startswith("read")
    assert infer("stop", ["read_file", "ask_user"]).tool.startswith("human"), "the slowest counts"
    assert infer("stop", text=True) == PauseKind(END_OF_TURN, text=True)
    assert infer(None).reason == infer("content_filter").reason == UNKNOWN
    with pytest.raises(ConfigError, match="end_of_turn"):
        kind_of("sleep")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Bash", "shell"),
        ("run_terminal_cmd", "shell"),
        ("read_file", "read"),
        ("WebSearch", "web"),
        ("str_replace_editor", "edit"),
        ("mcp__github__search_code", "code"),
        ("AskUserQuestion", "human"),
        ("Task", "agent"),
        ("frobnicate", ""),
        ("", ""),
        ("x" * 100_000, ""),
    ],
)
def test_classes_of_tools(name: str, kind: str) -> None:
    assert tool_class(name) == kind


@pytest.mark.parametrize(
    ("text", "tools"),
    [
        ('<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>', ["get_weather"]),
        ('{"name": "bash", "parameters": {"command": "ls"}}', ["bash"]),
        ("<function=read_file>{}</function>", ["read_file"]),
        ("Thought: look\nAction: Search\nAction Input: x", ["Search"]),
        ("An action: none. I would name it so.", []),
        ("<tool_call>" * 5000, []),
    ],
)
def test_calls_in_plain_text(text: str, tools: list[str]) -> None:
    assert sorted(set(tools_in(text))) == tools
