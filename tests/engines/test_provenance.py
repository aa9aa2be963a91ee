"""Where a context's numbers came from, against a list with one entry a token."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.block.levels import EXACT, PACKED, allowed_by, approx, is_exact, quality_key
from ctxreuse.engines.provenance import Provenance, leading, tokens_at

SIZE = 4
LEVELS = (EXACT, PACKED, "kl-0.01@0123456789abcdef", "kl-0.05@0123456789abcdef", "approx~kl-0.05")

steps = st.lists(
    st.one_of(
        st.tuples(st.just("load"), st.lists(st.sampled_from(LEVELS), min_size=1, max_size=4)),
        st.tuples(st.just("compute"), st.integers(1, 9)),
        st.tuples(st.just("crop"), st.integers(0, 40)),
        # Relocated or not, and which of the relocated rows are recomputed with the gaps.
        st.tuples(st.just("place"), st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=1, max_size=4)),
        st.tuples(st.just("recompute"), st.sets(st.integers(0, 60))),
    ),
    max_size=12,
)


def _spans(rows: list[int]) -> list[tuple[int, int]]:
    starts = [row for row in rows if row - 1 not in rows]
    ends = [row + 1 for row in rows if row + 1 not in rows]
    return list(zip(starts, ends))


@given(steps)
def test_runs_say_of_each_token_what_it_is(steps: list[tuple[str, object]]) -> None:
    history, tokens = Provenance(), list[str]()
    relocated, gaps = set[int](), set[int]()

    def crop(n: int) -> None:
        history.crop(n)
        del tokens[n:]
        for rows in (relocated, gaps):
            rows.intersection_update(range(n))

    def below(at: int) -> str:
        lossy = [level for level in tokens[:at] if not is_exact(level)]
        return approx(max(lossy, key=quality_key)) if lossy else EXACT

    for kind, what in steps:
        if kind == "load":
            assert isinstance(what, list)
            crop(len(tokens) // SIZE * SIZE)
            history.load(len(tokens), [(SIZE, level) for level in what])
            tokens += [level for level in what for _ in range(SIZE)]
        elif kind == "compute":
            assert isinstance(what, int)
            tokens += [below(len(tokens))] * what
        elif kind == "place":
            assert isinstance(what, list)
            start, spans = len(tokens), []
            for full, count in what:
                here = range(len(tokens), len(tokens) + count)
                if full:
                    spans.append((here.start, here.stop))
                (relocated if full else gaps).update(here)
                tokens += ["approx~kl-0.02" if full else below(len(tokens))] * count
            history.insert(start, len(tokens), spans, "approx~kl-0.02")
        elif kind == "recompute":
            assert isinstance(what, set)
            rows = sorted({row for row in what if row < len(tokens)} | gaps)
            history.recompute(_spans(rows), len(tokens))
            for row in rows:
                tokens[row] = below(row)
            relocated -= set(rows)
            gaps.clear()
        else:
            assert isinstance(what, int)
            crop(min(what, len(tokens)))
        assert (list(history.relocated), list(history.gaps)) == (_spans(sorted(relocated)), _spans(sorted(gaps)))
        runs = history.runs(len(tokens))
        assert [level for run in runs for level in [run.level] * (run.end - run.start)] == tokens
        assert all(a.end == b.start for a, b in pairwise(runs))
        for allowed in (None, 0.01, 0.05):
            good = next((i for i, level in enumerate(tokens) if not allowed_by(level, allowed)), len(tokens))
            assert leading(runs, allowed) == good
        for start, end in ((0, len(tokens)), (3, 9), (SIZE, 2 * SIZE)):
            part = tokens[start:end]
            assert tokens_at(runs, start, end) == {level: part.count(level) for level in dict.fromkeys(part)}
            lossy = [level for level in part if not is_exact(level)]
            assert history.worst_level(start, min(end, len(tokens))) == (
                approx(max(lossy, key=quality_key)) if lossy else EXACT
            )


def test_a_lossy_state_is_below_all_that_follows_it() -> None:
    history = Provenance()
    history.load(0, [(SIZE, EXACT)] * 5)
    history.mark_approximate(20, 7, "approx~kl-0.01")
    assert history.level_at(20) == "approx~kl-0.01"
    assert leading(history.runs(30), None) == 20
    history.crop(20)
    assert history.level_at(20) == "approx~kl-0.01"
    history.crop(15)  # still inside the window that was loaded
    assert history.level_at(15) == "approx~kl-0.01"
    history.crop(12)
    assert history.level_at(12) == EXACT
    assert leading(history.runs(12), None) == 12
    history.mark_approximate(12, 0, EXACT)
    assert history.level_at(12) == EXACT
