"""rANS streams: what goes in comes out, every table gives numpy's bytes, lies and hostile bytes are refused."""

import itertools
import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ctxreuse import _native, kernels
from ctxreuse.errors import FormatError
from ctxreuse.kernels import RansTables, rans
from oracle.kernels import rans as reference_rans
from support.examples import examples
from support.waiting import patient

TABLES = pytest.mark.parametrize("table", _native.kernels())
Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16]
EXTREME = [[255, 1], [1, 255], [254, 1, 1], [186, 70], [128, 128], [1] * 31 + [225], [0] * 30 + [2, 254], [8] * 32]


def _freqs(random: np.random.Generator) -> list[int]:
    if random.integers(3) == 0:
        return EXTREME[random.integers(len(EXTREME))]
    used = random.permutation(32)[: random.integers(2, 33)]
    row = np.zeros(32, int)
    row[used] = 1
    weights = random.dirichlet(np.full(len(used), random.choice([0.1, 1, 20])))
    row[used] += random.multinomial(256 - len(used), weights)
    if row.max() > 255:
        row[used] = [255 if f == row.max() else 1 for f in row[used]]
    return [int(f) for f in row]


def _tables(random: np.random.Generator, count: int) -> RansTables:
    return RansTables([(row := _freqs(random)) + [0] * (32 - len(row)) for _ in range(count)])


