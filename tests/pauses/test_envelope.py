"""KV hints envelopes: what each action comes to, and whatever a caller sends, an outcome and never an error."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.pauses.envelope import (
    HINT_OUTCOMES,
    HintOrder,
    KvHintAction,
    KvHints,
    hint_outcomes,
    hint_report,
    read_hints,
    retain_hint,
    summary,
)


def envelope(*actions: Any, protocol: str = "0.1") -> KvHints:
    """An envelope of (type, payload) or (type, payload, version), as a client's JSON."""
    rows = [
        {"action_id": f"a{n}", "action_type": kind, "action_version": (*more, "1.0")[0], "payload": payload}
        for n, (kind, payload, *more) in enumerate(actions)
    ]
    raw = json.dumps({"protocol_version": protocol, "message_id": "m", "actions": rows})
    return msgspec.json.decode(raw, type=KvHints)


BOTH = [{"start": 0, "end": 100, "priority": 90, "duration": 60.0}, {"start": 100, "end": 300, "priority": 9}]


@pytest.mark.parametrize(
    ("action", "found"),
    [
        (("kv.retain", {}), HintOrder("retain")),
        # As Dynamo writes them.
        (
            ("kv.retain", {"execute_at": "request_completion", "include_current_request": True, "block_hashes": [1],
                           "priority": 7, "ttl_seconds": 600}),
            HintOrder("retain", 600.0),
        ),
        (("kv.evict", {"include_current_request": True, "block_hashes": ["hex:00"]}), HintOrder("demote")),
        (("kv.evict", {"block_hashes": [1, "2"]}), "target"),
        # As vLLM does.
        (("kv.retain", {"scope": "alice", "directives": BOTH}), HintOrder("retain", None, 300)),
        (("kv.retain", {"directives": BOTH[:1]}), HintOrder("retain", 60.0, 100)),
        (
            ("kv.retain", {"directives": [*BOTH[:1], {"covers_output": True, "priority": 5, "duration": 5}]}),
            HintOrder("retain", 60.0),
        ),
        (("kv.retain", {"directives": [{"end": 9, "priority": 0}]}), HintOrder("demote")),
        (("kv.retain", {"directives": [BOTH[0]] * 129}), "payload"),
        (("kv.retain", {"directives": [{"priority": 101}]}), "payload"),
        # As SGLang does.
        (("kv.prefetch", {}), HintOrder("prefetch")),
        (("kv.deref", {}), HintOrder("demote")),
        (("kv.demote", {}), HintOrder("demote")),
        (("kv.demote", {"session_id": "another"}), "target"),
        # Ours.
        (("kv.pause", {"seconds": 2.5, "kind": "tool:bash"}), HintOrder("pause", 2.5, kind="tool:bash")),
        (("kv.pause", {}), HintOrder("pause", kind="tool")),
        (("kv.pause", {"kind": "coffee"}), "payload"),
        (("kv.pause", {"seconds": -1}), "payload"),
        (("kv.pause", {"seconds": "2"}), "payload"),
        (("kv.pause", {"seconds": 31 * 86400}), "payload"),
        (("kv.pause", None), "payload"),
        (("kv.pause", [1]), "payload"),
        (("kv.prefetch", {"x": "y" * 70_000}), "payload"),
        # What moves KV between machines is for engines and their routers.
        (("kv.fetch", {"source_control_endpoint": "tcp://10.0.0.1:1", "block_hashes": [1]}), "type"),
        (("KV.RETAIN", {}), "type"),
        (("kv.retain", {}, "2.0"), "version"),
        (("kv.retain", {}, "1"), HintOrder("retain")),
        (("kv.retain", {}, ""), "version"),
    ],
)  # fmt: skip
def test_actions(action: tuple[Any, ...], found: HintOrder | str) -> None:
    assert read_hints(envelope(action)) == [found]


def test_actions_of_another_protocol_are_ignored_and_the_report_says_of_each_why() -> None:
    hints = envelope(("kv.retain", {}), ("kv.fetch", {}), ("kv.pin", {"ttl_seconds": 0}))
    outcomes = hint_outcomes(read_hints(hints))
    assert summary(outcomes) == "accepted=1, type=1, payload=1"
    assert msgspec.to_builtins(hint_report(hints, outcomes)) == {
        "message_id": "m",
        "accepted": 1,
        "ignored": 2,
        "actions": [
            {"action_id": "a0", "outcome": "accepted"},
            {"action_id": "a1", "outcome": "type"},
            {"action_id": "a2", "outcome": "payload"},
        ],
    }
    assert read_hints(envelope(("kv.retain", {}), protocol="7.1")) == ["version"]
    assert (read_hints(envelope()), summary([])) == ([], "accepted=0")


@pytest.mark.parametrize(
    "wrong",
    [
        {"message_id": "m"},
        {"protocol_version": "0.1", "message_id": "", "actions": []},
        {"protocol_version": "0.1", "message_id": "m" * 513},
        {"protocol_version": 1, "message_id": "m"},
        {"protocol_version": "0.1", "message_id": "m", "actions": [{}]},
        {"protocol_version": "0.1", "message_id": "m", "actions": {}},
        {"protocol_version": "0.1", "message_id": "m", "actions": [
            {"action_id": "a", "action_type": "kv.pin", "action_version": "1"}] * 65},
    ],
)  # fmt: skip
def test_what_is_no_envelope_is_refused(wrong: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, KvHints)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_fields = ("session_id", "block_hashes", "include_current_request", "ttl_seconds", "directives", "kind", "seconds")
_rows = st.dictionaries(st.sampled_from(["priority", "start", "end", "duration", "covers_output"]), _json)
_payloads = _json | st.dictionaries(st.sampled_from(_fields), _json | st.lists(_rows, max_size=3))
_kinds = st.sampled_from(["kv.retain", "kv.pin", "kv.prefetch", "kv.demote", "kv.evict", "kv.deref", "kv.pause", "x"])


@given(st.lists(st.tuples(_kinds, _payloads, st.sampled_from(["1.0", "1.9", "2", "", "one"])), max_size=5))
def test_any_payload_has_an_outcome(actions: list[Any]) -> None:
    hints = envelope(*actions)
    found = read_hints(hints)
    report = hint_report(hints, hint_outcomes(found))
    assert len(found) == len(actions) == report.accepted + report.ignored
    assert {row.outcome for row in report.actions} <= {*HINT_OUTCOMES}
    for order in found:
        if isinstance(order, HintOrder):
            assert order.seconds is None or 0 < order.seconds <= 30 * 86400
            assert order.tokens is None or order.tokens >= 0


@given(st.text(min_size=1, max_size=600), st.floats(0.001, 1e9))
def test_what_we_ask_for_is_what_we_would_do(message: str, seconds: float) -> None:
    action = retain_hint(message, seconds)
    sent = msgspec.json.decode(msgspec.json.encode(KvHints("0.1", "m", [action])), type=KvHints)
    (order,) = read_hints(sent)
    assert isinstance(order, HintOrder)
    assert (order.name, order.tokens) == ("retain", None)
    assert order.seconds == pytest.approx(min(seconds, 30 * 86400), abs=1e-3)


def test_the_payload_may_be_missing() -> None:
    assert read_hints(KvHints("0.1", "m", [KvHintAction("a", "kv.demote", "1.0")])) == [HintOrder("demote")]
