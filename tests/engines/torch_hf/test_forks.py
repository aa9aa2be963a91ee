"""Forks of a context share its rows: the prompt is in memory once, and pages that one writes to are its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ctxreuse.engines.fork import fork_context
from ctxreuse.engines.torch_hf.cache.arena import Arena, forked
from ctxreuse.testing.engine import random_tokens

MIB = 1 << 20


def memory() -> int:
    """Bytes of this process, shared pages counted by their share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="other systems copy")
def test_a_prompt_of_many_forks_is_in_memory_once() -> None:
    shape = ((0, 4, 64, 64),)
    arena = Arena(shape, torch.float32, 32768)
    arena.populate()
    arena.k[0][:], arena.v[0][:] = 1.5, 2.5
    before = memory()
    found = forked(arena, 30_000, 32768, 8)
    assert all(float(one.k[0][0, :, :30_000].sum()) == 1.5 * 4 * 64 * 30_000 for one in found)
    assert arena.nbytes == 64 * MIB
    assert memory() - before < 2 * arena.nbytes
    counted = sum(one.nbytes for one in found)
    assert counted == arena.nbytes + 7 * (arena.nbytes - 30_000 * arena.nbytes // 32768)


def test_what_one_writes_no_other_sees() -> None:
    arena = Arena(((3, 2, 8, 8),), torch.float32, 256)
    arena.k[3][:], arena.v[3][:] = 1, 2
    found = forked(arena, 100, 300, 3)
    arena.k[3][:] = 9
    for number, one in enumerate(found):
        assert one.capacity == 512
        one.k[3][0, :, 90:110] = 10 + number
    for number, one in enumerate(found):
        assert (one.k[3][0, :, 90:110] == 10 + number).all()
        assert (one.k[3][0, :, :90] == 1).all()
        assert (one.v[3][0, :, :100] == 2).all()


def test_forks_of_a_context_count_its_prompt_once(engine_of) -> None:
    engine = engine_of("llama")
    ids = random_tokens(engine, 300)
    context = engine.new_context()
    engine.prefill(context, ids)
    forks = fork_context(engine, context, [], 3, 400)
    rows = 300 * engine.space.token_nbytes
    assert [one.nbytes for one in forks] == [context.nbytes - rows] * 3
    for one in (context, *forks):
        one.check()
