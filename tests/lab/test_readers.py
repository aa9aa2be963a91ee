"""Readers of other people's traces: what they give, and what they say of files that are not what they seem."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxreuse.errors import ConfigError, FormatError
from ctxreuse.lab import lines as lines_module
from ctxreuse.lab import open_trace
from ctxreuse.lab.mooncake import mooncake
from ctxreuse.lab.sessions import agent_sessions
from ctxreuse.lab.trace import END_OF_TURN, TOOL_CALL, UNKNOWN
from support.traces import lines

ROWS = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]},
]


def turn(t: float, blocks: list[list[int]], stop: str = "tool_use", **more: Any) -> dict[str, Any]:
    tokens = 64 * sum(n for _, n in blocks) + 3
    return {
        "t": t, "type": "n", "in": tokens, "out": 10, "stop": stop, "api_time": 2.0, "think_time": 1.0,
        "hash_runs": blocks,
    } | more  # fmt: skip


def session(*turns: dict[str, Any]) -> dict[str, Any]:
    return {"id": "x", "block_size": 64, "hash_id_scope": "local", "requests": list(turns)}


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_mooncake(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "trace"
    file.write_bytes(pack(lines(tmp_path / "plain", ROWS).read_bytes()))
    trace = open_trace(file)
    assert (trace.format, trace.block_tokens) == ("mooncake", 512)
    for _ in range(2):  # again and again
        first, second = trace
        assert (first.t, first.path.tolist(), first.tokens, first.output) == (0.0, [0, 1], 1000, 5)
        assert (second.t, second.path.tolist(), second.session) == (1.5, [0, 1, 2], -1)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "no row"),
        ('{"timestamp": 1}', "no row"),
        ({"timestamp": 0, "input_length": 1000, "hash_ids": [0, 1, 2]}, "3 blocks for 1,000 tokens"),
        ({"timestamp": 0, "input_length": -1, "hash_ids": []}, "tokens"),
        ({"timestamp": 0, "input_length": 500, "hash_ids": [-4]}, "block id of -4"),
        ({"timestamp": 0, "input_length": 500, "hash_ids": [1 << 64]}, "no row"),
        ('{"timestamp": 1e999, "input_length": 5, "hash_ids": []}', "no row"),
        ({"timestamp": -5, "input_length": 5, "hash_ids": []}, "time goes back"),
        ("\x00\x01 not text", "no row"),
        ('{"timestamp": 0, "\udc80": 1}', "no row"),
        ("[" * 100_000, "no row"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: Any, said: str) -> None:
    file = lines(tmp_path / "t.jsonl", [ROWS[0], row])
    with pytest.raises(FormatError, match=f"{said}.*t.jsonl, line 2"):
        list(mooncake(file))


def test_time_that_goes_back(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"time goes back.*Sort the rows"):
        list(mooncake(lines(tmp_path / "t", ROWS[::-1])))


def test_files_that_are_no_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        open_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_trace(tmp_path)
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(FormatError, match="empty"):
        open_trace(tmp_path / "empty")
    for text in ("hello", "[1]", '{"a": 1}', "\xff\xfe", "[" * 50_000):
        (tmp_path / "text").write_text(text)
        with pytest.raises(FormatError, match="not recognised"):
            open_trace(tmp_path / "text")
    with pytest.raises(ConfigError, match="no trace format 'csv'"):
        open_trace(tmp_path / "text", "csv")
    cut = lzma.compress(lines(tmp_path / "plain", ROWS[:1] * 999).read_bytes())[:-40]
    (tmp_path / "cut.xz").write_bytes(cut)
    with pytest.raises(FormatError, match="damaged"):
        list(mooncake(tmp_path / "cut.xz"))
    monkeypatch.setattr(lines_module, "MOST_LINE", 1 << 12)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b" " * 5000 + b"{}"))
    with pytest.raises(FormatError, match="longer than"):
        open_trace(tmp_path / "bomb.gz")


def test_packed_streams_may_follow_each_other(tmp_path: Path) -> None:
    first, second = (json.dumps(row).encode() + b"\n" for row in ROWS)
    file = tmp_path / "t.xz"
    for data in (
        lzma.compress(first) + lzma.compress(second),
        lzma.compress(first) + b"\0" * 200_000 + lzma.compress(b"") + lzma.compress(second) + b"\0" * 8,
        lzma.compress(first + second + b"\n" * 300_000),
    ):
        file.write_bytes(data)
        assert [r.path.tolist() for r in mooncake(file)] == [[0, 1], [0, 1, 2]]
    file.write_bytes(lzma.compress(first) + b"x")
    with pytest.raises(FormatError, match="damaged"):
        list(mooncake(file))


def test_unpacking_takes_no_more_memory_than_it_may(tmp_path: Path) -> None:
    # 768 MiB of window for a few bytes.
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 768 << 20}]
    data = lzma.compress(json.dumps(ROWS[0]).encode(), filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 20}])
    file = tmp_path / "bomb.xz"
    file.write_bytes(data)
    assert len(list(mooncake(file))) == 1
    # The window's size is one byte of the block's header, which has a checksum of its own.
    size = lzma._encode_filter_properties(filters[0])  # type: ignore[attr-defined]
    old = lzma._encode_filter_properties({"id": lzma.FILTER_LZMA2, "dict_size": 1 << 20})  # type: ignore[attr-defined]
    start = 12
    length = (data[start] + 1) * 4
    header = bytearray(data[start : start + length - 4])
    header[header.index(b"\x21\x01" + old) + 2] = size[0]
    file.write_bytes(data[:start] + bytes(header) + zlib.crc32(header).to_bytes(4, "little") + data[start + length :])
    with pytest.raises(FormatError, match=r"damaged: Memory usage limit"):
        list(mooncake(file))


def test_sessions_run_side_by_side(tmp_path: Path) -> None:
    rows = [
        session(turn(0.0, [[1, 2]]), turn(9.0, [[1, 2], [7, 1]], "end_turn"), turn(8000.0, [[1, 4]], "")),
        session(turn(0.0, [[1, 1]], "end_turn")),
    ]
    file = lines(tmp_path / "t", rows)
    trace = open_trace(file)
    found = list(trace)
    starts = np.sort(np.random.default_rng(0).uniform(0, 3600, 2))
    assert trace.format == "sessions"
    # The third turn lies beyond the two hours of its session.
    assert [(r.session, r.label, r.stop) for r in found if r.session == 0] == [
        (0, UNKNOWN, TOOL_CALL),
        (0, TOOL_CALL, END_OF_TURN),
    ]
    assert [r.t for r in found] == sorted([starts[0], starts[0] + 9, starts[1]])
    second = next(r for r in found if r.session == 0 and r.label)
    assert (second.path.tolist(), second.pause, second.busy) == ([1, 2, 7], 1.0, 2.0)
    # Ids mean something inside a session only.
    other = next(r for r in found if r.session == 1)
    assert other.path.tolist() == [(1 << 32) + 1]
    half = list(agent_sessions(file, part=(1, 2)))
    assert [(r.session, r.t) for r in half] == [(1, starts[1])]
    assert len(list(agent_sessions(file, window=None))) == 4


def test_subagents_are_sessions_of_their_own(tmp_path: Path) -> None:
    inner = {"t": 5.0, "type": "subagent", "requests": [turn(1.0, [[50, 2]]), turn(2.0, [[50, 3]])]}
    file = lines(tmp_path / "t", [session(turn(0.0, [[1, 2]]), inner, turn(20.0, [[1, 3]]))])
    assert len(list(agent_sessions(file, span=0))) == 2
    found = list(agent_sessions(file, span=0, subagents=True))
    assert [(r.t, r.session) for r in found] == [(0.0, 0), (6.0, 1 << 20 | 1), (7.0, 1 << 20 | 1), (20.0, 0)]


@pytest.mark.parametrize(
    "row",
    [
        {"id": "x"},
        session(turn(0.0, [[1, 0]])),
        session(turn(0.0, [[-1, 2]])),
        session(turn(0.0, [[1, 1 << 40]])),
        session(turn(0.0, [[1, 3]], **{"in": 64})),
        session(turn(-1.0, [[1, 3]])),
        session(turn(0.0, [[1, 3]], think_time=-1.0)),
        session({"t": 0.0, "type": "subagent", "requests": [turn(0.0, [[1, 0]])]}),
        session(turn(0.0, [[1, 3]])) | {"block_size": 16},
    ],
)
def test_bad_sessions_are_named(tmp_path: Path, row: Any) -> None:
    file = lines(tmp_path / "t.jsonl", [session(turn(0.0, [[1, 2]])), row])
    with pytest.raises(FormatError, match=r"t.jsonl, line 2"):
        list(agent_sessions(file))


def test_a_selection_of_a_trace(tmp_path: Path) -> None:
    trace = mooncake(lines(tmp_path / "t", ROWS))
    late = trace.select(lambda request: request.t > 1, "later")
    assert [r.t for r in late] == [1.5]
    assert late.name == "t later"
    assert json.dumps(late.block_tokens) == "512"
