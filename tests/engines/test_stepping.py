"""Where the passes of a prefill end."""

from __future__ import annotations

import msgspec
import pytest

from ctxreuse.engines.stepping import first_slice
from support.profiles import make_space


@pytest.mark.parametrize(
    ("start", "count", "limit", "taken"),
    [
        (0, 40, None, 40),
        (0, 100, None, 64),  # whole blocks, then the rest: so it is wherever a loaded context begins
        (128, 70, None, 64),
        (60, 25, None, 25),  # a question behind an answer: one pass
        (60, 25, 16, 16),
        (60, 63, None, 63),
        (60, 64, None, 4),  # 64 rows together are rounded otherwise than the rest of them
        (60, 100, None, 68),
    ],
)
def test_a_pass_ends_where_a_block_does_unless_it_is_short(
    start: int, count: int, limit: int | None, taken: int
) -> None:
    space = make_space(block_tokens=64)
    assert first_slice(space, start, count, limit, 512) == taken


def test_a_model_with_states_is_cut_at_blocks_always() -> None:
    space = make_space(block_tokens=64)
    sliding = msgspec.structs.replace(space.layers[0], kind="sliding", window=32)
    space = msgspec.structs.replace(space, layers=(sliding, *space.layers[1:]))
    assert space.needs_state
    assert first_slice(space, 60, 25, None, 512) == 4
