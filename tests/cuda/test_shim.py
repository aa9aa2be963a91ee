"""The shim itself: collectives give what CUDA's do, and threads that miss each other end the process with a message."""

import subprocess
from pathlib import Path

import pytest

from support import native_builds

pytestmark = pytest.mark.build("shim-tests")


@pytest.fixture(scope="module")
def program() -> Path:
    return native_builds.shim_tests()


def test_collectives_are_those_of_cuda(program: Path) -> None:
    done = subprocess.run([program, "s"], capture_output=True, text=True, check=True)
    # Two blocks: sums of 0 to 63 twice, 128 threads. Lane 40's warp has lanes 32 to 63, of which 33, 36... count.
    ballots = [sum(1 << lane for lane in range(32) if (first + lane) % 3 == 0) for first in (0, 32)]
    assert done.stdout == f"{ballots[0]:08x} {ballots[1]:08x} 2 36 {2 * 2016} 128\n"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("different", "lanes of a warp meet in different collectives"),
        ("absent", "every thread waits for one that will not come"),
        ("partial", "a mask that is not full"),
        ("whole", "a block that is not made of whole warps"),
        ("beyond", "heap-buffer-overflow"),
    ],
)
def test_what_cuda_would_not_forgive_ends_the_process(program: Path, kind: str, message: str) -> None:
    done = subprocess.run([program, kind], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert message in done.stderr
