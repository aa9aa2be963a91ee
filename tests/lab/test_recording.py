"""Recordings: what was asked comes back, nothing of it can be read in them, and damage is refused."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.errors import ConfigError, FormatError
from ctxreuse.lab import open_trace
from ctxreuse.lab import recorder as recorder_module
from ctxreuse.lab.packed import pack
from ctxreuse.lab.recorder import Recorder
from ctxreuse.lab.recording import recording, recording_head
from ctxreuse.lab.trace import END_OF_TURN, TOOL_CALL
from ctxreuse.pauses import PauseKind
from support.examples import examples
from support.full_disk import no_file_beyond
from support.traces import forests, lines, packed
from support.waiting import until

HEAD = '{"format":"ctxreuse-trace","version":1,"block_tokens":4}'


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Clock:
    """Stands at ``now``."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def open_recorder(tmp_path: Path, clock: Clock) -> Iterator[Any]:
    opened: list[Recorder] = []

    def start(name: str = "r.jsonl", **more: Any) -> Recorder:
        opened.append(Recorder(tmp_path / name, **({"block_tokens": 4, "clock": clock} | more)))
        return opened[-1]

    yield start
    for recorder in opened:
        recorder.close()


def test_sessions_come_back(open_recorder: Any, clock: Clock, tmp_path: Path) -> None:
    recorder = open_recorder(token_bytes=1000)
    asks = [(0.0, [1, 2]), (2.0, [7]), (10.0, [1, 2, 3]), (11.0, [1, 2, 9]), (30.0, [1, 2, 3, 4])]
    numbers = []
    for t, path in asks:
        clock.now = 100.0 + t
        numbers.append(recorder.prompt([key(b) for b in path], 4 * len(path) + 3))
    recorder.mark([key(1), key(2)], TOOL_CALL)
    recorder.mark([key(1), key(2), key(3)], END_OF_TURN)
    recorder.ended(numbers[0], output=5, busy=1.5)
    recorder.ended(numbers[2], output=6, busy=3.0)
    recorder.close()
    assert recorder.figures == recorder_module.Recorded(5, 0, 0)
    assert recording_head(tmp_path / "r.jsonl").token_bytes == 1000
    found = list(open_trace(tmp_path / "r.jsonl"))
    assert [r.t for r in found] == [t for t, _ in asks]
    assert [r.tokens for r in found] == [4 * len(path) + 3 for _, path in asks]
    # Who goes on where a prompt ended is of its session; the second who does is another one.
    assert [r.session for r in found] == [0, 1, 0, 2, 0]
    assert [(r.label, r.stop, r.output) for r in found][:3] == [
        (0, TOOL_CALL, 5),
        (0, 0, 0),
        (TOOL_CALL, END_OF_TURN, 6),
    ]
    assert [round(r.pause, 3) for r in found] == [0, 0, 8.5, 0, 17.0]
    made = pack(recording(tmp_path / "r.jsonl"))
    made.check()
    assert [made.path(i) for i in range(5)] == [[0, 1], [2], [0, 1, 3], [0, 1, 4], [0, 1, 3, 5]]


@examples("normal")
@given(paths=forests(30), known=st.integers(1, 50))
def test_any_traffic_comes_back(paths: list[list[int]], known: int, tmp_path_factory: Any) -> None:
    file = tmp_path_factory.mktemp("r") / "r"
    before, recorder_module._KNOWN = recorder_module._KNOWN, known  # blocks are forgotten and written again
    try:
        recorder = Recorder(file, block_tokens=4, clock=Clock(0.0))
        for path in paths:
            assert recorder.prompt([key(b) for b in path], 4 * len(path)) >= 0
        recorder.close()
    finally:
        recorder_module._KNOWN = before
    ours, given_ = pack(recording(file)), packed(paths)
    assert [ours.path(i) for i in range(len(ours))] == [given_.path(i) for i in range(len(given_))]


def test_nothing_of_the_traffic_is_in_the_file(open_recorder: Any, tmp_path: Path) -> None:
    keys = [os.urandom(32) for _ in range(40)]
    for name in ("a", "b"):
        recorder = open_recorder(name)
        recorder.prompt(keys, 160)
        recorder.text([b'{"content":"the secret plan"}' * 40], b"tenant")
        recorder.close()
    a, b = ((tmp_path / name).read_bytes() for name in ("a", "b"))
    for data in (a, b):
        assert not any(k in data or k.hex().encode()[:12] in data for k in keys)
        assert b"secret" not in data
        assert b"tenant" not in data
    # Equal traffic, different hashes: recordings cannot be joined.
    hashes = [set(r.path.tolist()) for name in ("a", "b") for r in recording(tmp_path / name)]
    assert not (hashes[0] | hashes[1]) & (hashes[2] | hashes[3])
    assert (tmp_path / "a").stat().st_mode & 0o077 == 0


