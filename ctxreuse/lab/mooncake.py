"""Reads traces in Mooncake's format: a JSON object a request, with ids of its blocks of 512 tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from ctxreuse.errors import FormatError
from ctxreuse.lab.lines import UNREADABLE, read_lines
from ctxreuse.lab.trace import Request, Trace

__all__ = ["BLOCK_TOKENS", "mooncake"]

BLOCK_TOKENS = 512
#: Blocks of one request: 33 million tokens.
_MOST_BLOCKS = 1 << 16


class _Row(msgspec.Struct):
    timestamp: float
    input_length: int
    hash_ids: list[int]
    output_length: int = 0


def mooncake(path: Path, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Return a trace of rows ``{"timestamp": ms, "input_length", "output_length", "hash_ids"}``, in the order of time.

    The last block of a row may be filled in part. Sessions are unknown.
    """
    return Trace(path.name, block_tokens, lambda: _read(path, block_tokens), format="mooncake")


def _read(path: Path, block_tokens: int) -> Iterator[Request]:
    decode = msgspec.json.Decoder(_Row).decode
    before = 0.0
    for number, line in read_lines(path):
        try:
            row = decode(line)
            ids = np.array(row.hash_ids, np.int64)
        except (*UNREADABLE, OverflowError) as error:
            raise _bad(f"no row of a Mooncake trace: {error}", path, number) from None
        t = row.timestamp / 1000
        if not math.isfinite(t) or t < before:
            raise _bad(f"time goes back from {before:g} s to {t:g} s", path, number, "Sort the rows by timestamp")
        most = -(-row.input_length // block_tokens)
        if row.input_length < 0 or row.output_length < 0 or not 0 <= len(ids) <= min(most, _MOST_BLOCKS):
            raise _bad(f"{len(ids)} blocks for {row.input_length:,} tokens", path, number)
        if len(ids) and ids.min() < 0:
            raise _bad(f"a block id of {ids.min()}", path, number)
        before = t
        yield Request(t, ids, row.input_length, output=row.output_length)


def _bad(what: str, path: Path, number: int, fix: str = "Check the file, or name its --format") -> FormatError:
    return FormatError(what, where=f"{path.name}, line {number}", fix=fix)
