"""Answers that a service decodes for its tenants: each finds its own contexts, within its share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxreuse.bus.protocol.messages import DrawRule, JudgeRule, Verdict, Verify
from ctxreuse.errors import ConfigError, LinkRefusedError
from ctxreuse.peer.serve.service import StoreService
from support.answering import ThreadedVerifier
from support.counting import SPACE, CountingEngine, next_token
from support.tenant_service import service
from support.waiting import until

PROMPT = np.arange(3, 43, dtype="<i4")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[StoreService]:
    verifier = ThreadedVerifier(CountingEngine())
    with service(tmp_path, verifier=verifier) as made:
        yield made
    verifier.close()


def request_of(**options: Any) -> Verify:
    return Verify(**{"id": 1, "space": SPACE.digest, "tokens": PROMPT.tobytes(), "count": 6} | options)


def answered(served: StoreService, tenant: str, **options: Any) -> list[Verdict]:
    """The verdicts on an answer."""
    source, found = served.open_verify(tenant, request_of(**options), lambda: None), list[Verdict]()
    until(lambda: source.ended is not None)
    found += source.verdicts()
    assert source.ended == ""
    source.close()
    source.close()
    token, said = int(PROMPT[-1]), np.concatenate([np.frombuffer(one.tokens, "<i4") for one in found])
    for one in said.tolist():
        token = next_token(token)
        assert one == token
    return found


def test_a_context_is_found_again_by_its_own_tenant_only(served: StoreService) -> None:
    for tenant, cached in (("a", 0), ("a", 39), ("b", 0), ("a", 39), ("b", 39)):
        assert answered(served, tenant)[-1].cached == cached
    assert served.counts["verified"] == 5


def test_what_is_refused(served: StoreService, tmp_path: Path) -> None:
    for where, options in (
        ("space", {"space": b"x" * 32}),
        ("tokens", {"tokens": np.array([3, SPACE.vocab_size], "<i4").tobytes()}),
        ("tokens", {"tokens": np.array([3, -1], "<i4").tobytes()}),
    ):
        with pytest.raises(LinkRefusedError) as refused:
            served.open_verify("a", request_of(**options), lambda: None)
        assert refused.value.where == where
    for rule in (DrawRule(temperature=float("nan")), DrawRule(top_p=7.0), DrawRule(repetition_penalty=-1.0)):
        with pytest.raises(ConfigError):
            served.open_verify("a", request_of(rule=rule), lambda: None)
    with service(tmp_path / "other") as other, pytest.raises(LinkRefusedError) as refused:
        other.open_verify("a", request_of(), lambda: None)
    assert refused.value.where == "space"
    for where, tokens, what in (("tokens", 129, "more than 128"), ("judge", 4, "never measured")):
        step = np.zeros(tokens, "<i4").tobytes()
        with pytest.raises(LinkRefusedError, match=what) as refused:
            served.open_verify("a", request_of(count=200, draft=step, judge=JudgeRule("digit")), lambda: None)
        assert refused.value.where == where
    assert not served._answers.taken


def test_each_tenant_has_a_share_and_gives_it_back(served: StoreService) -> None:
    served.admit("bob", b"n" * 16, ())  # a second tenant is here
    served.admit("ann", b"n" * 16, ())
    open_ones = [served.open_verify("a", request_of(), lambda: None) for _ in range(32)]
    with pytest.raises(LinkRefusedError) as refused:
        served.open_verify("a", request_of(), lambda: None)
    assert refused.value.where == "busy"
    served.open_verify("b", request_of(), lambda: None).close()
    for one in open_ones:
        one.close()
    assert not served._answers.taken


def test_a_flood_of_drafts_does_not_reach_the_engine(served: StoreService) -> None:
    passed = []
    source: Any = served.open_verify("a", request_of(), lambda: None)
    until(lambda: source.ended == "")
    source.answering = type("Counted", (), {"draft": lambda _, start, ids: passed.append(start)})()
    for start in range(1000):
        source.draft(start, PROMPT)
    assert len(passed) <= 64
    source.close()