def test_pauses_are_told_of_the_prompt_they_follow(open_recorder: Any, tmp_path: Path) -> None:
    recorder = open_recorder()
    first = recorder.prompt([key(1), key(2)], 8)
    recorder.prompt([key(1)], 4)
    recorder.mark([key(1), key(2), key(3), key(4)], PauseKind(TOOL_CALL, text=True, calls=True).label)
    recorder.mark([key(8), key(9)], 1)
    recorder.ended(first, output=7, busy=2.0)
    recorder.close()
    one, two = recording(tmp_path / "r.jsonl")
    assert (one.stop, one.shape, one.output, one.busy) == (TOOL_CALL, 5, 7, 2.0)
    assert one.kind == PauseKind(TOOL_CALL, text=True, calls=True)
    assert (two.stop, two.shape) == (0, 0)
    assert pack(recording(tmp_path / "r.jsonl")).mark.tolist() == [one.kind.label, 0]


def test_texts_share_their_beginnings(open_recorder: Any, tmp_path: Path) -> None:
    recorder = open_recorder(unit="bytes")
    system, user = b"s" * 100, b"u" * 30
    recorder.text([system, user], b"a")
    recorder.text([system, user, b"v" * 50], b"a")
    recorder.text([system, user], b"b")
    recorder.close()
    first, second, third = recording(tmp_path / "r.jsonl")
    assert (len(first.path), first.tokens) == (130 // 16, 33)
    assert second.path.tolist()[: len(first.path)] == first.path.tolist()
    assert not set(third.path.tolist()) & set(first.path.tolist())


def test_files_are_bounded_and_each_stands_alone(open_recorder: Any, tmp_path: Path) -> None:
    limit = 4000
    recorder = open_recorder(limit=limit, files=3)
    for n in range(400):
        recorder.prompt([key(n // 10 * 100 + i) for i in range(n % 10 + 1)], 4 * (n % 10 + 1))
    recorder.close()
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files == ["r.jsonl", "r.jsonl.1", "r.jsonl.2"]
    for name in files:
        assert (tmp_path / name).stat().st_size <= limit
        pack(recording(tmp_path / name)).check()
    assert recorder.figures.written == 400


def test_what_was_there_is_kept(open_recorder: Any, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("older")
    recorder = open_recorder()
    recorder.prompt([key(1)], 4)
    recorder.close()
    assert (tmp_path / "r.jsonl.1").read_text() == "older"
    assert len(list(recording(tmp_path / "r.jsonl"))) == 1


def test_a_request_larger_than_a_file_is_left_out(open_recorder: Any, tmp_path: Path) -> None:
    recorder = open_recorder(limit=1000)
    recorder.prompt([key(i) for i in range(500)], 2000)
    recorder.prompt([key(1)], 4)
    recorder.close()
    assert recorder.figures == recorder_module.Recorded(1, 1, 0)
    assert len(list(recording(tmp_path / "r.jsonl"))) == 1


def test_a_full_disk_never_fails_a_request(
    open_recorder: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "d"
    recorder = open_recorder("d/r.jsonl", limit=300)
    failing = threading.Event()
    real = os.open

    def broken(path: Any, *more: Any, **named: Any) -> int:
        if failing.is_set() and "r.jsonl" in os.fspath(path):
            raise OSError(28, "No space left on device")
        return real(path, *more, **named)

    monkeypatch.setattr(os, "open", broken)
    recorder.prompt([key(1)], 4)
    failing.set()
    for n in range(30):
        assert recorder.prompt([key(n + 2)], 4) >= 0
    until(lambda: recorder.figures.errors + recorder.figures.written == 31)
    assert sum("not recorded" in record.message for record in caplog.records) == 1
    failing.clear()
    before = recorder.figures.written
    recorder.prompt([key(99)], 4)
    recorder.close()
    assert recorder.figures.written == before + 1
    assert len(list(recording(folder / "r.jsonl"))) == 1


def test_it_goes_on_after_a_full_disk_and_loses_no_older_recording(
    open_recorder: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It moved the older files on with each attempt, until all of them were empty."""
    for n in range(3):
        recorder = open_recorder()
        recorder.prompt([key(n)], 4)
        recorder.close()
    recorder = open_recorder()
    recorder.prompt([key(10)], 4)
    until(lambda: recorder.figures.written == 1)
    size = (tmp_path / "r.jsonl").stat().st_size
    with no_file_beyond(size + 30):
        for n in range(20):
            recorder.prompt([key(20 + n)], 4)
        until(lambda: recorder.figures.errors == 20)
        assert (tmp_path / "r.jsonl").stat().st_size == size, "half a line is taken back"
    recorder.prompt([key(50)], 4)
    recorder.close()
    assert recorder.figures.written == 2
    assert [record.getMessage() for record in caplog.records][1:] == ["requests are recorded again, 20 lines were lost"]
    files = ["r.jsonl", "r.jsonl.1", "r.jsonl.2", "r.jsonl.3"]
    assert [len(list(recording(tmp_path / name))) for name in files] == [2, 1, 1, 1]

    recorder = open_recorder(limit=110)  # a file for each request
    recorder.prompt([key(60)], 4)
    until(lambda: recorder.figures.written == 1)
    with no_file_beyond(20):
        for n in range(9):
            recorder.prompt([key(70 + n)], 4)
        until(lambda: recorder.figures.errors == 9)
    assert [len(list(recording(tmp_path / name))) for name in files] == [1, 2, 1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    recorder.prompt([key(90)], 4)
    recorder.close()
    assert [len(list(recording(tmp_path / name))) for name in files] == [1, 1, 2, 1]


def test_a_writer_that_is_behind_drops(open_recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = open_recorder()
    full: queue.Queue[Any] = queue.Queue(1)
    full.put("x")
    real, recorder._queue = recorder._queue, full
    assert recorder.prompt([key(1)], 4) == -1
    recorder.ended(-1)
    recorder.ended(0)
    recorder._queue = real
    assert recorder.figures.dropped == 1
    recorder.close()
    recorder.close()
    assert recorder.prompt([key(1)], 4) == -1


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Recorder(tmp_path / "file" / "r.jsonl")


def test_many_threads(open_recorder: Any, tmp_path: Path) -> None:
    recorder = open_recorder()
    gate = threading.Barrier(4)

    def ask(n: int) -> None:
        gate.wait()
        for i in range(50):
            recorder.ended(recorder.prompt([key(n * 1000 + i)], 4), busy=0.1)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    found = list(recording(tmp_path / "r.jsonl"))
    assert len(found) == recorder.figures.written
    assert len(found) + recorder.figures.dropped == 200
    assert all(r.busy == 0.1 for r in found)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (['{"format":"ctxreuse-trace","version":9,"block_tokens":4}'], "version 9.*newer ctxreuse"),
        (['{"format":"ctxreuse-trace","version":0,"block_tokens":4}'], "version 0.*Record again"),
        (['{"format":"ctxreuse-trace","version":1,"block_tokens":0}'], "impossible size"),
        (['{"format":"ctxreuse-trace","version":1}'], "no recording"),
        ([HEAD, '{"t":0,"n":4,"at":"00000000000000aa"}'], "was not recorded"),
        ([HEAD, '{"t":0,"n":4,"new":"00aa"}'], "cut-off"),
        ([HEAD, '{"t":0,"n":4,"new":"zz000000000000aa"}'], "damaged"),
        ([HEAD, '{"t":0,"n":4,"new":"ff000000000000aa"}'], "no hash"),
        ([HEAD, '{"t":0,"n":4,"new":"+0_0_0_0_0_0_0_1"}'], "no hash"),
        ([HEAD, '{"t":0,"n":4,"new":"' + "0" * 15 + "1" + "0" * 15 + '2"}'], "2 blocks for 4 tokens"),
        ([HEAD, '{"t":0,"n":-4}'], "tokens"),
        ([HEAD, '{"t":5,"n":4}', '{"t":4,"n":4}'], "time goes back.*line 3"),
        ([HEAD, '{"t":-1,"n":4}'], "time goes back"),
        ([HEAD, '{"end":0}'], "has not come"),
        ([HEAD, '{"t":0,"n":4}', '{"end":0,"busy":-1}'], "impossible count"),
        ([HEAD, '{"n":4}'], "neither"),
        ([HEAD, "[" * 100_000], "damaged"),
    ],
)
def test_hostile_recordings(tmp_path: Path, rows: list[str], said: str) -> None:
    with pytest.raises(FormatError, match=said):
        list(recording(lines(tmp_path / "r", rows)))


def test_two_prefixes_of_one_hash(tmp_path: Path) -> None:
    a, b, c = (f"{n:016x}" for n in (1, 2, 3))
    rows = [HEAD, f'{{"t":0,"n":8,"new":"{a}{b}"}}', f'{{"t":0,"n":8,"new":"{c}{b}"}}']
    with pytest.raises(FormatError, match=r"two different prefixes.*line 3"):
        list(recording(lines(tmp_path / "r", rows)))


@examples("light")
@given(data=st.data())
def test_damage_is_an_error_or_harmless(data: Any, tmp_path_factory: Any) -> None:
    rows = [
        HEAD,
        *(
            msgspec.json.encode({"t": n, "n": 12, "at": f"{n:016x}" if n else "", "new": f"{n + 1:016x}"}).decode()
            for n in range(3)
        ),
        '{"end":1,"stop":2,"out":3,"busy":0.5}',
    ]
    raw = bytearray("\n".join(rows).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    file = tmp_path_factory.mktemp("h") / "r"
    file.write_bytes(bytes(raw))
    # Anything else that is raised fails the test.
    with suppress(FormatError):
        pack(open_trace(file)).check()
