"""What a scheduler's side plans: blocks found, loaded into the pages given, and saved once, by tenant."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from ctxreuse_cloud.connectors.hints import hint_orders
from ctxreuse_cloud.connectors.requests import RequestBlocks, StepPlan, StepProgress
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.identity.keys import ROOT
from ctxreuse.pauses.envelope import HintOrder

SIZE = 4


class Stored:
    """Keys that are stored, as a store matches them."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def __call__(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.keys), len(keys))

    def take(self, plan: StepPlan) -> None:
        for run in plan.saves:
            for block in run:
                assert block.parent == ROOT or block.parent in self.keys, "a block is saved before its parent"
                self.keys.add(block.key)


def blocks(secret: bytes = b"") -> RequestBlocks:
    return RequestBlocks(bytes(32), SIZE, secret)


def fill(planned: RequestBlocks, stored: Stored, request: str, tokens: list[int], tenant: str = "") -> None:
    planned.match(request, tokens, tenant, 0, stored)
    stored.take(planned.step([StepProgress(request, len(tokens), range(100))]))
    planned.finished(request)


def test_a_prompt_is_found_again_up_to_its_last_token() -> None:
    planned, stored = blocks(), Stored()
    fill(planned, stored, "a", list(range(12)))
    assert len(stored.keys) == 3
    assert planned.match("b", list(range(12)), "", 0, stored) == 8, "one token is left to compute"
    assert planned.match("c", [*range(12), 1], "", 0, stored) == 12
    assert planned.match("d", [*range(11), 99, 1], "", 0, stored) == 8
    assert planned.match("e", [*range(12), 1], "", 8, stored) == 4
    assert planned.match("f", [*range(12), 1], "", 12, stored) == 0


def test_tenants_and_secrets_share_nothing() -> None:
    planned, stored = blocks(), Stored()
    fill(planned, stored, "a", list(range(12)), "one")
    prompt = [*range(12), 1]
    assert planned.match("b", prompt, "two", 0, stored) == 0
    assert planned.match("c", prompt, "", 0, stored) == 0
    assert planned.match("d", prompt, "one", 0, stored) == 12
    assert blocks(b"secret").match("e", prompt, "one", 0, stored) == 0


def test_loads_go_into_the_pages_behind_what_the_engine_has() -> None:
    planned, stored = blocks(), Stored()
    fill(planned, stored, "a", list(range(16)))
    prompt = [*range(16), 1]
    assert planned.match("b", prompt, "", 4, stored) == 12
    planned.allocated("b", [7, 8, 9, 10, 11], 12)
    plan = planned.step([StepProgress("b", 17, [7, 8, 9, 10, 11])])
    assert [(block.page, block.end) for block in plan.loads[0]] == [(8, 8), (9, 12), (10, 16)]
    assert plan.saves == []
    assert planned.step([]).loads == []


def test_answers_are_saved_as_their_blocks_fill_and_drafts_are_not() -> None:
    planned, stored, tokens = blocks(), Stored(), list(range(6))
    planned.match("a", tokens, "", 0, stored)
    assert [[b.end for b in run] for run in planned.step([StepProgress("a", 6, [1, 2])]).saves] == [[4]]
    tokens.append(70)
    # A draft of three is computed with it, and only what is accepted becomes a token of the request.
    assert planned.step([StepProgress("a", 10, [1, 2, 3])]).saves == []
    tokens += [71, 72]
    saved = planned.step([StepProgress("a", 9, [1, 2, 3])]).saves
    assert [(b.end, b.page) for b in saved[0]] == [(8, 2)]
    assert saved[0][0].tokens == bytes([4, 0, 0, 0, 5, 0, 0, 0, 70, 0, 0, 0, 71, 0, 0, 0])


def test_what_the_engine_had_itself_is_saved_if_it_is_not_stored() -> None:
    planned, stored = blocks(), Stored()
    assert planned.match("a", list(range(13)), "", 8, stored) == 0
    plan = planned.step([StepProgress("a", 13, [1, 2, 3, 4])])
    assert [b.page for b in plan.saves[0]] == [1, 2, 3]
    stored.take(plan)


def test_a_failed_page_is_saved_again_with_all_that_follows() -> None:
    planned, stored = blocks(), Stored()
    fill(planned, stored, "a", list(range(12)))
    planned.match("b", [*range(12), 1], "", 0, stored)
    planned.allocated("b", [5, 6, 7, 8], 12)
    planned.step([StepProgress("b", 13, [5, 6, 7, 8])])
    planned.failed({6})
    plan = planned.step([StepProgress("b", 13, [5, 6, 7, 8])])
    assert [b.page for b in plan.saves[0]] == [6, 7]


def test_pages_of_several_blocks_are_loaded_whole_and_saved_as_their_blocks_fill() -> None:
    planned, stored = RequestBlocks(bytes(32), SIZE, page_blocks=2), Stored()
    planned.match("a", list(range(13)), "", 0, stored)
    plan = planned.step([StepProgress("a", 13, [7, 3])])
    assert [block.page for block in plan.saves[0]] == [14, 15, 6], "numbers of blocks, not of pages"
    stored.take(plan)
    prompt = [*range(12), 50, 51, 52, 53, 54]
    assert planned.match("b", prompt, "", 0, stored) == 8, "half a page is computed"
    planned.allocated("b", [9, 2, 5], 8)
    plan = planned.step([StepProgress("b", 17, [9, 2, 5])])
    assert [block.page for block in plan.loads[0]] == [18, 19]
    assert [(block.page, block.end) for block in plan.saves[0]] == [(4, 12), (5, 16)]
    assert plan.saves[0][0].parent == plan.loads[0][-1].key, "known to follow what may fail to load"
    planned.failed({9})
    assert [block.page for block in planned.step([StepProgress("b", 17, [9, 2, 5])]).saves[0]] == [18, 19, 4, 5]


