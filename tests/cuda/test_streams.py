"""rANS through the CUDA kernels' text: the CPU's bytes, symbols and counts, and how hostile bytes are met."""

import numpy as np
import pytest

from ctxreuse import kernels
from ctxreuse.cuda import rans
from ctxreuse.errors import FormatError
from support.device import compare_streams, sample_streams
from support.shim import Shim

pytestmark = pytest.mark.build("shim")


@pytest.mark.parametrize("counts", [[6400], [1, 63, 64, 65, 0, 128, 1000], [12_345, 3]], ids=str)
def test_streams_equal_the_cpu(shim: Shim, counts: list[int]) -> None:
    compare_streams(shim, len(counts), counts)


def test_equal_streams_may_share_their_steps(shim: Shim) -> None:
    symbols, tables, steps, _ = sample_streams(1, [640])
    both = np.concatenate([symbols, symbols])
    wanted, offsets = kernels.rans_encode_many(both, [640, 640], tables, steps)
    assert (rans.decode(shim, wanted, offsets, [640, 640], tables, steps)[0] == both).all()


@pytest.mark.parametrize("seed", range(3))
def test_hostile_bytes_are_refused_or_decode_as_on_the_cpu(shim: Shim, seed: int) -> None:
    random = np.random.default_rng(seed)
    symbols, tables, steps, seeds = sample_streams(seed, [1000])
    good = kernels.rans_encode(symbols, tables, steps, seeds[0])
    for _ in range(80):
        data = good.copy()
        kind = random.integers(3)
        if kind == 0:
            data = data[: random.integers(data.size)]
        elif kind == 1:
            data[random.integers(data.size)] ^= 1 << random.integers(8)
        else:
            data = random.integers(0, 256, random.integers(0, 3000), dtype=np.uint8)
        try:
            wanted = kernels.rans_decode(data, 1000, tables, steps)
        except FormatError:
            with pytest.raises(FormatError, match="stream 0"):
                rans.decode(shim, data, [0, data.size], [1000], tables, steps)
            continue
        made, ends = rans.decode(shim, data, [0, data.size], [1000], tables, steps)
        assert (made == wanted[0]).all()
        assert (ends[0] == wanted[1]).all()


def test_wrong_arguments_are_refused(shim: Shim) -> None:
    symbols, tables, steps, seeds = sample_streams(0, [100])
    data = kernels.rans_encode(symbols, tables, steps)
    ends = [0, data.size]
    unknown = steps + np.uint16(len(tables))
    some = np.full(100, 3, np.uint8)  # table 0 knows 0 and 1
    for call, reason in [
        (lambda: rans.decode(shim, data, ends, [200], tables, steps), "steps of 64"),
        (lambda: rans.decode(shim, data, [0, data.size + 1], [100], tables, steps), "offsets"),
        (lambda: rans.decode(shim, data, [5, 0], [100], tables, steps), "offsets"),
        (lambda: rans.decode(shim, data, ends, [-1], tables, steps), "counts"),
        (lambda: rans.decode(shim, data, ends, [100], tables, unknown), "not there"),
        (lambda: rans.decode(shim, data.astype(np.uint16), ends, [100], tables, steps), "needs uint8"),
        (lambda: rans.encode(shim, symbols, [100], tables, unknown), "not there"),
        (lambda: rans.encode(shim, symbols[:99], [100], tables, steps), "needs 100"),
        (lambda: rans.encode(shim, symbols, [100], tables, steps, seeds[0, :63]), "seeds"),
        (lambda: rans.encode(shim, some, [100], tables, steps * 0), "no frequency"),
        (lambda: rans.count(shim, some + 30, steps, 9), "32 or more"),
        (lambda: rans.count(shim, some, steps, 0), "no table"),
        (lambda: rans.count(shim, some, steps[:1], 9), "steps of 64"),
    ]:
        with pytest.raises(ValueError, match=reason):
            call()


def test_too_many_tables_for_shared_memory_are_refused(shim: Shim) -> None:
    tables = kernels.RansTables([[128, 128] + [0] * 30] * 700)
    with pytest.raises(ValueError, match="shared memory"):
        rans.decode(shim, np.zeros(256, np.uint8), [0, 256], [0], tables, np.zeros(0, np.uint16))
