"""Keys: equal exactly for equal tokens after equal prefixes, in one space, for one tenant."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.errors import TokenRangeError
from ctxreuse.identity.keys import ROOT, as_tokens, chunk_key, prefix_key, prefix_keys, tenant_salt

SPACE, SALT = b"s" * 32, tenant_salt("alice")
ids = st.lists(st.integers(0, 2**31 - 1), max_size=60)
sizes = st.integers(1, 9)


@given(ids, sizes)
def test_chained_keys_equal_single_ones(tokens: list[int], size: int) -> None:
    array, parent, expected = as_tokens(tokens), ROOT, []
    for start in range(0, len(tokens) - size + 1, size):
        parent = prefix_key(SPACE, SALT, parent, array[start : start + size])
        expected.append(parent)
    assert prefix_keys(SPACE, SALT, array, size) == expected
    assert len(expected) == len(tokens) // size


@given(ids, ids, sizes)
def test_keys_agree_exactly_as_far_as_the_tokens_do(one: list[int], other: list[int], size: int) -> None:
    first, second = (prefix_keys(SPACE, SALT, as_tokens(t), size) for t in (one, other))
    for i, (a, b) in enumerate(zip(first, second, strict=False), start=1):
        assert (a == b) == (one[: i * size] == other[: i * size])


@given(ids, ids, sizes)
def test_resuming_from_a_parent_continues_the_chain(head: list[int], tail: list[int], size: int) -> None:
    head = head[: len(head) // size * size]
    whole = prefix_keys(SPACE, SALT, as_tokens(head + tail), size)
    blocks = len(head) // size
    parent = whole[blocks - 1] if blocks else ROOT
    assert whole[blocks:] == prefix_keys(SPACE, SALT, as_tokens(tail), size, parent)


@given(ids, st.integers(0, 8))
def test_a_tail_shorter_than_a_block_has_no_key(tokens: list[int], extra: int) -> None:
    whole = as_tokens(tokens[: len(tokens) // 9 * 9])
    longer = np.concatenate([whole, np.arange(extra, dtype="<i4")])
    assert prefix_keys(SPACE, SALT, longer, 9) == prefix_keys(SPACE, SALT, whole, 9)


@given(st.text(), st.text(), st.binary(max_size=20), st.binary(max_size=20))
def test_tenants_and_secrets_are_kept_apart(a: str, b: str, x: bytes, y: bytes) -> None:
    assert (tenant_salt(a, x) == tenant_salt(b, y)) == ((a, x) == (b, y))
    # Bytes that move from one to the other must not make the same salt.
    assert tenant_salt("c", b"a\0b") != tenant_salt("b\0c", b"a")


def test_space_salt_parent_and_purpose_all_matter() -> None:
    tokens = as_tokens(range(64))
    base = prefix_key(SPACE, SALT, ROOT, tokens)
    others = [
        prefix_key(b"t" * 32, SALT, ROOT, tokens),
        prefix_key(SPACE, tenant_salt("bob"), ROOT, tokens),
        prefix_key(SPACE, SALT, b"p" * 32, tokens),
        chunk_key(SPACE, SALT, tokens),
        chunk_key(SPACE, tenant_salt("bob"), tokens),
    ]
    assert len({base, *others}) == 6
    assert all(len(key) == 32 for key in [base, *others])


def test_the_key_is_the_documented_hash() -> None:
    tokens = as_tokens([1, 2, 3])
    body = SPACE + SALT + ROOT + b"\1\0\0\0\2\0\0\0\3\0\0\0"
    assert prefix_key(SPACE, SALT, ROOT, tokens) == hashlib.sha256(b"ctxreuse/prefix1" + body).digest()


def test_wrong_sizes_are_slips_in_code() -> None:
    with pytest.raises(ValueError, match="32"):
        prefix_keys(b"short", SALT, as_tokens([1]), 1)
    with pytest.raises(ValueError, match="16"):
        chunk_key(SPACE, b"short", as_tokens([1]))


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_as_tokens_keeps_the_ids(tokens: list[int]) -> None:
    for given_as in (tokens, tuple(tokens), np.array(tokens, np.int64), np.array(tokens, ">u4")):
        array = as_tokens(given_as)
        assert array.dtype == np.dtype("<i4")
        assert array.flags.c_contiguous
        assert array.tolist() == tokens


@pytest.mark.parametrize(
    "bad", [[-1], [2**31], [1.5], [[1, 2]], ["x"], [True, False], [1, -5, 2**40], [[1], [2, 3]], None, b"ab"]
)
def test_ids_that_are_none(bad: list[object]) -> None:
    with pytest.raises(TokenRangeError):
        as_tokens(bad)  # type: ignore[arg-type]