def _stream(seed: int, n: int, tables: int) -> tuple[RansTables, Bytes, Words, Words]:
    """Tables, symbols that have a code, steps in runs, seeds."""
    random = np.random.default_rng(seed)
    known = _tables(random, tables)
    steps = random.integers(0, tables, -(-n // 64) + 1, dtype=np.uint16)
    steps = np.repeat(steps, random.integers(1, 5, steps.size))[: -(-n // 64)]
    slots = np.stack([np.repeat(np.arange(32, dtype=np.uint8), row) for row in known.freqs])
    symbols = slots[np.repeat(steps, 64)[:n], random.integers(0, 256, n)]
    return known, symbols, steps, random.integers(0, 65536, 64, dtype=np.uint16)


def _expected(known: RansTables, symbols: Bytes, steps: Words, seeds: Words) -> bytes:
    room, ends = np.zeros(256 + symbols.size, np.uint8), np.zeros(2, np.int64)
    tables = reference_rans.rans_tables(known.freqs)
    reference_rans.rans_encode(tables, room, ends, symbols, np.array([symbols.size]), steps, seeds)
    return room[: ends[1]].tobytes()


@TABLES
@examples("light")
@given(seed=st.integers(0, 2**32), n=st.integers(0, 300) | st.integers(301, 3000), tables=st.integers(1, 4))
def test_every_table_gives_numpys_bytes(table: str, seed: int, n: int, tables: int) -> None:
    kernels.use(table)
    known, symbols, steps, seeds = _stream(seed, n, tables)
    data = kernels.rans_encode(symbols, known, steps, seeds)
    assert data.tobytes() == _expected(known, symbols, steps, seeds)
    assert data.size <= kernels.rans_bound(n)
    for back, last in (kernels.rans_decode(data, n, known, steps), _numpy_decode(data, n, known, steps)):
        assert (back == symbols).all()
        assert (last == seeds).all()


def _numpy_decode(data: Bytes, n: int, known: RansTables, steps: Words) -> tuple[Bytes, Words]:
    out, seeds = np.zeros(n, np.uint8), np.zeros(64, np.uint16)
    tables = reference_rans.rans_tables(known.freqs)
    ends = np.array([0, data.size])
    assert reference_rans.rans_decode(tables, data, ends, out, np.array([n]), steps, seeds) == -1
    return out, seeds


@TABLES
def test_a_large_stream_costs_its_entropy(table: str) -> None:
    kernels.use(table)
    random = np.random.default_rng(3)
    known = RansTables([[0] * 8 + [1, 2, 8, 30, 87, 87, 30, 8, 2, 1] + [0] * 14])
    weights = known.freqs[0] / 256
    symbols = random.choice(32, 1_000_000, p=weights).astype(np.uint8)
    steps = np.zeros(15625, np.uint8)
    data = kernels.rans_encode(symbols, known, steps)
    shares = np.bincount(symbols) / symbols.size
    entropy = -(shares[shares > 0] * np.log2(shares[shares > 0])).sum()
    assert data.size * 8 / symbols.size == pytest.approx(entropy, rel=0.004)
    out = np.zeros(symbols.size, np.uint8)
    assert kernels.rans_decode(data, symbols.size, known, steps, out)[0] is out
    assert (out == symbols).all()


@TABLES
@examples("normal")
@given(seed=st.integers(0, 2**32), data=st.data())
def test_hostile_bytes_are_refused_or_symbols(table: str, seed: int, data: st.DataObject) -> None:
    kernels.use(table)
    n = data.draw(st.integers(0, 1500))
    known, symbols, steps, seeds = _stream(seed, n, 2)
    good = kernels.rans_encode(symbols, known, steps, seeds)
    kind = data.draw(st.sampled_from(["cut", "flip", "random", "longer"]))
    random = np.random.default_rng(seed)
    bad = good.copy()
    if kind == "cut":
        bad = bad[: data.draw(st.integers(0, bad.size - 1))]
    elif kind == "longer":
        bad = np.append(bad, random.integers(0, 256, data.draw(st.integers(1, 200)), dtype=np.uint8))
    elif kind == "random":
        bad = random.integers(0, 256, data.draw(st.integers(0, 2000)), dtype=np.uint8)
    else:
        bad[data.draw(st.integers(0, bad.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        out, _ = kernels.rans_decode(bad, n, known, steps)
    except FormatError:
        return
    assert kind != "cut"
    assert kind != "longer"
    assert (out < 32).all()


@TABLES
def test_many_streams_in_one_call(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.use(table)
    random = np.random.default_rng(5)
    counts = [0, 64, 63, 1, 640, 1000, 0, 129, 64]
    parts = [_stream(9, n, 3) for n in counts]
    known = parts[0][0]
    symbols, steps = np.concatenate([p[1] for p in parts]), np.concatenate([p[2] for p in parts])
    seeds = random.integers(0, 65536, (len(counts), 64), dtype=np.uint16)
    alone = [kernels.rans_encode(p[1], known, p[2], row).tobytes() for p, row in zip(parts, seeds, strict=True)]
    for parallel in (1 << 20, 300):
        monkeypatch.setattr(rans, "PARALLEL_SYMBOLS", parallel)
        monkeypatch.setattr(rans, "cores", lambda: 4)
        data, ends = kernels.rans_encode_many(symbols, counts, known, steps, seeds)
        assert [data[a:b].tobytes() for a, b in itertools.pairwise(ends)] == alone
        back, last = kernels.rans_decode_many(data, ends, counts, known, steps)
        assert (back == symbols).all()
        assert (last == seeds).all()
        with pytest.raises(FormatError, match="stream 4"):
            kernels.rans_decode_many(data, [*ends[:5], ends[5] + 2, *ends[6:]], counts, known, steps)


@TABLES
def test_streams_may_share_their_steps(table: str) -> None:
    kernels.use(table)
    known, symbols, steps, _ = _stream(4, 256, 3)
    data, ends = kernels.rans_encode_many(np.tile(symbols, 3), [256] * 3, known, steps)
    assert data.tobytes() == kernels.rans_encode(symbols, known, steps).tobytes() * 3
    back, seeds = kernels.rans_decode_many(data, ends, [256] * 3, known, steps)
    assert (back == np.tile(symbols, 3)).all()
    assert not seeds.any()
    assert kernels.rans_encode_many(symbols[:0], [], known, steps[:0])[0].size == 0


@TABLES
@examples("normal")
@given(seed=st.integers(0, 2**32), n=st.integers(0, 700))
def test_counts(table: str, seed: int, n: int) -> None:
    kernels.use(table)
    _, symbols, steps, _ = _stream(seed, n, 3)
    counts, want = kernels.rans_count(symbols, steps, 3), np.zeros(96, np.uint32)
    reference_rans.rans_count(symbols, steps, want)
    assert (counts.reshape(-1) == want).all()
    assert counts.sum() == n


GOOD: dict[str, Any] = {
    "symbols": np.zeros(100, np.uint8), "freqs": [[128, 128] + [0] * 30], "steps": np.zeros(2, np.uint8), "seeds": None,
}  # fmt: skip


@TABLES
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"symbols": np.full(100, 2, np.uint8)}, "without a frequency"),
        ({"symbols": np.full(100, 32, np.uint8)}, "without a frequency"),
        ({"symbols": np.full(100, 255, np.uint8)}, "without a frequency"),
        ({"symbols": np.zeros(100, np.int64)}, "symbols: needs uint8"),
        ({"symbols": np.zeros(129, np.uint8)}, "3 steps of 64 symbols, got 2"),
        ({"steps": np.ones(2, np.uint8)}, "names a table that is not there"),
        ({"steps": np.zeros(2, np.int32)}, "needs uint8 or uint16"),
        ({"steps": np.zeros(3, np.uint8)}, "2 steps of 64 symbols, got 3"),
        ({"seeds": np.zeros(63, np.uint16)}, "seeds: needs uint16"),
        ({"seeds": np.zeros(64, np.int64)}, "seeds: needs uint16"),
        ({"freqs": [[256] + [0] * 31]}, "outside of 0..255"),
        ({"freqs": [[255] + [0] * 31]}, "sum of 256"),
        ({"freqs": [[255, 2] + [0] * 30]}, "sum of 256"),
        ({"freqs": [[8.0] * 32]}, "needs integers"),
        ({"freqs": [[8] * 31]}, "needs integers"),
        ({"freqs": np.zeros((0, 32), np.uint8)}, "1 to 65536 rows"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_arguments(table: str, changed: dict[str, Any], message: str) -> None:
    kernels.use(table)
    args = GOOD | changed
    with pytest.raises(ValueError, match=message):
        kernels.rans_encode(args["symbols"], RansTables(args["freqs"]), args["steps"], args["seeds"])


def test_places_that_lie() -> None:
    known = RansTables(GOOD["freqs"])
    data = kernels.rans_encode(GOOD["symbols"], known, GOOD["steps"])
    for ends in ([0, data.size + 2], [-2, data.size], [data.size, 0], [2**62, 2**63 - 1], [0]):
        with pytest.raises(ValueError, match="offsets"):
            kernels.rans_decode_many(data, ends, [100], known, GOOD["steps"])
    for counts in ([-1], [2**63 - 1], [2**62, 2**62, 2**62]):
        with pytest.raises(ValueError, match=r"counts|table_of_step"):
            kernels.rans_decode_many(data, [0] * (len(counts) + 1), counts, known, GOOD["steps"])
    with pytest.raises(ValueError, match="out: needs"):
        kernels.rans_decode(data, 100, known, GOOD["steps"], np.zeros(99, np.uint8))
    with pytest.raises(ValueError, match="out: needs"):
        kernels.rans_encode_many(GOOD["symbols"], [100], known, GOOD["steps"], out=np.zeros(355, np.uint8))


@pytest.mark.parametrize("backend", [_native, reference_rans], ids=["native", "reference"])
def test_the_doors_check_for_themselves(backend: Any) -> None:
    tables = backend.rans_tables(np.array(GOOD["freqs"], np.uint8))
    data, ends, symbols = np.zeros(512, np.uint8), np.zeros(2, np.int64), np.zeros(100, np.uint8)
    counts, steps, seeds = np.array([100]), np.zeros(2, np.uint16), np.zeros(64, np.uint16)
    good = [tables, data, ends, symbols, counts, steps, seeds]
    assert backend.rans_encode(*good) == -1
    assert backend.rans_decode(*good) == -1
    wrong = [object(), data[:355], ends[:1], symbols[:99], np.array([-1]), steps[:1], seeds[:63]]
    for place, value in enumerate(wrong):
        with pytest.raises((ValueError, TypeError)):
            backend.rans_encode(*good[:place], value, *good[place + 1 :])
    for place, value in ((3, symbols[::2]), (5, steps.astype(np.uint32)), (4, np.array([2**62]))):
        with pytest.raises(ValueError):
            backend.rans_decode(*good[:place], value, *good[place + 1 :])
    with pytest.raises(ValueError):
        backend.rans_count(symbols, steps, np.zeros(31, np.uint32))


def test_threads_share_tables() -> None:
    known, symbols, steps, seeds = _stream(6, 20000, 4)
    want = kernels.rans_encode(symbols, known, steps, seeds).tobytes()
    wrong: list[int] = []

    def work() -> None:
        for turn in range(20):
            data = kernels.rans_encode(symbols, known, steps, seeds)
            if data.tobytes() != want or (kernels.rans_decode(data, 20000, known, steps)[0] != symbols).any():
                wrong.append(turn)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patient(60))
    assert not wrong


FORK = """
import os, numpy as np
from ctxreuse import kernels
from ctxreuse.kernels import rans, threads
rans.PARALLEL_SYMBOLS, rans.cores = 300, lambda: 2
args = np.ones(2560, np.uint8), [640] * 4, kernels.RansTables([8] * 32), np.zeros(10, np.uint8)
want = kernels.rans_encode_many(*args)[0].tobytes()
assert threads._pool is not None
child = os.fork()
if child == 0:
    os._exit(0 if kernels.rans_encode_many(*args)[0].tobytes() == want else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_makes_its_own_threads() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=patient(60))
    assert done.stdout == "0\n", done.stderr
