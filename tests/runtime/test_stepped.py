"""Answers that one node writes in steps and another one judges, over a real link: each step is accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from demo.relay import Relay

from ctxreuse.bus.protocol.messages import Terms, Verify
from ctxreuse.bus.protocol.session import Limits
from ctxreuse.bus.transport import BusClient, BusServer, ClientOptions
from ctxreuse.codec import model_digest
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import ConfigError
from ctxreuse.judge import Judged, JudgeProfile, OwnJudge, StepRule, likelihood, make_steps
from ctxreuse.metrics import Metrics
from ctxreuse.peer.fetch.verifiers import CloudVerifiers
from ctxreuse.peer.serve.service import ServeOptions, StoreService
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import TieredStore
from ctxreuse.testing.engine import random_tokens
from support.answering import ThreadedVerifier
from support.letters import Letters
from support.waiting import until

pytestmark = pytest.mark.daemon

LIMITS = Limits(terms=Terms(max_payload=4096, heartbeat_ms=500, silence_ms=5000), backoff=(0.001, 0.02))
STEP = 8
TRUSTED = Judged(0.9, -1e9, 100)


class Lines(Letters):
    """Letters, of which token 7 is a blank line."""

    def encode(self, text: str, *, markers: bool = True) -> Any:
        assert text == "\n\n"
        return np.array([7], "<i4")

    def decode(self, ids: Any) -> str:
        return "".join("\n\n" if int(i) == 7 else chr(0x100 + int(i)) for i in ids)


class Cloud:
    """A cloud whose model is ``engine``, and an edge with another one that writes steps for it."""

    def __init__(self, stack: ExitStack, folder: Path, engine: Any, own: Any, judged: Judged, rule: StepRule) -> None:
        store = stack.enter_context(TieredStore(16 << 20))
        self.verifier = ThreadedVerifier(engine, store)
        stack.callback(self.verifier.close)
        profile = JudgeProfile(model_digest(engine.space), {"likelihood": judged})
        options = ServeOptions(tenant_of={"local": "local"}.get, verifier=self.verifier, judges=lambda space: profile)
        service = StoreService(store, folder, options)
        stack.callback(service.close)
        server = stack.enter_context(BusServer(service, limits=LIMITS))
        self.relay = stack.enter_context(Relay(("127.0.0.1", int(server.endpoint.rpartition(":")[2]))))
        link = stack.enter_context(BusClient(self.relay.endpoint, ClientOptions(models=[own.space], limits=LIMITS)))
        until(lambda: link.state == "up")
        self.metrics = Metrics()
        self.runtime = Runtime(own, None, RuntimeOptions(text=Lines(), verify=True, metrics=self.metrics))
        self.runtime.let_verify(CloudVerifiers([link]), rule)

    def count(self, name: str, *labels: str) -> float:
        return self.metrics.read(f"ctxreuse_{name}_total", *labels)


@pytest.fixture
def cloud(tmp_path: Path, llama: TorchEngine, other_llama: TorchEngine) -> Iterator[Callable[..., Cloud]]:
    with ExitStack() as stack:

        def make(judged: Judged = TRUSTED, **rule: Any) -> Cloud:
            return Cloud(stack, tmp_path, llama, other_llama, judged, StepRule(**{"tokens": STEP} | rule))

        yield make


def sampled(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 45, "ignore_eos": True, "verify": "steps"} | options)


def plain(engine: Any, ids: Any, count: int) -> list[int]:
    """Greedy tokens of a model, up to a blank line."""
    runtime = Runtime(engine, None, RuntimeOptions(text=Lines()))
    answer = runtime.complete(list(ids), SamplingParams(max_tokens=count, ignore_eos=True, stop=("\n\n",)))
    answer.drain()
    return answer.tokens


def score(engine: Any, ids: list[int], step: list[int]) -> float:
    """What the cloud's model thinks of a step, computed apart."""
    tokens = np.array(ids + step[:-1], "<i4")
    (rows,) = engine.step([(engine.new_context(), tokens)], limit=None, rows=[len(step)])
    return likelihood(np.atleast_2d(rows), np.array(step, "<i4"))


