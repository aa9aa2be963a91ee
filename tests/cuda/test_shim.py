"""The shim itself: collectives give what CUDA's do, and threads that miss each other end the process with a message."""

import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAM = """
#include "shim/shim.cpp"
#include <cstdio>

static unsigned ballots[64], swapped[64], sums[64], added;

static void sound() {
    unsigned *const memory = (unsigned *)shim::shared_memory();
    const unsigned t = threadIdx.x;
    ballots[t] = __ballot_sync(~0u, t % 3 == 0);
    swapped[t] = __shfl_xor_sync(~0u, t, 5);
    memory[t] = t;
    __syncthreads();
    for (unsigned i = 0; i < blockDim.x; i++) sums[t] += memory[i];
    atomicAdd(&added, 1u);
}
static void different() { if (threadIdx.x == 3) __syncwarp(); else __ballot_sync(~0u, 1); }
static void absent() { if (threadIdx.x != 3) __syncthreads(); }
static void partial() { __syncwarp(1u); }
static void beyond() { shim::shared_memory()[threadIdx.x + 1] = 1; }

static void start(void (*kernel)(), unsigned block, size_t bytes) {
    void *none[1];
    shim::launch(kernel, 2, block, bytes, none);
}

int main(int, char **arguments) {
    switch (arguments[1][0]) {
    case 's':
        start(sound, 64, 256);
        std::printf("%08x %08x %u %u %u %u\\n", ballots[0], ballots[40], swapped[7], swapped[33], sums[63], added);
        break;
    case 'd': start(different, 32, 0); break;
    case 'a': start(absent, 32, 0); break;
    case 'p': start(partial, 32, 0); break;
    case 'b': start(beyond, 32, 32); break;
    case 'w': start(sound, 40, 256); break;
    }
}
"""


@pytest.fixture(scope="module")
def program(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shim")
    (folder / "program.cpp").write_text(PROGRAM)
    compiler = shutil.which("g++") or shutil.which("clang++") or "c++"
    options = ["-std=c++17", "-DCTX_SHIM", "-Wno-unknown-pragmas", "-fsanitize=address", f"-I{source}"]
    subprocess.run([compiler, *options, "-o", folder / "program", folder / "program.cpp"], check=True)
    return folder / "program"


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