@given(st.integers(1, 4), st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), max_size=6), st.data())
def test_every_block_is_planned_for_the_place_of_its_tokens(
    count: int, prompts: list[list[int]], data: st.DataObject
) -> None:
    planned, stored, page = RequestBlocks(bytes(32), SIZE, page_blocks=count), Stored(), SIZE * count
    for number, prompt in enumerate(prompts):
        pages = data.draw(st.permutations(range(1, 1 + -(-len(prompt) // page))))
        computed = data.draw(st.integers(0, (len(prompt) - 1) // page)) * page
        found = planned.match(str(number), prompt, "", computed, stored)
        assert (computed + found) % page == 0
        assert computed + found < len(prompt), "a token is left to compute"
        planned.allocated(str(number), pages, found)
        plan = planned.step([StepProgress(str(number), len(prompt), pages)])
        loaded = [block.end for run in plan.loads for block in run]
        assert loaded == list(range(computed + SIZE, computed + found + 1, SIZE))
        for block in (block for run in (*plan.loads, *plan.saves) for block in run):
            at = block.end - SIZE
            assert block.page == pages[at // page] * count + at % page // SIZE
            assert block.tokens == np.array(prompt[at : block.end], "<i4").tobytes()
        stored.take(plan)
        whole = len(prompt) // page * page
        assert planned.match("again", [*prompt[:whole], *[0] * page], "", 0, stored) >= whole, (
            "what was computed is stored"
        )
        planned.finished("again")


def test_a_preempted_request_starts_over() -> None:
    planned, stored = blocks(), Stored()
    planned.match("a", list(range(12)), "", 0, stored)
    stored.take(planned.step([StepProgress("a", 12, [1, 2, 3])]))
    assert planned.match("a", [*range(12), 50], "", 0, stored) == 12
    planned.allocated("a", [9, 8, 7, 6], 12)
    assert [b.page for b in planned.step([StepProgress("a", 13, [9, 8, 7, 6])]).loads[0]] == [9, 8, 7]


def test_requests_are_forgotten() -> None:
    planned, stored = blocks(), Stored()
    for number in range(1000):
        fill(planned, stored, str(number), [number] * 9)
    assert len(planned) == 0
    planned.finished("never seen")
    planned.allocated("never seen", [1], 4)
    assert planned.step([StepProgress("never seen", 4, [1])]) == StepPlan([], [])


def test_what_requests_ask_for_their_contexts_is_in_the_next_plan() -> None:
    planned, stored = blocks(), Stored()
    orders = [HintOrder("retain", 60.0, tokens=9), HintOrder("pause", 5.0, kind="tool"), HintOrder("pin", tokens=3)]
    planned.match("a", list(range(15)), "me", 0, stored)
    plan = planned.step([StepProgress("a", 15, range(9))])
    keys = [block.key for block in plan.saves[0]]
    planned.finished("a", orders)
    planned.finished("never seen", orders)
    found = planned.step([]).hinted
    assert [(one.keys, one.order) for one in found] == [(keys[:2], orders[0]), (keys, orders[1])], "3 tokens: no block"
    assert {one.tenant for one in found} == {"me"}
    assert planned.step([]).hinted == []


def test_envelopes_of_another_engine_are_read_and_what_is_not_understood_is_left_out() -> None:
    class Action(msgspec.Struct):
        action_id: str
        action_type: str
        action_version: str
        payload: dict[str, object]

    class Envelope(msgspec.Struct):
        protocol_version: str
        message_id: str
        actions: list[Action]

    actions = [
        Action("1", "kv.retain", "1.0", {"ttl_seconds": 30}),
        Action("2", "kv.dance", "1.0", {}),
        Action("3", "kv.demote", "1.0", {}),
        Action("4", "kv.pin", "9.0", {}),
        Action("5", "kv.pause", "1.0", {"kind": "tool", "seconds": -1}),
    ]
    assert hint_orders(Envelope("0.1", "m", actions)) == [HintOrder("retain", 30.0), HintOrder("demote")]
    assert hint_orders(None) == []
    for broken in (Envelope("0.1", "", actions), Envelope("7", "m", actions), {"actions": 3}, object()):
        assert hint_orders(broken) == []


def test_saves_are_announced_once_when_they_are_stored() -> None:
    planned, stored = RequestBlocks(bytes(32), SIZE, announces=True), Stored()
    planned.match("a", list(range(12)), "someone", 0, stored)
    plan = planned.step([StepProgress("a", 12, [1, 2, 3])])
    keys = [block.key for block in plan.saves[0]]
    assert planned.stored([keys[1], b"another"]) == [(plan.saves[0][1], "")]
    assert planned.stored(keys) == [(plan.saves[0][0], "someone"), (plan.saves[0][2], "")]
    assert planned.stored(keys) == []
    assert blocks().stored(keys) == []
