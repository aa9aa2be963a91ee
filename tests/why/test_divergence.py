"""Where two prompts part: right for any edit, in tokens and in words."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.identity.keys import as_tokens, common_prefix
from ctxreuse.why import PromptPart, divergence
from ctxreuse.why.difference import part_at, wording

IDS = st.lists(st.integers(0, 40), max_size=400)
TEXT = st.text(st.sampled_from("abcde \n"), max_size=200)


def decode(ids: object) -> str:
    return "".join(map(chr, np.asarray(ids).tolist()))


def encode(text: str) -> object:
    return as_tokens(list(map(ord, text)))


@given(IDS, IDS, IDS, IDS)
def test_the_first_difference_is_the_first(
    before: list[int], here: list[int], there: list[int], after: list[int]
) -> None:
    one, two = before + here + after, before + there + after
    found = divergence(as_tokens(one), as_tokens(two))
    n = min(len(one), len(two))
    at = next((i for i in range(n) if one[i] != two[i]), n)
    assert found.at == at
    assert found.kind == ("grown" if at == len(two) else "cut" if at == len(one) else "changed")
    mine, theirs = one[at + found.here :], two[at + found.there :]
    if found.alike:
        assert found.kind == "changed"
        assert mine[: found.alike] == theirs[: found.alike]
        assert mine[found.alike : found.alike + 1] != theirs[found.alike : found.alike + 1] or not mine[found.alike :]
        assert found.alike >= 12
    elif found.kind == "changed":
        assert (found.here, found.there) == (len(one) - at, len(two) - at)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 900))
def test_an_edit_of_any_length_is_found_whole(removed: int, added: int, at: int) -> None:
    # No id occurs twice, so where both go on alike is where the edit ends.
    old = np.arange(1000)
    new = np.concatenate([old[:at], np.arange(5000, 5000 + added), old[at + removed :]])
    found = divergence(as_tokens(new), as_tokens(old))
    assert found.at == at if added or removed else found.kind == "grown"
    if (added or removed) and len(old) - at - removed >= 12:
        assert (found.here, found.there, found.alike) == (added, removed, 1000 - at - removed)


def test_long_prompts_are_compared_in_steps() -> None:
    one = np.arange(100_000) % 1000
    two = one.copy()
    two[77_777] += 1
    assert common_prefix(as_tokens(one), as_tokens(two)) == 77_777
    assert common_prefix(as_tokens(one), as_tokens(one[:9_999])) == 9_999


@given(TEXT, TEXT, TEXT, TEXT)
def test_the_words_are_those_around_it(before: str, here: str, there: str, after: str) -> None:
    one, two = encode(before + here + after), encode(before + there + after)
    found = divergence(one, two)  # type: ignore[arg-type]
    if found.kind != "changed":
        return
    character, left, mine, theirs, changed, others = wording(found, one, two, 0, "", decode)  # type: ignore[arg-type]
    whole, other = before + here + after, before + there + after
    assert character == found.at
    assert whole[: found.at].endswith(left)
    assert whole[found.at :].startswith(mine)
    assert other[found.at :].startswith(theirs)
    assert mine[:1] != theirs[:1]
    assert 0 <= changed <= len(mine)
    assert 0 <= others <= len(theirs)


def test_what_the_template_puts_before_a_text_does_not_count() -> None:
    one, two = encode("system\nHello Anna"), encode("system\nHello Bert")
    found = divergence(one, two)  # type: ignore[arg-type]
    assert wording(found, one, two, 0, "system", decode)[0] == len("Hello ")  # type: ignore[arg-type]


def test_parts_are_counted_from_one() -> None:
    parts = [PromptPart("system", 10), PromptPart("user", 25)]
    assert [part_at(parts, at) for at in (0, 9, 10, 24, 25)] == [
        (1, "system", 0),
        (1, "system", 0),
        (2, "user", 10),
        (2, "user", 10),
        (3, "the answer's beginning", 25),
    ]
