"""Answers that another node decodes, over a real link: its tokens, and this node's own where it ends early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from demo.relay import Relay

from ctxreuse.bus.protocol.messages import Terms
from ctxreuse.bus.protocol.session import Limits
from ctxreuse.bus.transport import BusClient, BusServer, ClientOptions
from ctxreuse.constrain import Grammar
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.metrics import Metrics
from ctxreuse.peer.fetch.verifiers import CloudVerifiers
from ctxreuse.peer.serve.service import ServeOptions, StoreService
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.runtime.completion import Completion
from ctxreuse.runtime.verified import refusal
from ctxreuse.store import TieredStore
from ctxreuse.testing.engine import random_tokens
from support.answering import ThreadedVerifier
from support.letters import Letters
from support.waiting import until

pytestmark = pytest.mark.daemon

LIMITS = Limits(terms=Terms(max_payload=4096, heartbeat_ms=500, silence_ms=5000), backoff=(0.001, 0.02))


class Cloud:
    """A cloud whose model is ``engine``, and an edge with another one whose answers it decodes."""

    def __init__(self, stack: ExitStack, folder: Path, engine: Any, own: Any, passes: int | None) -> None:
        store = stack.enter_context(TieredStore(16 << 20))
        self.verifier = ThreadedVerifier(engine, store, passes)
        stack.callback(self.verifier.close)
        options = ServeOptions(tenant_of={"local": "local"}.get, verifier=self.verifier)
        self.service = StoreService(store, folder, options)
        stack.callback(self.service.close)
        self.server = stack.enter_context(BusServer(self.service, limits=LIMITS))
        self.relay = stack.enter_context(Relay(("127.0.0.1", int(self.server.endpoint.rpartition(":")[2]))))
        self.link = stack.enter_context(
            BusClient(self.relay.endpoint, ClientOptions(models=[own.space], limits=LIMITS))
        )
        until(lambda: self.link.state == "up")
        self.metrics = Metrics()
        self.runtime = Runtime(own, None, RuntimeOptions(text=Letters(), verify=True, metrics=self.metrics))
        self.runtime.let_verify(CloudVerifiers([self.link]))

    def count(self, name: str, *labels: str) -> float:
        return self.metrics.read(f"ctxreuse_{name}_total", *labels)


@pytest.fixture
def cloud(tmp_path: Path, llama: TorchEngine, other_llama: TorchEngine) -> Iterator[Callable[..., Cloud]]:
    with ExitStack() as stack:
        yield lambda own=other_llama, passes=None: Cloud(stack, tmp_path, llama, own, passes)


def plain(engine: Any, ids: Any, sampling: SamplingParams) -> list[int]:
    completion = Runtime(engine, None, RuntimeOptions(text=Letters())).complete(ids, sampling)
    completion.drain()
    return completion.tokens


def drained(completion: Completion) -> Completion:
    completion.drain()
    return completion


def sampled(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "ignore_eos": True} | options)


@pytest.mark.parametrize("how", [{}, {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.1}], ids=str)
def test_tokens_are_those_of_the_other_nodes_model(
    cloud: Callable[..., Cloud], llama: TorchEngine, how: dict[str, Any]
) -> None:
    made, ids = cloud(), random_tokens(llama, 40, 1)
    sampling = sampled(**how)
    expected, drafted = plain(llama, ids, sampling), 0
    for turn in range(12):  # the first ones learn how long drafts may be, the later ones on a loaded machine
        answer = drained(made.runtime.complete(ids, sampling))
        used = answer.usage
        assert answer.tokens == expected
        assert (used.tokens.verified, used.verification) == (40, "cloud")
        assert used.tokens.by_source == ({"cloud": 39} if turn else {})
        if turn > 2 and (drafted := used.tokens.accepted) > 10:
            break
    assert drafted > 10
    why = answer.why()
    assert why.verified is not None
    assert (why.verified.tokens, why.verified.reason) == (40, "cloud")
    assert "A cloud's model said 40 tokens of the answer, all of it." in why.text
    assert made.count("verified_tokens") == 40 * (turn + 1)
    assert made.count("verified_answers", "cloud") == 4
    assert made.count("requests", "length") == 4


def test_a_node_that_dies_in_mid_answer_leaves_the_rest_to_this_one(
    cloud: Callable[..., Cloud], llama: TorchEngine, other_llama: TorchEngine
) -> None:
    made, ids = cloud(passes=11), random_tokens(llama, 40, 2)
    first = plain(llama, ids, sampled())[:11]
    rest = plain(other_llama, [*ids.tolist(), *first], sampled(max_tokens=29))
    answer = drained(made.runtime.complete(ids, sampled()))
    assert answer.tokens == first + rest
    used = answer.usage
    assert (used.tokens.prompt, used.tokens.verified, used.verification) == (40, 11, "failed")
    assert "11 tokens of the answer; the rest is of the model here, because the cloud's engine failed" in (
        answer.why().text
    )
    assert made.count("verified_answers", "failed") == 1
    assert made.count("completion_tokens") == 40


def test_a_cut_link_and_one_that_is_down(
    cloud: Callable[..., Cloud], llama: TorchEngine, other_llama: TorchEngine
) -> None:
    made, ids = cloud(), random_tokens(llama, 40, 3)
    expected = plain(llama, ids, sampled(max_tokens=1500))
    answer = made.runtime.complete(ids, sampled(max_tokens=1500))
    for _ in range(20):
        next(answer)
    made.relay.close()
    answer.drain()
    verified = answer.usage.tokens.verified
    assert 20 <= verified < 1500
    assert answer.usage.verification == "cut"
    assert answer.tokens[:verified] == expected[:verified]
    more = sampled(max_tokens=1500 - verified)
    assert answer.tokens[verified:] == plain(other_llama, [*ids.tolist(), *answer.tokens[:verified]], more)
    until(lambda: made.link.state == "down")
    again = drained(made.runtime.complete(ids, sampled()))
    assert again.tokens == plain(other_llama, ids, sampled())
    assert (again.usage.verification, again.usage.tokens.verified) == ("down", 0)


def test_what_cannot_be_decoded_elsewhere_is_decoded_here_and_says_why(
    cloud: Callable[..., Cloud], llama: TorchEngine, other_llama: TorchEngine
) -> None:
    made, ids = cloud(), random_tokens(llama, 30, 4)
    for reason, sampling in (
        ("off", sampled(verify="off")),
        ("sampling", sampled(logit_bias={5: 3.0})),
    ):
        answer = drained(made.runtime.complete(ids, sampling))
        assert answer.tokens == plain(other_llama, ids, sampling)
        assert (answer.usage.verification, answer.usage.tokens.verified) == (reason, 0)
    both = made.runtime.complete_many(ids, [sampled(), sampled()])
    assert drained(both[0]).usage.verification == "many"
    assert refusal([sampled(grammar=Grammar.regex("[a-c]{4}"))]) == "grammar"


def test_a_cancelled_answer_frees_the_other_node(cloud: Callable[..., Cloud], llama: TorchEngine) -> None:
    made = cloud()
    answer = made.runtime.complete(random_tokens(llama, 30, 5), sampled(max_tokens=2000))
    for _ in range(5):
        next(answer)
    answer.cancel()
    assert next(answer, None) is None
    assert answer.finish == "cancelled"
    until(lambda: not made.verifier.checker.busy)
    assert made.service.counts["verified"] == 1


def test_a_stop_string_ends_the_answer_there_and_at_the_other_node(
    cloud: Callable[..., Cloud], llama: TorchEngine
) -> None:
    made, ids = cloud(), random_tokens(llama, 30, 6)
    text = Letters().decode(plain(llama, ids, sampled(max_tokens=300)))
    stop = text[30:33]
    answer = drained(made.runtime.complete(ids, sampled(max_tokens=300, stop=(stop,))))
    assert answer.finish == "stop_string"
    assert answer.text == text[: text.index(stop)]
    until(lambda: not made.verifier.checker.busy)