def expected(
    small: Any, large: Any, ids: list[int], count: int, accepts: Callable[[list[int], list[int]], bool]
) -> Any:
    """The answer in steps, and of each step its tokens, whether it was accepted, and how many replaced it."""
    known, steps = list(ids), []
    while (left := len(ids) + count - len(known)) > 0:
        step = plain(small, known, min(STEP, left))
        right = accepts(known, step)
        anew = [] if right else plain(large, known, min(STEP, left))
        steps.append((len(step), right, len(anew)))
        known += step if right else anew
    return known[len(ids) :], steps


def told(answer: Any) -> list[tuple[int, bool, int]]:
    return [(one.drafted, one.accepted, one.rewritten) for one in answer.usage.steps]


def test_steps_are_accepted_and_rewritten_by_likelihood_and_all_are_accounted_for(
    cloud: Callable[..., Cloud], llama: TorchEngine, other_llama: TorchEngine
) -> None:
    ids = random_tokens(llama, 40, 1).tolist()
    seen = list[float]()
    expected(other_llama, llama, ids, 45, lambda known, step: bool(seen.append(score(llama, known, step))))
    limit = float(np.median(seen)) + 1e-4
    made = cloud(Judged(0.9, limit, 100))
    tokens, steps = expected(other_llama, llama, ids, 45, lambda known, step: score(llama, known, step) >= limit)
    assert len({right for _, right, _ in steps}) == 2
    answer = made.runtime.complete(ids, sampled())
    answer.drain()
    assert answer.tokens == tokens
    assert told(answer) == steps
    used = answer.usage
    assert used.verification == "steps"
    assert used.tokens.verified == sum(anew for _, _, anew in steps)
    assert (used.tokens.prompt, used.tokens.completion) == (40, 45)
    assert sum(anew or drafted for drafted, _, anew in steps) == 45
    for one in used.steps:
        assert one.score is not None
        assert min(one.seconds_drafting, one.seconds_judging) > 0
        assert (one.seconds_rewriting > 0) == (one.rewritten > 0)
    accepted = sum(right for _, right, _ in steps)
    assert f"and accepted {accepted} of {len(steps)} steps." in answer.why().text
    assert made.count("judged_steps", "accepted") == accepted
    assert made.count("judged_steps", "rewritten") == len(steps) - accepted
    assert made.count("verified_answers", "steps") == made.count("requests", "length") == 1
    # The request's own threshold counts, not the calibration's.
    for threshold, engine, share in ((-1e9, other_llama, 0), (1e9, llama, 45)):
        own = made.runtime.complete(ids, sampled(step_threshold=threshold))
        own.drain()
        assert own.usage.tokens.verified == share
        assert own.tokens[:STEP] == plain(engine, ids, STEP)[:STEP]


def test_scripted_judges_and_one_that_fails_in_mid_answer(
    cloud: Callable[..., Cloud], llama: TorchEngine, other_llama: TorchEngine
) -> None:
    script = [True, False, False, True, False, True]
    asked = list[str]()

    def scripted(before: str, step: str) -> float:
        if before.isascii():  # a labelled step of the calibration
            return float(next(one.right for one in make_steps(40) if one.step == step and one.question in before))
        asked.append(step)
        if len(asked) == 6:
            raise OSError("the judge is away")
        return float(script[len(asked) - 1])

    judge = OwnJudge(scripted, make_steps(40))
    assert (judge.judged.auc, judge.judged.threshold) == (1.0, 1.0)
    made, ids = cloud(judge=judge), random_tokens(llama, 40, 2).tolist()
    verdicts = iter(script)
    tokens, steps = expected(other_llama, llama, ids, 5 * STEP, lambda known, step: next(verdicts))
    answer = made.runtime.complete(ids, sampled(max_tokens=5 * STEP))
    answer.drain()
    assert (answer.tokens, told(answer), len(asked)) == (tokens, steps, 5)
    assert [one.score for one in answer.usage.steps] == [1, 0, 0, 1, 0]
    again = made.runtime.complete(ids, sampled(max_tokens=20))
    again.drain()
    assert again.tokens == plain(other_llama, ids, 20)
    assert again.usage.verification == "judge"
    assert [one.verdict for one in again.usage.steps] == ["unjudged"]


