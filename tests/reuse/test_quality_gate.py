"""The gate lets through what was measured to be good enough, and says why it does not."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.block.levels import allowed_by, expected_kl
from ctxreuse.codec import model_digest
from ctxreuse.reuse import ChunkProfile, ChunkRun, PolicyMeasurement, QualityGate, RowSource
from ctxreuse.reuse.inplace import Selection
from ctxreuse.reuse.profile import InPlaceMeasurement
from support.made_up import SPACE

BOTH = {"head", "behind"}


def row(repair: str, kind: str, high: float, recomputed: float = 0.0, chunks: int = 4) -> PolicyMeasurement:
    return PolicyMeasurement(repair, kind, chunks, 192, high * 0.8, high, 0.9, 0.03, recomputed, 20)  # type: ignore[arg-type]


def gate(*rows: PolicyMeasurement, **changes: Any) -> QualityGate:
    usual = {"model": model_digest(SPACE), "probe_layer": 1, "limits": {"behind": 0.3, "head": 0.5}}
    return QualityGate(SPACE, ChunkProfile(measured=rows, **{**usual, **changes}))


def run(start: int, tokens: int, kind: str) -> ChunkRun:
    source = RowSource((b"k" * 32,), 0, tokens, 0)
    return ChunkRun(start, start + tokens, (source,), start, kind)  # type: ignore[arg-type]


LADDER = (
    row("rotate", "behind", 0.0243),
    row("rotate", "head", 0.0664),
    row("first-8", "behind", 0.022, 0.04),
    row("first-8", "head", 0.0293, 0.04),
    row("v-15%", "behind", 0.015, 0.18),
    row("v-15%", "head", 0.0222, 0.18),
)


def test_the_repair_that_computes_least_of_those_that_fit() -> None:
    it = gate(*LADDER)
    assert it.decide(0.05, {"behind"}).policy == "rotate"
    assert it.decide(0.05, BOTH).policy == "first-8"
    assert it.decide(0.07, BOTH).policy == "rotate"
    assert it.decide(0.023, BOTH).policy == "v-15%"
    verdict = it.decide(0.05, {"behind"})
    assert (verdict.allowed, verdict.level, verdict.reason) == (True, "approx~kl-0.025", "kl-0.025 by rotate")
    assert (verdict.kl, verdict.recomputed) == (0.0243, 0.0)


def test_a_budget_is_spent_on_the_best_repair_that_it_pays_for() -> None:
    it = gate(*LADDER)
    assert it.decide(0.05, BOTH, most=1.0).policy == "v-15%"
    assert it.decide(0.05, BOTH, most=0.18).policy == "v-15%"
    assert it.decide(0.05, BOTH, most=0.1).policy == "first-8"
    verdict = it.decide(0.05, BOTH, most=0.03)
    assert not verdict.allowed
    assert verdict.reason == (
        "refused: no policy within the budget: first-8, the cheapest that is good enough for a KL of 0.05, recomputes"
        " 4.0% of what is relocated, and 3.0% is allowed"
    )
    assert it.decide(0.07, BOTH, most=0.0).policy == "rotate"


def test_a_budget_in_tokens_is_one_of_those_that_are_moved() -> None:
    it, runs = gate(*LADDER), [run(100, 200, "behind"), run(300, 200, "head")]
    asked = list[int]()

    def budget(tokens: int) -> int:
        asked.append(tokens)
        return 16

    verdict, admitted = it.admit(0.05, runs, budget)
    assert (verdict.policy, admitted) == ("first-8", runs)  # 16 of 400
    assert asked == [400, 200]
    verdict, admitted = it.admit(0.05, runs, lambda tokens: 15)
    # Where the first one may be computed, what stood behind others needs nothing but to be turned.
    assert (verdict.policy, admitted) == ("first-8", runs[:1])
    verdict, admitted = it.admit(0.05, runs, lambda tokens: 0)
    assert (verdict.policy, admitted) == ("rotate", runs[:1])
    verdict, admitted = it.admit(0.02, runs, lambda tokens: 20)
    assert not verdict.allowed
    assert not admitted


def test_held_runs_are_read_as_little_as_is_allowed() -> None:
    def read(format: str, share: float | None, high: float) -> InPlaceMeasurement:
        selection = None if share is None else Selection(share)
        return InPlaceMeasurement(format, selection, 896, high * 0.8, high, 0.9, 0.01, 6)  # type: ignore[arg-type]

    it = gate(in_place=(read("int8", None, 0.002), read("int8", 0.5, 0.013), read("int8", 0.25, 0.046)))
    assert it.in_place(0.05)[1] == Selection(0.25)
    verdict, selection = it.in_place(0.02)
    assert (verdict.level, selection) == ("approx~kl-0.013", Selection(0.5))
    assert verdict.reason == "kl-0.013 by reading 50% of int8, pages of 16"
    assert it.in_place(0.05, below=0.03)[0].level == "approx~kl-0.043"
    assert it.in_place(0.02, below=0.01)[1] is None
    for max_kl, format, why in (
        (None, "int8", "exact session"),
        (0.001, "int8", "not good enough: reading int8 has a KL of 0.002"),
        (0.05, "int4", "nothing is known of int4 in place"),
    ):
        verdict, selection = it.in_place(max_kl, format)
        assert (verdict.allowed, selection) == (False, None)
        assert why in verdict.reason


def test_the_worst_of_several_measurements_counts() -> None:
    it = gate(row("rotate", "behind", 0.02), row("rotate", "behind", 0.04, chunks=8), row("v-5%", "behind", 0.02, 0.08))
    assert it.decide(0.03, {"behind"}).policy == "v-5%"


@given(high=st.floats(0, 2), allowed=st.integers(1, 2000))
def test_what_is_promised_holds_and_is_allowed(high: float, allowed: int) -> None:
    max_kl = allowed / 1000
    verdict = gate(row("rotate", "behind", high)).decide(max_kl, {"behind"})
    if verdict.allowed:
        assert allowed_by(verdict.level, max_kl)
        assert high <= expected_kl(verdict.level) + 1e-9
        assert expected_kl(verdict.level) >= 0.001  # moved rows are never passed off as exact
    else:
        assert high > max_kl - 0.001


def test_refusals_say_what_to_do() -> None:
    it = gate(*LADDER)
    for verdict, words in (
        (it.decide(None, {"behind"}), "exact session"),
        (QualityGate(SPACE, None).decide(0.05, {"behind"}), "ctxreuse calibrate"),
        (it.decide(0.001, {"behind"}), "the best policy, v-15%, has a KL of 0.012"),
        (it.decide(0.05, set()), "ctxreuse calibrate"),
        (gate(row("rotate", "behind", 0.02)).decide(0.05, BOTH), "nothing on behind and head runs"),
        (gate().decide(0.05, {"behind"}), "ctxreuse calibrate"),
        (gate(*LADDER, limits={}).decide(0.05, {"behind"}), "behind runs of this model look like wrong ones"),
    ):
        assert not verdict.allowed
        assert verdict.level == verdict.policy == ""
        assert verdict.kl == math.inf
        assert verdict.reason.startswith("refused: ")
        assert words in verdict.reason


def test_what_a_source_lost_in_its_code_adds_up() -> None:
    it = gate(*LADDER)
    coded = run(0, 64, "behind")._replace(level="kl-0.01@0123456789abcdef")
    computed = run(64, 64, "behind")._replace(level="approx~kl-0.03")
    verdict, runs = it.admit(0.035, [coded, computed])
    assert (verdict.policy, verdict.level, len(runs)) == ("rotate", "approx~kl-0.035", 2)
    assert it.admit(0.034, [coded])[0].policy == "first-8"
    verdict, runs = it.admit(0.02, [coded, computed])  # with the code it would be 0.025 at least
    assert (verdict.policy, runs) == ("v-15%", [computed])
    verdict, runs = it.admit(0.02, [coded])
    assert not verdict.allowed
    assert not runs
    assert "its sources another 0.01" in verdict.reason


def test_a_card_of_another_model_is_none() -> None:
    it = gate(*LADDER, model=bytes(32))
    assert it.profile is None
    assert not it.decide(0.05, {"behind"}).allowed
    assert it.exceeded("behind", 0.0)


@pytest.mark.parametrize(
    ("deviation", "over"), [(0.0, False), (0.3, False), (0.31, True), (math.inf, True), (math.nan, True)]
)
def test_a_run_that_deviates_more_than_was_measured_is_computed(deviation: float, over: bool) -> None:
    assert gate(*LADDER).exceeded("behind", deviation) == over
    assert gate(*LADDER, limits={"head": 9.0}).exceeded("behind", deviation)


def test_runs_of_a_head_are_left_out_where_they_would_cost_the_others() -> None:
    it = gate(*LADDER)
    behind, head = [run(100, 1000, "behind"), run(1200, 500, "behind")], run(2000, 40, "head")
    verdict, runs = it.admit(0.05, [*behind, head])
    # first-8 for all would compute 62 of 1,540, leaving the head's out 40.
    assert (verdict.policy, runs) == ("rotate", behind)
    verdict, runs = it.admit(0.05, [run(100, 100, "behind"), run(300, 400, "head")])
    assert (verdict.policy, [one.kind for one in runs]) == ("first-8", ["behind", "head"])
    assert it.admit(0.07, [*behind, head])[1] == [*behind, head]


def test_runs_of_a_head_are_left_out_where_they_are_refused() -> None:
    behind, head = run(100, 1000, "behind"), run(2000, 400, "head")
    it = gate(row("rotate", "behind", 0.02), row("rotate", "head", 0.2))
    assert it.admit(0.05, [behind, head])[1] == [behind]
    assert it.admit(0.05, [head]) == (it.decide(0.05, {"head"}), [])
    for max_kl in (None, 0.01):
        verdict, runs = it.admit(max_kl, [behind, head])
        assert (verdict.allowed, runs) == (False, [])
