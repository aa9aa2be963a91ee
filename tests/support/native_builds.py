"""What tests need built of ``native/``, made once for a state of the sources and kept under ``build/tests``.

Each function returns at once where that was built before; of several processes one builds and the others wait.
``python -m support.native_builds`` (in ``tests``) builds everything that this machine can, or what is named.
"""

from __future__ import annotations

import fcntl
import hashlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import cmake
import ninja

__all__ = [
    "BUILDERS",
    "CUDA_TEXT",
    "ROOT",
    "missing_for_neon",
    "neon",
    "run_tests",
    "sanitized",
    "shim",
    "shim_tests",
    "wheel",
]

ROOT: Final = Path(__file__).resolve().parents[2]
NATIVE: Final = ROOT / "native"
BUILDS: Final = ROOT / "build" / "tests"
CUDA_TEXT: Final = NATIVE / "cuda"

_SHIM: Final = ("-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-DCTX_SHIM")
# Not optimised: g++ takes ten times as long to optimise checks as it takes to run what the tests run.
_SANITIZE: Final = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O0")
_CROSS_COMPILER: Final = "aarch64-linux-gnu-gcc"
_EMULATOR: Final = "qemu-aarch64"
_KEPT: Final = 2  # builds of a kind, so that going back to another branch costs nothing
_SECONDS: Final = 3600  # ends what hangs; in the background of a busy machine a build takes its time


def sanitized() -> Path:
    """Build the C tests under the address and undefined-behaviour sanitizers; the build folder, for `run_tests`."""
    compiler = shutil.which("gcc") or shutil.which("clang") or "cc"  # clang often lacks the sanitizers' runtime
    return _c_tests("sanitized", compiler, "-DCTXREUSE_SANITIZE=ON")


def missing_for_neon() -> list[str]:
    """Name the programs that `neon` lacks here."""
    return [tool for tool in (_CROSS_COMPILER, _EMULATOR) if shutil.which(tool) is None]


def neon() -> Path:
    """Build the C tests for aarch64, to be run under QEMU; the build folder, for `run_tests`."""
    return _c_tests(
        "neon",
        _CROSS_COMPILER,
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
        f"-DCMAKE_CROSSCOMPILING_EMULATOR={_EMULATOR}",
    )


def run_tests(folder: Path) -> str:
    """Run the C tests that were built there; what they print. AssertionError if one fails."""
    return _run([Path(cmake.CMAKE_BIN_DIR) / "ctest", "--test-dir", folder, "--verbose", "--no-tests=error"])


def shim(*, sanitize: bool = False) -> Path:
    """Compile the CUDA text for this processor; the library, for `support.shim.Shim`.

    With ``sanitize`` it ends the process at the first access out of bounds and at undefined behaviour.
    """
    name = "shim-sanitized" if sanitize else "shim"
    options = (*_SHIM, "-O2", "-Werror", "-shared", "-fPIC", *(_SANITIZE if sanitize else ()))
    return _cpp(name, CUDA_TEXT / "shim" / "shim.cpp", options)


def shim_tests() -> Path:
    """Compile the program that tests the shim itself."""
    return _cpp("shim-tests", NATIVE / "tests" / "shim.cpp", (*_SHIM, "-fsanitize=address", f"-I{CUDA_TEXT}"))


def wheel() -> Path:
    """Build the wheel from tracked files only: a leftover of the working tree cannot hide a missing one."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    left_out = {"tests", "docs", "benchmarks", "examples", ".ci"}
    names = [name for name in listed.split("\0") if name and name.split("/")[0] not in left_out]
    sources = [ROOT / name for name in names if (ROOT / name).is_file()]
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]

    def build(folder: Path) -> None:
        shutil.rmtree(folder / "source", ignore_errors=True)
        for path in sources:
            copy = folder / "source" / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        _run([*command, "-w", folder, folder / "source"])

    (built,) = _once("wheel", sources, command, build).glob("*.whl")
    return built


def _c_tests(name: str, compiler: str, *options: str) -> Path:
    tool = Path(cmake.CMAKE_BIN_DIR) / "cmake"
    make = shutil.which("ninja") or Path(ninja.BIN_DIR) / "ninja"
    configure: list[str | Path] = [
        tool, "-S", NATIVE, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={make}", f"-DCMAKE_C_COMPILER={compiler}",
        "-DCTXREUSE_PYTHON=OFF", "-DCTXREUSE_TESTS=ON", *options,
    ]  # fmt: skip

    def build(folder: Path) -> None:
        _run([*configure, "-B", folder])
        _run([tool, "--build", folder])

    sources = [path for path in NATIVE.rglob("*") if path.relative_to(NATIVE).parts[0] not in ("cuda", "python")]
    return _once(name, sources, [compiler, *options], build)


def _cpp(name: str, source: Path, options: Sequence[str]) -> Path:
    compiler = shutil.which("g++") or shutil.which("clang++") or "c++"
    command = [compiler, *options]
    sources = [source, *CUDA_TEXT.rglob("*")]
    return _once(name, sources, command, lambda folder: _run([*command, "-o", folder / name, source])) / name


def _once(name: str, sources: Sequence[Path], command: Sequence[str], build: Callable[[Path], object]) -> Path:
    digest = hashlib.sha256("\0".join([platform.machine(), *command]).encode())
    for path in sorted(path for path in sources if path.is_file()):
        digest.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    folder = BUILDS / f"{name}-{digest.hexdigest()[:16]}"
    done = folder / "built"
    if done.exists():
        return folder
    BUILDS.mkdir(parents=True, exist_ok=True)
    with (BUILDS / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir(exist_ok=True)
            build(folder)
            done.touch()
            others = sorted(BUILDS.glob(f"{name}-{'?' * 16}/built"), key=lambda path: path.stat().st_mtime)
            for old in others[:-_KEPT]:
                shutil.rmtree(old.parent)
    return folder


def _run(command: Sequence[str | Path]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_SECONDS)
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout[-6000:]}"
    return done.stdout


#: By the name that a test's ``build`` marker has.
BUILDERS: Final[dict[str, Callable[[], Path | None]]] = {
    "wheel": wheel,
    "shim": shim,
    "shim-tests": shim_tests,
    "shim-sanitized": lambda: shim(sanitize=True),
    "sanitized": sanitized,
    "neon": lambda: None if missing_for_neon() else neon(),
}


if __name__ == "__main__":
    for name in sys.argv[1:] or BUILDERS:
        print(name, BUILDERS[name]())
