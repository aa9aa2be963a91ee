"""Prices of nodes: where a prompt is cached, what waits, and what work done again costs; bounded and consistent."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ctxreuse.cost.lines import PrefillLine
from ctxreuse.routing import KnownPrefixes, NodeLoad, PrefixRun, Route, Router, wasted_price

NODES = ("a", "b", "c")


def path(*names: str, tokens: int = 100) -> list[PrefixRun]:
    """Runs of a prompt; a key names all up to its end."""
    return [PrefixRun("/".join(names[: n + 1]), tokens) for n in range(len(names))]


def send(router: Router, runs: list[PrefixRun], now: float, nodes: tuple[str, ...] = NODES) -> tuple[Route, int]:
    route = router.choose(runs, nodes, now)
    return route, router.begin(route, runs, now)


def test_a_conversation_stays_where_it_is_cached() -> None:
    router = Router()
    first, number = send(router, path("system", "one"), 0.0)
    router.started(number, 1.0)
    for turn in range(2, 6):
        names = ("system", "one", *map(str, range(turn)))
        route, number = send(router, path(*names), float(turn))
        router.started(number, turn + 0.5)
        assert route.chosen.node == first.chosen.node
        assert route.chosen.cached >= 200
        assert route.tokens == 100 * len(names)


def test_requests_that_begin_alike_are_spread_when_one_node_is_busy() -> None:
    """The first node gets what it has cached until the queue there costs more than computing the prefix again."""
    router = Router()
    prompts = [[PrefixRun("system", 8000), PrefixRun(n, 500)] for n in range(40)]
    nodes = [send(router, prompt, 0.0)[0].chosen.node for prompt in prompts]
    assert len(set(nodes)) == 3
    assert nodes[0] == nodes[1]


def measured() -> PrefillLine:
    """A line that says how long a token takes."""
    line = PrefillLine()
    line.observe(1000, 0, 1.0)
    return line


def test_what_waits_is_worked_off() -> None:
    load = NodeLoad(measured())
    load.begin(1, 4.0, now=10.0)
    load.begin(2, 2.0, now=10.0)
    assert load.queue(10.0) == 6.0
    assert load.queue(13.0) == 3.0
    assert load.queue(99.0) == 2.0 + 85.0, "the one at the head is late, the other has not begun"
    load.end(1, now=12.0)
    assert load.queue(13.0) == 1.0
    load.end(2, now=13.5)
    load.end(2, now=13.6)
    assert (load.queue(14.0), load.waiting) == (0.0, 0)


def test_an_answer_that_comes_whole_is_never_late() -> None:
    load = NodeLoad(measured())
    load.begin(1, 4.0, now=10.0, silent=True)
    load.begin(2, 2.0, now=10.0)
    assert load.queue(99.0) == 2.0
    load.end(1, now=100.0)
    assert load.queue(103.0) == 1.0


def test_nothing_is_late_before_anything_was_measured() -> None:
    """Six requests of two beginnings at a fleet that has just started: each beginning is computed once."""
    router = Router()
    prompts = [[PrefixRun(name, 1000), PrefixRun((name, n), 50)] for n in range(3) for name in ("x", "y")]
    nodes = [send(router, prompt, n / 2)[0].chosen.node for n, prompt in enumerate(prompts)]
    assert len(set(nodes[::2])) == len(set(nodes[1::2])) == 1
    assert nodes[0] != nodes[1]


def test_a_node_where_requests_wait_longer_than_they_should_is_believed_less() -> None:
    router = Router()
    _, number = send(router, path("first", tokens=1000), 0.0, ("a",))
    router.started(number, 1.0, measured=True)
    now = 1.0
    for n in range(40):
        _, one = send(router, path(f"one {n}", tokens=1000), now, ("a",))
        route, two = send(router, path(f"two {n}", tokens=1000), now, ("a",))
        router.started(one, now + 1.0)
        router.started(two, now + 4.0, measured=True)  # three seconds late: answers were made in between
        now += 10
    assert route.chosen.queue == pytest.approx(3.0, rel=0.2)
    assert router.load("a").queue(now) == 0.0


def test_the_speed_of_nodes_is_learned_from_prompts_that_waited_for_nothing() -> None:
    router = Router()
    for n in range(20):
        route, number = send(router, path(f"fresh {n}", tokens=1000 + 50 * n), 100.0 * n, ("one",))
        router.started(number, 100.0 * n + 2e-3 * route.tokens, measured=True)
    for node in ("one", "new"):
        assert router.load(node).seconds(3000, 0, 2000.0) == pytest.approx(6.0, rel=0.2)
    before = len(router.prefill)
    _, one = send(router, path("x"), 5000.0, ("one",))
    _, two = send(router, path("y"), 5000.0, ("one",))
    router.started(one, 5001.0)
    router.started(two, 5009.0, measured=True)
    assert len(router.prefill) == before, "a whole answer, and one that waited, say nothing of it"


def test_a_node_that_was_slow_is_tried_again() -> None:
    router = Router()
    for n in range(40):
        for node, seconds in (("fast", 1.0), ("slow", 3.0)):
            _, number = send(router, path(f"{node} {n}", tokens=1000), 10.0 * n, (node,))
            router.started(number, 10.0 * n + seconds, measured=True)
    fast, slow = (router.load(node).seconds(1000, 0, 400.0) for node in ("fast", "slow"))
    assert slow > 1.8 * fast
    route, _ = send(router, path("new", tokens=1000), 400.0, ("fast", "slow"))
    assert route.chosen.node == "fast"
    late = [router.load(node).seconds(1000, 0, 9999.0) for node in ("fast", "slow")]
    assert late[0] == pytest.approx(late[1], rel=0.01)


def test_work_done_again_costs_more_the_busier_the_nodes_are() -> None:
    prices = [wasted_price(busy) for busy in (0.0, 0.3, 0.6, 0.9, 5.0)]
    assert prices == sorted(prices)
    assert (prices[0], prices[-1]) == (pytest.approx(0.3), pytest.approx(30.0))


def test_a_failed_request_leaves_nothing() -> None:
    router = Router()
    runs = path("system", "one")
    route, number = send(router, runs, 0.0)
    router.failed(number, 1.0)
    router.started(number, 2.0)
    assert router.known(route.chosen.node).match(runs) == 0
    assert router.load(route.chosen.node).queue(1.0) == 0.0
    router.check()


def test_a_failed_request_takes_nothing_from_others() -> None:
    router = Router()
    _, number = send(router, path("system", "one"), 0.0, ("a",))
    router.started(number, 1.0)
    _, number = send(router, path("system", "two"), 2.0, ("a",))
    router.failed(number, 3.0)
    assert router.known("a").match(path("system", "one")) == 200
    assert router.known("a").match(path("system", "two")) == 100


def test_one_first_run_that_all_share_does_not_send_all_to_one_node() -> None:
    router = Router()
    counts = dict.fromkeys(NODES, 0)
    for n in range(60):
        route, _ = send(router, [PrefixRun("all", 10), PrefixRun(n, 2000)], float(n) / 10)
        counts[route.chosen.node] += 1
    assert min(counts.values()) > 10


def test_many_different_beginnings_take_bounded_memory() -> None:
    known = KnownPrefixes(1e12, entries=1000)
    for n in range(100_000):
        known.note([PrefixRun(n, 1)])
    assert len(known) == 1000
    known.check()


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    known = KnownPrefixes(350)
    known.note(path("a", "b", "c"))
    known.note(path("x"))
    assert known.match(path("a", "b", "c")) == 200
    assert known.tokens == 300
    known.forget("a/b")
    assert known.match(path("a", "b")) == 100
    known.clear()
    assert (len(known), known.tokens) == (0, 0)


class Routing(RuleBasedStateMachine):
    """Any order of requests, first tokens and failures."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.now = Router(2_000), 0.0
        self.sent: list[int] = []

    @rule(names=st.lists(st.sampled_from("abc"), max_size=5), nodes=st.sets(st.sampled_from(NODES), min_size=1))
    def request(self, names: list[str], nodes: set[str]) -> None:
        runs = path(*names)
        route, number = send(self.router, runs, self.now, tuple(sorted(nodes)))
        assert {route.chosen.node, *(one.node for one in route.others)} == nodes
        assert all(route.chosen.price <= one.price + max(0.02 * one.price, 0.02) for one in route.others)
        assert all(0 <= one.cached <= route.tokens and one.queue >= 0 for one in (route.chosen, *route.others))
        self.sent.append(number)

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data(), measured=st.booleans())
    def started(self, data: st.DataObject, measured: bool) -> None:
        if self.sent:
            number = self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))
            self.router.started(number, self.now, measured=measured)

    @rule(data=st.data())
    def failed(self, data: st.DataObject) -> None:
        if self.sent:
            self.router.failed(self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1))), self.now)

    @invariant()
    def consistent(self) -> None:
        self.router.check()


TestRouting = Routing.TestCase
