"""Bench wire: both ways read what was stored, the plain socket sends what is asked, and rows say who is best."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rivals.wires import BATCH
from benchmarks.wire import SIZES, Ours, PlainSocket, figures_of, nbytes_of
from ctxreuse.block.format import parse


@pytest.mark.daemon
def test_both_ways_read_what_another_process_has(tmp_path: Path) -> None:
    heads, layers = SIZES["64 KiB"]
    with ExitStack() as stack:
        ours = Ours(stack, tmp_path, heads, layers)
        views = [parse(block) for block in ours.sealed()]
        sealed = b"".join(bytes(view.buffer[view.start : view.start + ours.nbytes]) for view in views)
        for first, count in ((3, 1), (0, BATCH)):
            ours.bus(first, count)
            ours.map(first, count)
            got = ours.room[: count * ours.nbytes].tobytes()
            assert got == sealed[first * ours.nbytes : (first + count) * ours.nbytes]
        PlainSocket(stack).get(1 << 20)


def test_sizes_are_what_they_are_called() -> None:
    assert [nbytes_of(*shape) for shape in SIZES.values()] == [64 << 10, 1 << 20, 3 << 20]


def test_the_best_peer_is_the_bar() -> None:
    ways = ("bus", "map", "socket", "copy")
    run = {(kind, way): 1e-3 for kind in ("single", "batch") for way in ways}
    peers = {"one": {"single": 2e-3, "batch": 1e-3}, "two": {"single": 4e-3, "batch": 5e-4}}
    rows = {figure.metric: figure for figure in figures_of("1 MiB", 1 << 20, [run, run], peers)}
    assert len(rows) == 4
    single, batch = rows["1 MiB, single, bus"], rows["1 MiB, 16 at once, map"]
    assert np.isclose([single.value, single.peer or 0, batch.peer or 0], [1.048576, 0.524288, 33.554432]).all()
    assert (single.passed, batch.passed) == (True, False)
