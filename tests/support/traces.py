"""Traces for tests: small ones written down, and random forests of prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ctxreuse.lab.packed import Packed, pack
from ctxreuse.lab.trace import Request, Trace

BLOCK = 4


def trace(paths: Sequence[Sequence[int]], *, gap: float = 1.0, block: int = BLOCK, **more: Any) -> Trace:
    """A trace of whole blocks, one request each ``gap`` seconds."""
    rows = [
        Request(i * gap, np.array(path, np.int64), len(path) * block, **{k: v[i] for k, v in more.items()})
        for i, path in enumerate(paths)
    ]
    return Trace("given", block, lambda: rows, format="given")


def packed(paths: Sequence[Sequence[int]], **more: Any) -> Packed:
    return pack(trace(paths, **more))


def lines(path: Path, rows: Sequence[Any]) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return path


@st.composite
def forests(draw: st.DrawFn, most: int = 40) -> list[list[int]]:
    """Paths whose ids stand for whole prefixes: each goes on from a random piece of an earlier one, or starts anew."""
    paths: list[list[int]] = []
    known: list[list[int]] = [[]]
    fresh = 0
    for _ in range(draw(st.integers(1, most))):
        stem = known[draw(st.integers(0, len(known) - 1))]
        path = list(stem)
        for _ in range(draw(st.integers(0, 4))):
            path.append(fresh)
            known.append(list(path))
            fresh += 1
        paths.append(path)
    return paths
