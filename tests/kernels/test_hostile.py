"""Arguments that lie are refused with ValueError or TypeError by the extension and the reference; nothing crashes."""

import mmap
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import _native, kernels
from oracle.kernels import reference
from support.examples import examples

BACKENDS = pytest.mark.parametrize("backend", [_native, reference], ids=["native", "reference"])
BYTES = 4096
REFUSED = (ValueError, TypeError)
HUGE = [2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**200]


def _brief(changed: dict[str, Any]) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(changed))[:60]


def _box(**changed: Any) -> list[Any]:
    """Arguments of a box of 2 x 4 x 8 fp32 in one buffer and in another, with some replaced."""
    args: dict[str, Any] = {
        "dst": bytearray(BYTES), "dst_dtype": 0, "dst_offset": 0, "dst_strides": (32, 8, 1),
        "src": bytes(BYTES), "src_dtype": 0, "src_offset": 0, "src_strides": (32, 8, 1), "shape": (2, 4, 8),
    }  # fmt: skip
    assert changed.keys() <= args.keys()
    return list((args | changed).values())


BAD_BOXES: list[dict[str, Any]] = [
    *({"dst_offset": n} for n in (-1, BYTES - 255, BYTES + 1, *HUGE)),
    *({"src_offset": n} for n in (-1, BYTES - 255, BYTES + 1, *HUGE)),
    *({"dst_strides": (n, 8, 1)} for n in (-1, 0, 31, 2**10, *HUGE)),
    *({"src_strides": (32, n, 1)} for n in (-1, 2**10, *HUGE)),
    *({"shape": (n, 4, 8)} for n in (-1, 33, *HUGE)),
    *(
        {"shape": shape}
        for shape in ((2**32, 2**32, 1), (2**63 - 1, 2**63 - 1, 2**63 - 1), (1, 2), (1, 2, 3, 4), 5, None)
    ),
    *({"dst_strides": strides} for strides in ((32,), (1, 2, 3, 4), (), None, 7, "abc", (8.0, 1.0), (8, None, 1))),
    *({"dst_dtype": code} for code in (-1, 3, 2**70, "fp32", None, 1.5)),
    *({"src_dtype": code} for code in (-1, 3, 2**70, "fp32", None, 1.5)),
    *({"dst": buffer} for buffer in (bytes(BYTES), None, 7, "text", [1, 2], bytearray(255), bytearray())),
    *({"src": buffer} for buffer in (None, 7, "text", [1, 2], bytes(255), b"")),
    {"src": np.zeros(2048, np.float32)[::-1]},
    {"dst": memoryview(bytearray(BYTES)).toreadonly()},
]


def _check_released(*buffers: Any) -> None:
    """A bytearray that anyone still holds as a buffer refuses to grow."""
    for buffer in buffers:
        if isinstance(buffer, bytearray):
            buffer.append(0)
            buffer.pop()


@BACKENDS
@pytest.mark.parametrize("changed", BAD_BOXES, ids=_brief)
def test_rope_shift_refuses(backend: Any, changed: dict[str, Any]) -> None:
    args = _box(**changed)
    for angles in (np.ones(4, np.float32), np.ones(0, np.float32)):
        with pytest.raises(REFUSED):
            backend.rope_shift(*args, angles, angles, False)
    _check_released(*args)


@BACKENDS
@pytest.mark.parametrize(
    ("cos", "sin"),
    [
        (np.ones(5, np.float32), np.ones(5, np.float32)),
        (np.ones(4, np.float32), np.ones(3, np.float32)),
        (np.ones(4, np.float64), np.ones(4, np.float64)),
        (np.ones(8, np.float32)[::2], np.ones(8, np.float32)[::2]),
        (np.ones(8, np.float32)[::2], np.ones(7, np.float32)),
        (None, np.ones(4, np.float32)),
        (np.ones(4, np.float32), "x"),
    ],
    ids=["too many", "lengths", "float64", "strided", "one strided", "none", "text"],
)
def test_rope_shift_refuses_angles(backend: Any, cos: Any, sin: Any) -> None:
    with pytest.raises(REFUSED):
        backend.rope_shift(*(args := _box()), cos, sin, False)
    _check_released(*args)


ZEROS = xxhash.xxh3_64_intdigest(bytes(256))


def _run(**changed: Any) -> list[Any]:
    """Arguments of two planes of 2 x 4 x 16 fp16 into a tensor, with some replaced."""
    args: dict[str, Any] = {
        "tensor": bytearray(BYTES), "dtype": 1, "offset": 0, "strides": (8 * 16, 16),
        "planes": [bytearray(256), bytearray(256)], "offsets": [0, 0], "planes_dtype": 1,
        "heads": 2, "dim": 16, "counts": [4, 4], "checksums": [ZEROS, ZEROS],
    }  # fmt: skip
    assert changed.keys() <= args.keys()
    return list((args | changed).values())


