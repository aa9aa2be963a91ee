"""What one prompt left behind is found from any other, proven, and forgotten when it is gone."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ctxreuse.identity.keys import chunk_keys
from ctxreuse.reuse import ChunkLocation, plan, read, record
from ctxreuse.reuse.chunking import chunks
from ctxreuse.reuse.plan import SINK, TAIL, WORTH
from ctxreuse.store import open_store
from support.calls import calls_of
from support.examples import examples

SYSTEM, QUESTION = (1, 70), (2, 20)


@pytest.fixture
def world(new_world):
    return new_world(open_store(None))


def covered(runs) -> int:
    return sum(run.end - run.start for run in runs)


def test_documents_are_found_in_any_order_and_number(world, prompt) -> None:
    world.ask(*prompt(SYSTEM, (10, 200), (11, 150), (12, 300), QUESTION))
    tokens, parts = prompt((3, 40), (12, 300), (10, 200), (4, 30))
    done = world.ask(tokens, parts)
    assert [(run.start, run.end, run.shift, run.kind) for run in done.runs] == [
        (40, 340, 40 - 420, "behind"),
        (340, 540, 340 - 70, "behind"),
    ]
    assert done.prefix == 0


def test_a_document_without_marks_is_found_but_for_its_ends(world, prompt) -> None:
    world.ask(*prompt(SYSTEM, (10, 600), (5, 100)))
    tokens, _ = prompt((3, 90), (10, 600), (4, 50))
    runs = world.plan(tokens)
    assert len(runs) == 1
    assert 600 - 100 < covered(runs) <= 600


def test_what_follows_a_document_in_two_prompts_is_one_run_of_the_right_one(world, prompt) -> None:
    """Of several homes that is chosen whose prompt goes on as this one does."""
    world.ask(*prompt(SYSTEM, (10, 100), (11, 100), QUESTION), max_kl=None)
    world.ask(*prompt((6, 33), (10, 100), (12, 100), QUESTION), max_kl=None)
    world.ask(*prompt((7, 50), (12, 100), (10, 100), QUESTION), max_kl=None)
    for second, came in ((11, 70), (12, 33)):
        tokens, parts = prompt((3, 40), (10, 100), (second, 100), (4, 30))
        runs = world.plan(tokens, 0, parts)
        assert [(run.start, run.end, run.start - run.shift) for run in runs] == [(40, 240, came)]
        assert len(runs[0].sources) == 1


def test_a_home_behind_a_head_is_preferred(world, prompt) -> None:
    world.ask(*prompt(SYSTEM, (10, 100), QUESTION), max_kl=None)
    world.ask(*prompt((10, 100), (8, 90)), max_kl=None)
    tokens, parts = prompt((3, 40), (10, 100), (4, 30))
    assert [run.kind for run in world.plan(tokens, 0, parts)] == ["behind"]
    tokens, parts = prompt((3, 40), (10, 100), (8, 90), (4, 30))  # also where the other is longer
    found = [(run.kind, run.start, run.end, run.start - run.shift) for run in world.plan(tokens, 0, parts)]
    assert found == [("behind", 40, 140, 70), ("behind", 140, 140 + 176 - 100, 100)]


def test_what_stood_at_a_head_is_a_run_of_its_own(world, prompt) -> None:
    world.ask(*prompt((10, 300), QUESTION))
    tokens, parts = prompt((3, 40), (10, 300), (4, 30))
    head, rest = world.plan(tokens, 0, parts)
    assert (head.kind, head.start, head.shift) == ("head", 40, 40)
    assert (rest.kind, rest.start, rest.end, rest.shift) == ("behind", head.end, 340, 40)


def test_what_stood_behind_the_models_mark_alone_stood_at_the_head(world, prompt) -> None:
    mark, more = (6, 1), (6, SINK)
    world.ask(*prompt(mark, (10, 300), QUESTION))
    world.ask(*prompt(more, (11, 300), QUESTION))
    for document, kinds in ((10, ["head", "behind"]), (11, ["behind"])):
        tokens, parts = prompt((3, 40), (document, 300), (4, 30))
        assert [run.kind for run in world.plan(tokens, 0, parts)] == kinds


def test_the_head_and_the_end_are_computed(world, prompt) -> None:
    world.ask(*prompt(SYSTEM, (10, 200), QUESTION))
    tokens, parts = prompt((10, 200))
    assert [(run.start, run.end) for run in world.plan(tokens, 0, parts)] == [(SINK, 200 - TAIL)]
    end = 200 - TAIL
    assert [(run.start, run.end) for run in world.plan(tokens, end - WORTH, parts)] == [(end - WORTH, end)]
    assert world.plan(tokens, end - WORTH + 1, parts) == []
    for n in (0, 1, 5, TAIL, SINK + WORTH):
        assert world.plan(tokens[:n], 0) == []


def test_a_question_is_never_moved(world, prompt) -> None:
    """Asked of another document, its rows would know the answer of the first."""
    question, opening = (7, 50), (8, 4)
    world.ask(*prompt(SYSTEM, (10, 200), question, opening, (9, 100)))
    tokens, parts = prompt((3, 40), (11, 90), question, opening)
    assert world.plan(tokens, 0, parts) == []
    tokens, parts = prompt((3, 40), (10, 200), question, opening)
    assert [(run.start, run.end) for run in world.plan(tokens, 0, parts)] == [(40, 240)]
    assert [run.end for run in world.plan(tokens, 0)] == [294 - TAIL]  # nobody says where the question begins


def test_an_edit_costs_little_more_than_itself(world, prompt) -> None:
    world.ask(*prompt(SYSTEM, (10, 600), QUESTION))
    tokens, parts = prompt((3, 40), (10, 600), (4, 30))
    for at in (200, 300, 333, 500):
        edited = tokens.copy()
        edited[at] = 50_001
        done = world.plan(edited, 0, parts)
        assert len(done) == 2
        assert done[0].start == 40
        assert done[1].start == at + 1
        assert done[1].end == 640
        assert done[0].end == at


def test_between_documents_nobody_marked_runs_meet(world, prompt) -> None:
    documents = [(10 + i, 250 + 7 * i) for i in range(6)]
    world.ask(prompt(SYSTEM, *documents, (5, 100))[0])
    tokens, ends = prompt((3, 40), *reversed(documents), (4, 90))
    runs = world.plan(tokens)
    assert covered(runs) > 0.9 * sum(n for _, n in documents)
    # Each ends, and the next begins, where its document does, or a little within it.
    for run in runs:
        assert any(start <= run.start and run.end <= end for start, end in pairwise(ends))


def test_rows_beside_a_chunk_are_taken_from_exact_blocks_only(world, prompt) -> None:
    """What is beside a chunk in an approximate block may have been moved there."""
    first = prompt(SYSTEM, (10, 200), QUESTION)
    world.ask(*first)
    world.ask(*prompt((3, 40), (10, 200), (11, 200), (4, 90)))
    world.store.drop(world.keys(first[0])[0], "test")
    tokens, parts = prompt((5, 40), (10, 200), (11, 200), (6, 30))
    (run,) = world.plan(tokens, 0, parts)
    assert run.start == 240


def test_a_run_begins_where_the_prefix_ends(world, prompt) -> None:
    world.ask(*prompt(SYSTEM, (10, 200), (11, 200), QUESTION))
    tokens, parts = prompt(SYSTEM, (10, 200), (12, 40), (11, 200), (4, 20))
    done = world.ask(tokens, parts)
    assert done.prefix == 256
    # The last block of the prefix was 14 tokens short of its document's end.
    assert [(run.start, run.end, run.shift) for run in done.runs] == [(310, 510, 40)]


def test_an_exact_session_meets_no_lossy_source(world, prompt) -> None:
    world.ask(*prompt(SYSTEM, (10, 200), QUESTION))
    moved = prompt((3, 40), (10, 200), (11, 200), (4, 30))
    assert world.ask(*moved).moved == 200
    # (11) was computed on top of what was moved.
    tokens, parts = prompt((5, 40), (11, 200), (6, 30))
    assert world.plan(tokens, 0, parts, None) == []
    assert world.plan(tokens, 0, parts, 0.01) == []
    (run,) = world.plan(tokens, 0, parts, 0.05)
    assert (run.end - run.start, run.level) == (200, "approx~kl-0.05")


def test_rows_that_were_moved_are_no_source(world, prompt) -> None:
    """They would be turned twice, and what one move cost would be paid again with each."""
    first = prompt(SYSTEM, (10, 200), QUESTION)
    world.ask(*first)
    world.ask(*prompt((3, 40), (10, 200), (11, 200), (4, 30)))
    world.store.drop(world.keys(first[0])[0], "test")
    tokens, parts = prompt((5, 40), (10, 200), (11, 200), (6, 30))
    (run,) = world.plan(tokens, 0, parts)
    assert (run.start, run.end) == (240, 440)


def test_where_the_end_of_a_source_went_its_beginning_is_used(world, prompt) -> None:
    tokens, parts = prompt(SYSTEM, (10, 400), QUESTION)
    world.ask(tokens, parts)
    world.store.drop(world.keys(tokens)[13], "test")  # from position 208 on
    again, ends = prompt((3, 40), (10, 400), (4, 30))
    (run,) = world.plan(again, 0, ends)
    assert (run.start, run.end, run.shift) == (40, 40 + 208 - 70, -30)


def test_a_document_whose_end_was_not_stored_is_found_as_far_as_it_was(world, prompt) -> None:
    world.ask(*prompt(SYSTEM, (10, 205)))  # 275 tokens: 17 blocks, 272 of them
    (run,) = world.plan(*[prompt((3, 40), (10, 205), (4, 30))[0], 0, [40, 245, 275]])
    assert (run.start, run.end) == (40, 242)


def test_homes_of_evicted_blocks_are_forgotten(world, prompt) -> None:
    tokens, parts = prompt(SYSTEM, (10, 200), QUESTION)
    world.ask(tokens, parts)
    index = world.store.chunks
    again, ends = prompt((3, 40), (10, 200), (4, 30))
    (run,) = world.plan(again, 0, ends)
    assert all(index.locations_many(run.chunks))
    world.store.forget(world.keys(tokens))
    assert world.plan(again, 0, ends) == []
    assert not any(index.locations_many(run.chunks))
    assert world.ask(tokens, parts).computed == [(0, len(tokens))]
    assert world.plan(again, 0, ends) == [run]


def test_blocks_that_are_not_seen_yet_are_no_reason_to_forget(world, prompt) -> None:
    tokens, parts = prompt(SYSTEM, (10, 200), QUESTION)
    record(
        world.store.chunks,
        world.salt,
        world.space,
        tokens,
        world.keys(tokens),
        chunks(tokens, parts),
        [(0, len(tokens))],
    )
    again, ends = prompt((3, 40), (10, 200), (4, 30))
    assert world.plan(again, 0, ends) == []
    world.ask(tokens, parts)
    assert covered(world.plan(again, 0, ends)) == 200


def test_other_tenants_and_spaces_find_nothing(world, prompt) -> None:
    tokens, parts = prompt(SYSTEM, (10, 200), QUESTION)
    world.ask(tokens, parts)
    assert plan(world.store, bytes(16), world.space, tokens, 0, parts, 0.05) == []
    other = type(world)(world.store)
    other.space = msgspec.structs.replace(world.space, weights="2" * 64)
    assert other.plan(tokens, 0, parts) == []


def test_what_is_read_is_proven(world, prompt) -> None:
    """Homes that lie: other blocks, other rows, other positions, blocks of another space."""
    tokens, parts = prompt(SYSTEM, (10, 200), (11, 100), QUESTION)
    world.ask(tokens, parts)
    again, ends = prompt((3, 40), (10, 200), (4, 30))
    (run,) = world.plan(again, 0, ends)
    (source,) = run.sources
    keys = world.keys(tokens)

    def reads(changed, wanted=again) -> bool:
        with world.store.read(0.05) as reader:
            return read(reader, run._replace(sources=(changed,)), wanted, world.space) is not None

    assert reads(source)
    assert not reads(source._replace(row=source.row + 1))
    assert not reads(source._replace(keys=tuple(keys[5 : 5 + len(source.keys)])))
    assert not reads(source._replace(keys=(b"?" * 32, *source.keys[1:])))
    assert not reads(source._replace(keys=source.keys[:-1]))
    assert not reads(source._replace(at=source.at + 16))
    assert not reads(source._replace(count=source.count - 1))
    other = again.copy()
    other[100] += 1
    assert not reads(source, other)


def test_a_lying_home_costs_a_miss_and_is_forgotten(world, prompt) -> None:
    tokens, parts = prompt(SYSTEM, (10, 64), (11, 64), QUESTION)
    world.ask(tokens, parts)
    index = world.store.chunks
    again, ends = prompt((3, 40), (10, 64), (4, 30))
    (run,) = world.plan(again, 0, ends)
    (home,) = index.locations(run.chunks[0])
    keys = world.keys(tokens)
    lie = ChunkLocation(tuple(keys[8:13]), home.row, home.count, 8 * 16)
    index.forget(run.chunks[0], home)
    index.add(run.chunks[0], lie)
    assert [r.shift for r in world.plan(again, 0, ends)] != [run.shift]
    assert world.ask(again, ends).moved == 0
    assert lie not in index.locations(run.chunks[0])
    assert index.locations(run.chunks[0]) != []  # it was computed, and noted


def test_homes_for_blocks_of_another_size_are_left_alone(world, prompt) -> None:
    tokens, parts = prompt(SYSTEM, (10, 64), QUESTION)
    world.ask(tokens, parts)
    again, ends = prompt((3, 40), (10, 64), (4, 30))
    (run,) = world.plan(again, 0, ends)
    (home,) = world.store.chunks.locations(run.chunks[0])
    world.store.chunks.forget(run.chunks[0], home)
    for wrong in (home._replace(at=home.at + 1), home._replace(row=200), home._replace(count=9000)):
        world.store.chunks.add(run.chunks[0], wrong)
        assert all(found.end - found.start <= 64 for found in world.plan(again, 0, ends))


def test_noting_twice_changes_nothing(world, prompt) -> None:
    tokens, parts = prompt(SYSTEM, (10, 200), (11, 77), QUESTION)
    world.ask(tokens, parts)
    index, keys = world.store.chunks, world.keys(tokens)
    before = dict(index._table.items())
    for since in (0, 128):
        record(
            index, world.salt, world.space, tokens, keys, chunks(tokens, parts, since), [(0, 100), (100, len(tokens))]
        )
    assert dict(index._table.items()) == before
    # Of what was noted before only the end, where cuts may lie elsewhere now.
    late = chunks(tokens, parts, len(tokens))
    assert record(index, world.salt, world.space, tokens, keys, late, [(0, len(tokens))]) <= 2
    assert dict(index._table.items()) == before
    assert record(index, world.salt, world.space, tokens, keys, chunks(tokens, parts), []) == 0
    assert record(index, world.salt, world.space, tokens, [], chunks(tokens, parts), [(0, len(tokens))]) == 0


def test_a_prompt_that_grows_is_noted_as_if_it_came_at_once(world, prompt) -> None:
    tokens, _ = prompt((10, 500))
    world.ask(tokens, [])
    index, size = world.store.chunks, world.space.block_tokens
    keys, before = world.keys(tokens), dict(index._table.items())
    wanted = chunk_keys(world.space.digest, world.salt, tokens, chunks(tokens)[:-1])
    for key in wanted:
        for home in index.locations(key):
            index.forget(key, home)
    assert not any(index.locations_many(wanted))
    for end in range(3 * size, len(tokens) + 1, 3 * size):
        some = tokens[:end]
        record(
            index,
            world.salt,
            world.space,
            some,
            keys[: end // size],
            chunks(some, since=max(end - 3 * size, 0)),
            [(0, end)],
        )
    assert before
    assert all(index.locations_many(wanted))


@examples("heavy", suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_prompts_of_shared_pieces(new_world, prompt, data: st.DataObject) -> None:
    """Pieces of documents in any order, marked or not, exact or not, with blocks dropped now and then: the world
    checks every row that is reused."""
    world = new_world(open_store(None))
    pieces = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([5, 40, 90, 300])), min_size=1, max_size=5)
    for _ in range(data.draw(st.integers(2, 8))):
        tokens, parts = prompt(*data.draw(pieces))
        if data.draw(st.booleans()):
            parts = []
        max_kl = data.draw(st.sampled_from([None, 0.01, 0.05]))
        done = world.ask(tokens, parts, max_kl)
        at = done.prefix
        for run in done.runs:
            assert at <= run.start <= run.end - WORTH
            assert run.start >= SINK
            assert run.end < len(tokens)
            at = run.end
        if data.draw(st.integers(0, 3)) == 0:
            keys = world.keys(tokens)
            world.store.drop(keys[data.draw(st.integers(0, len(keys) - 1))], "test") if keys else None
        world.store.chunks.check()


def test_the_work_of_planning_grows_as_the_prompt(world, prompt) -> None:
    documents = [(100 + i, 1024) for i in range(32)]
    for i in range(0, 32, 4):
        world.ask(*prompt(SYSTEM, *documents[i : i + 4], QUESTION))

    def calls(some: list[tuple[int, int]]) -> int:
        tokens, parts = prompt((3, 40), *reversed(some), (4, 30))
        assert covered(world.plan(tokens, 0, parts)) == len(some) * 1024
        return calls_of(lambda: world.plan(tokens, 0, parts))

    assert calls(documents) < 4.5 * calls(documents[:8])
