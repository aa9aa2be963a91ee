"""Forking a session, durable on disk, for histories from a thousand to a hundred thousand tokens.

The baseline copies the history into a new session; the bound is one durable LMDB commit of one small record.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import lmdb
import numpy as np

from ctxreuse.bench.measure import Options, paired, seconds
from ctxreuse.bench.report import Figure
from ctxreuse.store import Ledger, NewTurn

__all__ = ["run"]

_SIZES, _TURN, _SPACE = (1_000, 10_000, 100_000), 250, b"bench-fork".ljust(32)


def _turns(tokens: int) -> list[NewTurn]:
    ids = np.arange(_TURN, dtype="<i4").tobytes()
    text = "context " * _TURN
    roles = ("user", "assistant")
    return [NewTurn(roles[i % 2], text, tokens=ids, space=_SPACE) for i in range(tokens // _TURN)]


def run(options: Options) -> list[Figure]:
    """Median milliseconds of one fork, each durable when it returns; the sizes take turns."""
    rounds = options.pick(15, 101)
    with tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as place, Ledger.open(Path(place) / "store") as ledger:
        options.step("writing histories")
        sessions = {}
        for size in _SIZES:
            sessions[size] = ledger.create(f"trunk-{size}").id
            ledger.append(sessions[size], _turns(size))
        bare = lmdb.open(str(Path(place) / "bare"), map_size=1 << 30)
        number = count()

        def commit() -> None:
            with bare.begin(write=True) as txn:
                txn.put(next(number).to_bytes(16, "big"), bytes(150))

        def copy(size: int) -> None:
            ledger.append(ledger.create().id, _turns(size))

        options.step("forking")
        calls: dict[str, Callable[[], object]] = {f"{size}": partial(ledger.fork, sessions[size]) for size in _SIZES}
        times = paired({**calls, "commit": commit}, rounds=rounds, warm=5)
        options.step("copying, for comparison")
        copies = {size: seconds(partial(copy, size), rounds=options.pick(3, 7)) for size in _SIZES}
        bare.close()
    figures = [
        Figure(
            metric=f"fork_{size // 1000}k",
            value=times[f"{size}"] * 1e3,
            unit="ms",
            baseline=copies[size] * 1e3,
            bound=times["commit"] * 1e3,
            better="lower",
            bar=1.0,
            note=f"{size:,} tokens; baseline: copying the history; bound: one durable LMDB commit",
        )
        for size in _SIZES
    ]
    growth = times[f"{_SIZES[-1]}"] / times[f"{_SIZES[0]}"]
    note = "time at 100,000 tokens over time at 1,000: 1 is flat"
    return [*figures, Figure(metric="growth", value=growth, unit="times", better="lower", bar=1.5, note=note)]