BAD_RUNS: list[dict[str, Any]] = [
    *({"offset": n} for n in (-1, BYTES - 511, *HUGE)),
    *({"strides": strides} for strides in ((2**40, 16), (128, 2**62), (-1, 16), (128,), None, (128, 16, 2**61))),
    *(
        {"offsets": offsets}
        for offsets in ([0], [0, 0, 0], [0, -1], [0, 1], [0, 2**63 - 1], [0, 2**64], [0, "0"], None)
    ),
    *({"counts": counts} for counts in ([4], [4, -1], [4, 5], [4, 2**62], [2**63 - 1, 2**63 - 1], [4, None], 4)),
    *({"planes": planes} for planes in ([bytearray(256)], [bytearray(256), 3], [None, None], 5, [bytearray(256), b""])),
    *({"heads": n} for n in (-1, 5, *HUGE)),
    *({"dim": n} for n in (-1, 17, *HUGE)),
    *({"dtype": n} for n in (-1, 3, None)),
    *({"planes_dtype": n} for n in (-1, 3, 2**70)),
]


@BACKENDS
@pytest.mark.parametrize("changed", BAD_RUNS, ids=_brief)
def test_scatter_checked_refuses(backend: Any, changed: dict[str, Any]) -> None:
    args = _run(**changed)
    with pytest.raises(REFUSED):
        backend.scatter_checked(*args)
    assert not any(args[0])
    _check_released(args[0], *(args[4] if isinstance(args[4], list) else ()))


@BACKENDS
def test_scatter_checked_refuses_what_cannot_be_written(backend: Any) -> None:
    with pytest.raises(ValueError, match="writable"):
        backend.scatter_checked(*_run(tensor=bytes(BYTES)))
    with pytest.raises(ValueError, match="share an address"):
        backend.scatter_checked(*_run(strides=(16, 16)))


@BACKENDS
def test_a_run_of_nothing(backend: Any) -> None:
    for args in (
        _run(planes=[], offsets=[], counts=[], checksums=[]),
        _run(counts=[0, 0], heads=2**40),
        _run(heads=0, counts=[2**40, 2]),
    ):
        assert backend.scatter_checked(*args) == -1
        _check_released(args[0], *args[4])


@pytest.mark.parametrize("entry", ["rope_shift", "scatter_checked", "advise_hugepages"])
def test_wrong_number_of_arguments(entry: str) -> None:
    for count in (0, 1, 8, 13, 40):
        with pytest.raises(TypeError, match="takes"):
            getattr(_native, entry)(*[0] * count)


numbers = st.integers(-2, 9) | st.sampled_from([60, 64, 255, 256, *HUGE])
triples = st.tuples(numbers, numbers, numbers)


@examples("light")
@given(
    strides=triples,
    others=triples,
    shape=triples,
    offset=numbers,
    dtypes=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_the_extension_refuses_what_the_reference_refuses(
    strides: tuple[int, ...], others: tuple[int, ...], shape: tuple[int, ...], offset: int, dtypes: tuple[int, int]
) -> None:
    none = np.zeros(0, np.float32)

    def outcome(shift: Callable[..., None]) -> bytes | None:
        dst = bytearray(256)
        try:
            shift(dst, dtypes[0], offset, strides, bytes(range(256)), dtypes[1], 0, others, shape, none, none, False)
        except ValueError:
            return None
        return bytes(dst)

    assert outcome(_native.rope_shift) == outcome(reference.rope_shift)


class _Meddler:
    """An index that empties the list it came from while the extension reads it."""

    def __init__(self, victim: list[Any]) -> None:
        self.victim = victim

    def __index__(self) -> int:
        self.victim.clear()
        return 0


def test_a_list_that_changes_while_it_is_read() -> None:
    offsets: list[Any] = []
    offsets += [_Meddler(offsets), _Meddler(offsets)]
    assert _native.scatter_checked(*_run(offsets=offsets)) == -1
    assert offsets == []


def test_the_door_refuses_names_and_floats() -> None:
    a = np.zeros((1, 2, 4), np.float32)
    with pytest.raises(ValueError, match="'fp8' is unknown"):
        kernels.rope_shift(a, a, a.shape, [], [], dst_dtype="fp8")
    with pytest.raises(TypeError, match="array of float32 given as bf16"):
        kernels.rope_shift(a, a, a.shape, [], [], dst_dtype="bf16")
    with pytest.raises(TypeError, match="array of float64 given as fp32"):
        kernels.rope_shift(a, a.astype(np.float64), a.shape, [1.0], [0.0], dst_dtype="fp32")
    with pytest.raises(ValueError, match=r"needs \(heads, tokens, dim\)"):
        kernels.rope_shift(a, a, (2, 4), [], [], dst_dtype="fp32")
    with pytest.raises(ValueError, match="not usable"):
        kernels.use("mmx")


@BACKENDS
def test_advise_hugepages(backend: Any) -> None:
    with mmap.mmap(-1, 9 << 20) as mapped:
        mapped[:3] = b"abc"
        advised = backend.advise_hugepages(mapped, True)
        assert advised == 0 or (advised % (2 << 20) == 0 and advised >= 6 << 20)
        assert mapped[:3] == b"abc"
    assert backend.advise_hugepages(bytes(4096), False) == 0
    with pytest.raises(ValueError, match="writable"):
        backend.advise_hugepages(bytes(4096), True)
    assert kernels.advise_hugepages(bytearray(64), populate=True) == 0
