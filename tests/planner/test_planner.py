"""The planner on a context tree: what is cached comes first, nothing is lost, and no tenant sees another's."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import numpy as np

from ctxreuse.identity.keys import ROOT, Tokens, prefix_keys, tenant_salt
from ctxreuse.planner import CachedPrefixes, Part, Planner, ranking_line
from ctxreuse.tree import ContextTree

BLOCK, SPACE = 8, hashlib.sha256(b"space").digest()


class Cache:
    """A tree that holds prompts of one tenant."""

    def __init__(self, tenant: str = "a", tree: ContextTree | None = None) -> None:
        self.salt, self.tree = tenant_salt(tenant), ContextTree() if tree is None else tree
        self.prefixes = CachedPrefixes(self.tree.match, SPACE, self.salt, BLOCK)

    def hold(self, parts: Sequence[Part]) -> None:
        parent = ROOT
        for key in self.keys(parts):
            self.tree.insert(key, parent, BLOCK, 100)
            parent = key

    def keys(self, parts: Sequence[Part]) -> list[bytes]:
        return prefix_keys(SPACE, self.salt, np.concatenate([part.ids for part in parts]), BLOCK)

    def cached(self, parts: Sequence[Part]) -> int:
        return self.tree.match(self.keys(parts)).tokens


def ids(number: int, tokens: int) -> Tokens:
    return np.random.default_rng(number).integers(0, 1000, tokens).astype("<i4")


def documents(*lengths: int) -> list[Part]:
    return [Part("document", ids(number, tokens)) for number, tokens in enumerate(lengths)]


def test_what_is_cached_comes_first_in_its_order() -> None:
    cache, planner = Cache(), Planner()
    head, found = Part("system", ids(99, 13)), documents(40, 24, 56, 19)
    cache.hold([head, found[2], found[0]])
    plan = planner.plan([head, *found], cache.prefixes)
    assert plan.permutation.order[:3] == (0, 3, 1)
    assert (plan.cached, plan.cached_as_given) == (104, 8)
    assert cache.cached(plan.permutation.apply([head, *found])) == plan.cached


def test_more_tokens_are_better_than_more_documents() -> None:
    cache, planner = Cache(), Planner()
    found = documents(8, 8, 160)
    cache.hold([found[0], found[1]])
    cache.hold([found[2]])
    assert planner.plan(found, cache.prefixes).permutation.order[0] == 2


def test_with_nothing_cached_and_nothing_learned_the_order_stays() -> None:
    cache, planner = Cache(), Planner()
    plan = planner.plan(documents(40, 24, 56), cache.prefixes)
    assert not plan.moves
    assert (plan.cached, plan.cached_as_given) == (0, 0)


def test_an_order_that_is_cached_as_given_stays() -> None:
    cache, planner = Cache(), Planner()
    found = documents(40, 24, 56)
    cache.hold(found)
    cache.hold(found[::-1])
    for order in (found, found[::-1]):
        assert not planner.plan(order, cache.prefixes).moves


def test_kinds_stand_by_their_stability() -> None:
    kinds = ("volatile", "turn", "document", "tools", "memory", "system", "turn")
    parts = [Part(kind, ids(n, 9)) for n, kind in enumerate(kinds)]
    plan = Planner().plan(parts, Cache().prefixes)
    ordered = [part.kind for part in plan.permutation.apply(parts)]
    assert ordered == ["system", "tools", "document", "memory", "turn", "turn", "volatile"]
    assert plan.permutation.order[4:6] == (1, 6)


def test_another_tenants_equal_prompts_change_nothing() -> None:
    tree = ContextTree()
    one, two = Cache("one", tree), Cache("two", tree)
    found = documents(40, 24, 56)
    one.hold(found[::-1])
    plan = Planner().plan(found, two.prefixes)
    assert not plan.moves
    assert plan.cached == 0
    assert Planner().plan(found, one.prefixes).cached > 0


def test_a_thousand_random_calls_lose_and_repeat_nothing() -> None:
    rng = random.Random(5)
    pool = [Part("document", ids(number, rng.randint(1, 40))) for number in range(30)]
    cache, planner = Cache(), Planner()
    for _ in range(1000):
        chosen = [rng.choice(pool) for _ in range(rng.randint(0, 7))]
        parts = [Part("system", ids(500, 11)), *chosen, Part("volatile", ids(rng.randrange(10**6), 5))]
        plan = planner.plan(parts, cache.prefixes)
        ordered = plan.permutation.apply(parts)
        assert plan.permutation.inverse.apply(ordered) == parts
        assert sorted(map(id, ordered)) == sorted(map(id, parts))
        assert plan.cached == cache.cached(ordered) >= plan.cached_as_given == cache.cached(parts)
        cache.hold(ordered)
        if rng.random() < 0.1:  # what is evicted is no longer counted on
            leaf = next((node.key for node in cache.tree if not node.children), None)
            if leaf is not None:
                cache.tree.remove(leaf)


def test_learned_companions_make_later_requests_share_more() -> None:
    cache, planner, rng = Cache(), Planner(), random.Random(1)
    topics = [documents(*[16] * 8), [Part("document", ids(100 + n, 16)) for n in range(8)]]
    rare = iter(range(1000, 2000))
    hits = given = 0
    for _ in range(60):
        parts = [*rng.sample(rng.choice(topics), 7), Part("document", ids(next(rare), 16))]
        rng.shuffle(parts)
        plan = planner.plan(parts, cache.prefixes)
        hits += plan.cached
        given += plan.cached_as_given
        cache.hold(plan.permutation.apply(parts))
    assert hits > 3 * given
    assert len(planner._companions) <= 76


def test_the_ranking_names_present_places_best_first() -> None:
    cache, planner = Cache(), Planner()
    found = documents(40, 24, 56)
    cache.hold([found[2], found[0], found[1]])
    assert ranking_line(planner.plan(found, cache.prefixes).permutation) == (
        "(Documents by relevance, best first: 2, 3, 1.)"
    )
