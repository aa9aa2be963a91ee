"""Traces as forests: paths come back as they went in, and what makes no sense is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.errors import FormatError
from ctxreuse.lab import packed as module
from ctxreuse.lab.packed import IdTable, pack
from support.examples import examples
from support.traces import forests, packed, trace


@examples("light")
@given(paths=forests(), spread=st.integers(1, 1 << 40), rounds=st.integers(1, 5))
def test_paths_come_back(paths: list[list[int]], spread: int, rounds: int) -> None:
    # Names are arbitrary; several rounds of array work must give what one gives.
    named = [[block * spread % (1 << 62) + block for block in path] for path in paths]
    before = module._ROUND_REQUESTS
    module._ROUND_REQUESTS = rounds
    try:
        made = packed(named)
    finally:
        module._ROUND_REQUESTS = before
    made.check()
    assert len(made) == len(paths)
    numbers: dict[int, int] = {}
    seen: set[int] = set()
    for request, path in enumerate(named):
        for block in path:
            numbers.setdefault(block, len(numbers))
        want = [numbers[block] for block in path]
        assert made.path(request) == want
        assert made.array(request).tolist() == want
        assert made.known[request] == sum(block in seen for block in path)
        seen.update(path)
    assert made.blocks == len(seen)


def test_an_id_after_two_prefixes_is_refused() -> None:
    with pytest.raises(FormatError, match=r"block id 7 names two different prefixes.*request 3"):
        packed([[1, 7], [1], [2, 7]])


def test_an_id_twice_in_a_path_is_refused() -> None:
    with pytest.raises(FormatError, match="two different prefixes"):
        packed([[1, 2, 1]])


def test_a_trace_without_requests_is_refused() -> None:
    with pytest.raises(FormatError, match="empty"):
        pack(trace([]))


def test_empty_prompts_are_fine() -> None:
    made = packed([[], [1], []])
    made.check()
    assert made.tip.tolist() == [-1, 0, -1]
    assert made.array(0).tolist() == []


def test_tokens_of_a_part_filled_last_block() -> None:
    made = packed([[1, 2], [1, 2, 3]])
    made.tokens[:] = [7, 9]
    assert made.hit_tokens(np.array([2, 2])).tolist() == [7, 8]


@examples("normal")
@given(batches=st.lists(st.lists(st.integers(0, (1 << 63) - 1), max_size=60), max_size=8))
def test_numbers_of_ids(batches: list[list[int]]) -> None:
    table, known = IdTable(), dict[int, int]()
    for batch in batches:
        new = [i for i in dict.fromkeys(batch) if i not in known]
        table.add(np.array(new, np.int64))
        known |= {name: len(known) + n for n, name in enumerate(new)}
        table.check()
        assert len(table) == len(known)
        assert table.find(np.array(list(known), np.int64)).tolist() == list(known.values())
    assert table.find(np.array([i for i in range(50) if i not in known], np.int64)).tolist() == [-1] * sum(
        i not in known for i in range(50)
    )


def test_the_table_grows() -> None:
    table = IdTable()
    ids = np.random.default_rng(1).choice(1 << 40, 20_000, replace=False)
    for part in np.array_split(ids, 7):
        table.add(part)
    table.check()
    assert np.array_equal(table.find(ids), np.arange(len(ids)))