def test_a_judge_that_is_not_trusted_is_refused_and_this_nodes_model_answers(
    cloud: Callable[..., Cloud], llama: TorchEngine, other_llama: TorchEngine, caplog: pytest.LogCaptureFixture
) -> None:
    made, ids = cloud(Judged(0.69, -1e9, 100)), random_tokens(llama, 40, 3).tolist()
    answer = made.runtime.complete(ids, sampled())
    answer.drain()
    assert answer.tokens == plain(other_llama, ids, 45)
    assert (answer.usage.verification, answer.usage.tokens.verified) == ("judge", 0)
    assert "ctxreuse calibrate NAME --judge" in caplog.text
    assert "is not trusted" in answer.why().text
    with pytest.raises(ConfigError, match="puts a right step above a wrong one 50% of the time"):
        OwnJudge(lambda before, step: 0.0, make_steps(20))
    with pytest.raises(ConfigError, match="the judge broken failed: ZeroDivisionError"):
        OwnJudge(lambda before, step: 1 / 0, make_steps(20), "broken")


def test_a_cut_link_leaves_the_rest_to_this_node_and_a_cancelled_answer_frees_the_other(
    cloud: Callable[..., Cloud], llama: TorchEngine, other_llama: TorchEngine
) -> None:
    made, ids = cloud(), random_tokens(llama, 40, 4).tolist()
    answer = made.runtime.complete(ids, sampled(max_tokens=900))
    for _ in range(30):
        next(answer)
    answer.cancel()
    assert next(answer, None) is None
    assert answer.finish == "cancelled"
    until(lambda: not made.verifier.checker.busy)
    answer = made.runtime.complete(ids, sampled(max_tokens=160))
    for _ in range(30):
        next(answer)
    made.relay.close()
    answer.drain()
    assert answer.usage.verification in ("cut", "down")
    assert len(answer.tokens) == 160
    assert answer.tokens == plain_through(other_llama, ids, 160)
    assert {one.verdict for one in answer.usage.steps} == {"accepted", "unjudged"}


def plain_through(engine: Any, ids: list[int], count: int) -> list[int]:
    """Greedy tokens of a model."""
    answer = Runtime(engine, None, RuntimeOptions(text=Lines())).complete(
        ids, SamplingParams(max_tokens=count, ignore_eos=True)
    )
    answer.drain()
    return answer.tokens


def test_of_a_cloud_that_judges_no_steps_nothing_is_taken(
    cloud: Callable[..., Cloud], llama: TorchEngine, other_llama: TorchEngine
) -> None:
    made, ids = cloud(), random_tokens(llama, 40, 8).tolist()
    verify = made.verifier.verify

    def older(salt: bytes, request: Verify, audited: int, sink: Any) -> Any:
        return verify(salt, msgspec.structs.replace(request, judge=None), audited, sink)

    made.verifier.verify = older  # type: ignore[method-assign]
    answer = made.runtime.complete(ids, sampled())
    answer.drain()
    local = Runtime(other_llama, None, RuntimeOptions(text=Lines())).complete(ids, sampled(verify="off"))
    local.drain()
    assert answer.tokens == local.tokens
    assert (answer.usage.verification, answer.usage.tokens.verified) == ("failed", 0)
    assert [one.verdict for one in answer.usage.steps] == ["unjudged"]
