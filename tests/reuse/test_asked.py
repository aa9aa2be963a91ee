"""Repairs that recompute what the end of a prompt looks at: which rows, what budget, what they cost."""

from __future__ import annotations

import numpy as np
import pytest
from made_up import SPACE, Span, never
from msgspec import structs

from ctxreuse.model import LayerSpec
from ctxreuse.reuse import Attention, Deviations, look_layers, parse
from ctxreuse.reuse.repair import DEPTH, LOOKING

RUNS = [Span(5, 10), Span(20, 35)]


def attention(rows: np.ndarray) -> np.ndarray:
    """Most of it falls on 7, 24 and 31, in this order."""
    weights = {7: 9.0, 24: 4.0, 31: 3.0}
    return np.array([weights.get(int(row), 1 / (1 + row)) for row in rows], np.float32)


def far(rows: np.ndarray, layer: int, role: str) -> np.ndarray:
    """Row 7 is as it would be computed; row 31 lies 100 times as far as the others."""
    assert (layer, role) in ((1, "v"), (3, "k"))
    return np.where(rows == 7, 0, np.where(rows == 31, 100, 1)).astype(np.float32)


def rows(name: str, budget: int = 1000, deviations: Deviations = never, attention: Attention = attention) -> list[int]:
    return parse(name).rows(RUNS, budget, deviations, attention).tolist()


def test_rows_that_get_most_attention() -> None:
    assert rows("ask-15%") == [7, 24, 31]
    assert rows("ask-10%") == [7, 24]
    assert rows("ask-15%", 1) == [7]
    assert rows("ask-15%", 0, attention=never) == []
    assert parse("ask-15%").rows([], 9, never, never).tolist() == []


def test_what_is_right_already_is_not_computed_however_much_it_is_looked_at() -> None:
    assert rows("ask*v-5%", deviations=far) == [31]
    assert rows("ask*k-10%@3", deviations=far) == [24, 31]


def test_beside_others_the_next_ones_are_taken() -> None:
    assert rows("last-4+ask-10%") == [7, 24, 31, 32, 33, 34]
    assert rows("first-3+ask-10%") == [5, 6, 7, 20, 21, 22, 24, 31]


def test_rows_that_are_no_numbers_are_computed() -> None:
    def damaged(rows: np.ndarray) -> np.ndarray:
        return np.where(rows == 8, np.nan, attention(rows)).astype(np.float32)

    assert rows("ask-5%", attention=damaged) == [8]


def test_one_row_of_every_few() -> None:
    assert rows("every-6") == [8, 23, 29]
    assert rows("every-6", 2) == [8, 23]
    assert rows("every-1") == [*range(5, 10), *range(20, 35)]
    assert rows("every-40") == []
    assert rows("every-6+ask-10%") == [7, 8, 23, 24, 29]
    assert rows("every-6", 0) == []
    assert parse("every-6").rows([], 9, never, never).tolist() == []
    assert parse("every-6").work(600, 3, 30) == pytest.approx(1 / 6)


def test_what_asking_costs() -> None:
    look = LOOKING * DEPTH
    assert parse("ask-10%").work(1000, 4, 30) == pytest.approx(0.1 + look / 1000)
    assert parse("ask*v-10%@3").work(1000, 4, 30) == pytest.approx(0.1 + 3 / 30 + look / 1000)
    assert parse("ask-10%").work(2, 1, 30) == 1.0


@pytest.mark.parametrize(
    ("layers", "looked"),
    [("f", 1), ("f" * 30, 20), ("f" * 31, 21), ("sssssf" * 3, 12), ("s" * 30, 20), ("l" * 8 + "f", 9)],
)
def test_one_layer_of_those_that_look_sees_all_tokens_if_there_is_one(layers: str, looked: int) -> None:
    kinds = {
        "f": LayerSpec("full", 1, 8, 8),
        "s": LayerSpec("full", 1, 8, 8, window=16),
        "l": LayerSpec("linear"),
    }
    assert look_layers(structs.replace(SPACE, layers=tuple(kinds[kind] for kind in layers))) == looked


def test_drift_changes_no_rows() -> None:
    repair = parse("first-4+ask-5%+drift")
    assert repair.drifts
    assert not parse("first-4+ask-5%").drifts
    assert rows("first-4+ask-5%+drift") == rows("first-4+ask-5%")
    assert repair.work(200, 2, 30) == parse("first-4+ask-5%").work(200, 2, 30)
