"""Arguments that lie are refused with ValueError or TypeError by the extension and the reference; nothing crashes."""

import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxreuse import _native, kernels
from ctxreuse.kernels import reference

BACKENDS = pytest.mark.parametrize("backend", [_native, reference], ids=["native", "reference"])
BYTES = 4096
REFUSED = (ValueError, TypeError)
HUGE = [2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**200]


def _brief(changed: dict[str, Any]) -> str:
    return str(changed)[:60]


def _box(**changed: Any) -> list[Any]:
    """Arguments of a copy of 2 x 4 x 8 fp32 from one buffer to another, with some replaced."""
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
def test_copy3_and_rope_shift_refuse(backend: Any, changed: dict[str, Any]) -> None:
    args = _box(**changed)
    angles = np.ones(4, np.float32)
    with pytest.raises(REFUSED):
        backend.copy3(*args)
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


def _run(**changed: Any) -> list[Any]:
    args: dict[str, Any] = {
        "tensor": bytearray(BYTES), "dtype": 1, "offset": 0, "strides": (8 * 8, 8),
        "planes": [bytearray(256), bytearray(256)], "offsets": [0, 0], "planes_dtype": 1,
        "heads": 2, "dim": 8, "counts": [4, 4],
    }  # fmt: skip
    assert changed.keys() <= args.keys()
    return list((args | changed).values())


BAD_RUNS: list[dict[str, Any]] = [
    *({"offset": n} for n in (-1, BYTES - 255, *HUGE)),
    *({"strides": strides} for strides in ((2**40, 8), (64, 2**62), (-1, 8), (64,), None, (64, 8, 2**61))),
    *(
        {"offsets": offsets}
        for offsets in ([0], [0, 0, 0], [0, -1], [0, 129], [0, 2**63 - 1], [0, 2**64], [0, "0"], None)
    ),
    *({"counts": counts} for counts in ([4], [4, -1], [4, 9], [4, 2**62], [2**63 - 1, 2**63 - 1], [4, None], 4)),
    *({"planes": planes} for planes in ([bytearray(256)], [bytearray(256), 3], [None, None], 5, [bytearray(256), b""])),
    *({"heads": n} for n in (-1, 5, *HUGE)),
    *({"dim": n} for n in (-1, 17, *HUGE)),
    *({"dtype": n} for n in (-1, 3, None)),
    *({"planes_dtype": n} for n in (-1, 3, 2**70)),
]


@BACKENDS
@pytest.mark.parametrize("changed", BAD_RUNS, ids=_brief)
def test_runs_refuse(backend: Any, changed: dict[str, Any]) -> None:
    for run in (backend.scatter_run, backend.gather_run):
        args = _run(**changed)
        before = bytes(args[0]) if isinstance(args[0], bytearray) else b""
        with pytest.raises(REFUSED):
            run(*args)
        assert bytes(args[0]) == before
        _check_released(args[0], *(args[4] if isinstance(args[4], list) else ()))


@BACKENDS
def test_runs_refuse_what_cannot_be_written(backend: Any) -> None:
    with pytest.raises(ValueError, match="writable"):
        backend.scatter_run(*_run(tensor=bytes(BYTES)))
    with pytest.raises(ValueError, match="writable"):
        backend.gather_run(*_run(planes=[bytearray(256), bytes(256)]))
    with pytest.raises(ValueError, match="share an address"):
        backend.scatter_run(*_run(strides=(8, 8)))
    args = _run(strides=(8, 8))
    backend.gather_run(*args)  # reading the same address twice is fine
    _check_released(args[0], *args[4])


@BACKENDS
def test_a_run_of_nothing(backend: Any) -> None:
    for args in (
        _run(planes=[], offsets=[], counts=[]),
        _run(counts=[0, 0], heads=2**40),
        _run(heads=0, counts=[2**40, 2]),
    ):
        backend.scatter_run(*args)
        backend.gather_run(*args)
        _check_released(args[0], *args[4])


@pytest.mark.parametrize("entry", ["copy3", "rope_shift", "scatter_run", "gather_run", "advise_hugepages"])
def test_wrong_number_of_arguments(entry: str) -> None:
    for count in (0, 1, 8, 11, 40):
        with pytest.raises(TypeError, match="takes"):
            getattr(_native, entry)(*[0] * count)


numbers = st.integers(-2, 9) | st.sampled_from([60, 64, 255, 256, *HUGE])
triples = st.tuples(numbers, numbers, numbers)


@settings(max_examples=400, deadline=None)
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
    def outcome(copy: Callable[..., None]) -> bytes | None:
        dst = bytearray(256)
        try:
            copy(dst, dtypes[0], offset, strides, bytes(range(256)), dtypes[1], 0, others, shape)
        except ValueError:
            return None
        return bytes(dst)

    assert outcome(_native.copy3) == outcome(reference.copy3)


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
    _native.scatter_run(*_run(offsets=offsets))
    assert offsets == []


def test_the_door_refuses_names_and_floats() -> None:
    a = np.zeros((1, 2, 4), np.float32)
    with pytest.raises(ValueError, match="'fp8' is unknown"):
        kernels.copy3(a, a, a.shape, dst_dtype="fp8")
    with pytest.raises(TypeError, match="array of float32 given as bf16"):
        kernels.copy3(a, a, a.shape, dst_dtype="bf16")
    with pytest.raises(TypeError, match="array of float64 given as fp32"):
        kernels.rope_shift(a, a.astype(np.float64), a.shape, [1.0], [0.0], dst_dtype="fp32")
    with pytest.raises(ValueError, match=r"needs \(heads, tokens, dim\)"):
        kernels.copy3(a, a, (2, 4), dst_dtype="fp32")
    with pytest.raises(ValueError, match="not usable"):
        kernels.use("mmx")


@BACKENDS
def test_populate(backend: Any, tmp_path: Path) -> None:
    path = tmp_path / "map"
    path.write_bytes(bytes(3 * mmap.PAGESIZE + 5))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert backend.populate(mapped) == 3 * mmap.PAGESIZE + 5
    assert backend.populate(b"") == 0
    assert backend.populate(np.zeros((4, 5), np.float32)[:, 1:4:2]) == 72
    with pytest.raises(TypeError):
        backend.populate(3)


def _resident(mapped: mmap.mmap) -> int:
    """Bytes of a map that this process has page table entries for, from /proc/self/smaps."""
    start = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{start:x}-"))
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) << 10


@BACKENDS
@pytest.mark.skipif(sys.platform != "linux", reason="page counts are read from /proc")
def test_populate_makes_pages_present(backend: Any, tmp_path: Path) -> None:
    path = tmp_path / "map"
    path.write_bytes(bytes(4 << 20))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert _resident(mapped) == 0
        backend.populate(mapped)
        assert _resident(mapped) == 4 << 20


def test_populate_tells_of_a_map_longer_than_its_file(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(bytes(4 * mmap.PAGESIZE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        file.truncate(mmap.PAGESIZE)
        with pytest.raises(OSError):
            _native.populate(mapped)


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
    assert kernels.populate(bytearray(64)) == 64
