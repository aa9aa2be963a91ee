"""Joint planes between decoding and use: decoded once for all who ask, kept no longer than needed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from codec.test_codec import DIM, HEADS, PLANES, codec_of

from ctxreuse.block.format import parse
from ctxreuse.codec.joint import JointPlanes
from ctxreuse.errors import FormatError
from ctxreuse.testing.codec import resealed
from support.profiles import make_block, make_space

PLACES = tuple((layer, role) for layer in range(3) for role in "kv")
SPACE = make_space("bfloat16")
BLOCK = make_block(SPACE, codec_of(SPACE).profile)


def rows(number: int = 0) -> np.ndarray:
    return np.arange(len(PLACES) * 4, dtype=np.uint16).reshape(len(PLACES), 1, 2, 2) + number


def waiting(kept: JointPlanes) -> int:
    """Bytes of decoded planes that were not all taken."""
    return sum(run.nbytes for run in kept._runs.values())


def test_planes_are_decoded_once_and_dropped_when_all_were_taken() -> None:
    kept, calls = JointPlanes(), []

    def decode() -> np.ndarray:
        calls.append(1)
        return rows()

    for i, place in enumerate(PLACES):
        assert (kept.take("run", BLOCK, PLACES, place, decode) == rows()[i]).all()
        assert waiting(kept) == (rows().nbytes if i + 1 < len(PLACES) else 0)
    assert len(calls) == 1
    kept.take("run", BLOCK, PLACES, PLACES[0], decode)
    assert len(calls) == 2


def test_threads_wait_for_the_one_that_decodes() -> None:
    kept, calls, started = JointPlanes(), [], threading.Barrier(len(PLACES))

    def decode() -> np.ndarray:
        calls.append(1)
        return rows()

    def take(i: int) -> bool:
        started.wait(30)
        return bool((kept.take("run", BLOCK, PLACES, PLACES[i], decode) == rows()[i]).all())

    with ThreadPoolExecutor(len(PLACES)) as pool:
        assert all(pool.map(take, range(len(PLACES))))
    assert len(calls) == 1
    assert waiting(kept) == 0


def test_the_oldest_go_where_there_are_too_many() -> None:
    kept = JointPlanes(kept=2 * rows().nbytes)
    for number in range(5):
        kept.take(number, BLOCK, PLACES, PLACES[0], lambda n=number: rows(n))
        assert waiting(kept) <= 2 * rows().nbytes
    small = JointPlanes(kept=0)
    for i, place in enumerate(PLACES):
        assert (small.take("run", BLOCK, PLACES, place, rows) == rows()[i]).all()


def test_what_a_load_that_ended_has_not_taken_goes_with_its_blocks() -> None:
    kept = JointPlanes()
    one, two = (make_block(SPACE, codec_of(SPACE).profile, seed=seed) for seed in (1, 2))
    kept.take("one", one, PLACES, PLACES[0], rows)
    kept.take("two", two, PLACES, PLACES[0], rows)
    assert waiting(kept) == 2 * rows().nbytes
    del one
    assert waiting(kept) == rows().nbytes
    assert (kept.take("one", two, PLACES, PLACES[1], rows) == rows()[1]).all()
    del two
    assert waiting(kept) == 0


def test_what_cannot_be_decoded_is_an_error_each_time_and_nothing_stays() -> None:
    kept = JointPlanes()

    def corrupt() -> np.ndarray:
        raise FormatError("corrupt")

    for _ in range(2):
        with pytest.raises(FormatError, match="corrupt"):
            kept.take("run", BLOCK, PLACES, PLACES[1], corrupt)
    assert waiting(kept) == 0
    assert (kept.take("run", BLOCK, PLACES, PLACES[1], rows) == rows()[1]).all()


@pytest.mark.parametrize("damage", [9, 300])
def test_a_damaged_stream_is_an_error_for_every_plane(damage: int) -> None:
    space = make_space("bfloat16")
    codec = codec_of(space)
    data = np.frombuffer(codec.encode(make_block(space, codec.profile), "kl-0.05-joint"), np.uint8).copy()
    data[parse(data).offset(*PLANES[0]) + damage] ^= 4
    for place in PLANES:
        with pytest.raises(FormatError, match="checksum"):
            codec.fill([parse(data)], *place, np.zeros((HEADS, 64, DIM), np.uint16), 0)
    with pytest.raises(FormatError, match="plane 'k' of layer 0 is corrupt"):
        codec.decode(parse(data))


def test_bytes_in_a_plane_that_must_be_empty_are_refused() -> None:
    from ctxreuse.block.format import Layout, Plane, reseal

    space = make_space("bfloat16")
    codec = codec_of(space)
    coded = parse(codec.encode(make_block(space, codec.profile), "kl-0.05-joint"))
    planes = [Plane(p.layer, p.role, p.dtype, (4,) if not p.nbytes else p.shape) for p in coded.layout.planes]
    more = {(p.layer, p.role): memoryview(b"more") for p in coded.layout.planes if not p.nbytes}
    streams = {PLANES[0]: coded.plane(*PLANES[0])} | more
    bad = parse(reseal(coded, streams, layout=Layout(tuple(planes)), level=coded.header.level))
    with pytest.raises(FormatError, match="is not empty in a joint block"):
        codec.decode(bad)
    assert resealed(coded, {}).header.level == coded.header.level
