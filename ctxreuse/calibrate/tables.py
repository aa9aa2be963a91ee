"""Few tables of 8-bit frequencies for many components: which table and shift each takes, and what the tables are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["CENTRE", "ESCAPE", "SYMBOLS", "Choice", "cluster", "fold", "integer_table", "table_bits"]

Counts = npt.NDArray[np.float64]
Table = npt.NDArray[np.uint8]

SYMBOLS, ESCAPE, CENTRE = 32, 31, 15
TOTAL = 256
#: An escaped value stands in full.
_ESCAPE_BITS = 16
_ROUNDS = 12


class Choice(NamedTuple):
    """Tables uint8 [tables, 32], the table and shift of each component [n], and their cost in bits [n]."""

    tables: Table
    table: npt.NDArray[np.uint8]
    shift: npt.NDArray[np.uint8]
    bits: Counts


def fold(counts: Counts, shift: int) -> Counts:
    """Counts of values -w … w, [n, 2w + 1], as counts of symbols [n, 32] at a shift; the rest are escapes."""
    width = counts.shape[1] // 2
    q = np.arange(-width, width + 1)
    high = (q + (1 << shift >> 1)) >> shift
    symbol = np.where(np.abs(high) <= CENTRE, high + CENTRE, ESCAPE)
    folded = np.zeros((len(counts), SYMBOLS))
    for number in np.unique(symbol):
        folded[:, number] = counts[:, symbol == number].sum(1)
    return folded


def integer_table(weights: Counts, *, escapes: bool) -> Table:
    """The table [32] that codes symbols of these weights in the fewest bits.

    With ``escapes`` symbol 31 has a frequency, the middle one too (it fills what is not coded), and a symbol too rare
    for one of its own is escaped. Without, all three symbols of a refinement have one,
    and the escape, which coders want to find in every table.
    """
    share = weights / max(float(weights.sum()), 1e-30)
    # The least that is sure to be met in other texts: a little of each neighbour, and of everything between.
    must = [CENTRE, ESCAPE] if escapes else [0, 1, 2, ESCAPE]
    allowed = np.arange(SYMBOLS) < (ESCAPE if escapes else 3)
    if escapes:
        spread = np.convolve(share[:ESCAPE], (0.01, 0.98, 0.01), "same")
        share = np.append(spread, share[ESCAPE] + 1e-4)
    # A frequency takes one part of 256 from the others; an escape takes 16 bits from the symbol that needs it.
    worth = share * _ESCAPE_BITS > np.log2(TOTAL / (TOTAL - 1)) if escapes else np.ones(SYMBOLS, bool)
    return _apportion(share, [s for s in range(SYMBOLS) if s in must or (allowed[s] and worth[s])])


def _apportion(share: Counts, present: list[int]) -> Table:
    """Frequencies of sum 256, at least 1 for each present symbol, each next unit where it saves the most bits."""
    frequency = np.zeros(SYMBOLS, np.int64)
    frequency[present] = 1
    ideal = np.zeros(SYMBOLS)
    ideal[present] = share[present] / max(share[present].sum(), 1e-30) * (TOTAL - len(present))
    frequency += np.floor(ideal).astype(np.int64)
    for _ in range(TOTAL - int(frequency.sum())):
        least_one = np.maximum(frequency, 1)
        saved = np.where(frequency > 0, share * np.log2((least_one + 1) / least_one), -1.0)
        saved[frequency >= TOTAL - 1] = -1.0
        frequency[int(saved.argmax())] += 1
    return _settle(frequency, share).astype(np.uint8)


def _settle(frequency: npt.NDArray[np.int64], share: Counts) -> npt.NDArray[np.int64]:
    """Move units between symbols while that saves bits; the floor above leaves the rare ones too much."""
    for _ in range(TOTAL):
        gain = np.where(
            (frequency > 0) & (frequency < TOTAL - 1), share * np.log2((frequency + 1) / np.maximum(frequency, 1)), -1
        )
        loss = np.where(frequency > 1, share * np.log2(np.maximum(frequency, 2) / np.maximum(frequency - 1, 1)), np.inf)
        to, away = int(gain.argmax()), int(loss.argmin())
        if to == away or gain[to] <= loss[away] + 1e-12:
            break
        frequency[to] += 1
        frequency[away] -= 1
    return frequency


def table_bits(tables: Table, *, escapes: bool) -> Counts:
    """Bits of each symbol under each table, [tables, 32]; a symbol without a frequency costs an escape."""
    with np.errstate(divide="ignore"):
        bits = -np.log2(tables / TOTAL)
    if escapes:
        escape = bits[:, ESCAPE] + _ESCAPE_BITS
        bits[:, ESCAPE] = escape
        return np.where(np.isfinite(bits), bits, escape[:, None])
    return np.where(np.isfinite(bits), bits, 64.0)


def cluster(folded: Counts, count: int, *, escapes: bool) -> Choice:
    """Up to ``count`` tables for components with symbol counts ``folded`` [shifts, n, 32], and each one's choice.

    Lloyd's iteration under the cost in bits: each component takes its cheapest table and shift, each table becomes the
    best one for those that took it. It starts from groups of equal size by entropy.
    """
    n = folded.shape[1]
    if not n:  # a profile has one table at least, even if no level codes anything
        return Choice(
            integer_table(np.ones(SYMBOLS), escapes=escapes)[None],
            np.empty(0, np.uint8),
            np.empty(0, np.uint8),
            np.empty(0),
        )
    low = np.array([_cost_alone(counts, k, escapes) for k, counts in enumerate(folded)])
    shift = low.argmin(0)
    order = np.argsort(low.min(0), kind="stable")
    owner = np.empty(n, np.int64)
    owner[order] = np.arange(n) * count // n
    tables = np.empty((0, SYMBOLS), np.uint8)
    bits = np.empty(0)
    for _ in range(_ROUNDS):
        chosen = folded[shift, np.arange(n)]
        tables = np.array([integer_table(chosen[owner == t].sum(0), escapes=escapes) for t in np.unique(owner)])
        tables = np.unique(tables, axis=0)
        price = table_bits(tables, escapes=escapes).T
        costs = np.array([counts @ price + (k * counts.sum(1))[:, None] for k, counts in enumerate(folded)])
        flat = costs.transpose(1, 0, 2).reshape(n, -1)
        best = flat.argmin(1)
        shift, owner, bits = best // len(tables), best % len(tables), flat[np.arange(n), best]
    return Choice(tables, owner.astype(np.uint8), shift.astype(np.uint8), bits)


def _cost_alone(counts: Counts, shift: int, escapes: bool) -> Counts:
    """Bits of each component's symbols under a table of its own."""
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1e-30)
    entropy = -(share * np.log2(np.where(share > 0, share, 1))).sum(1)
    return np.asarray(entropy + shift + (share[:, ESCAPE] * _ESCAPE_BITS if escapes else 0.0))
