"""Builds the C tests with CMake and Ninja, as the wheel's build does, and runs them with ctest."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import cmake
import ninja
import pytest

SOURCE = Path(__file__).resolve().parents[2] / "native"


@pytest.fixture
def run_native_tests(tmp_path: Path) -> Callable[..., str]:
    """A function of CMake options that builds the C tests in a fresh folder, runs them and returns what they print."""

    def run(*options: str) -> str:
        tools = Path(cmake.CMAKE_BIN_DIR)
        make = Path(ninja.BIN_DIR) / "ninja"
        build = tmp_path / "build"
        steps: list[list[str | Path]] = [
            [
                tools / "cmake", "-S", SOURCE, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={make}",
                "-DCTXREUSE_PYTHON=OFF", "-DCTXREUSE_TESTS=ON", *options,
            ],
            [tools / "cmake", "--build", build],
            [tools / "ctest", "--test-dir", build, "--verbose", "--no-tests=error"],
        ]  # fmt: skip
        printed = ""
        for step in steps:
            done = subprocess.run(step, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
            printed += done.stdout
            assert done.returncode == 0, f"{step[0]} failed:\n{printed[-6000:]}"
        return printed

    return run
