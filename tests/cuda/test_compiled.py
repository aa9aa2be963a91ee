"""Every CUDA file compiles for sm_90 without spilling a register, and holds the kernels that Python names."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ctxreuse.cuda.launch import FILES, text_folder

# Registers a thread: what was seen, with some room. Beyond, fewer warps fit onto a multiprocessor.
MOST = {
    "ctx_rans_decode": 40, "ctx_rans_encode": 40, "ctx_rans_count": 40, "ctx_klt_decode": 160, "ctx_klt_quantise": 72,
    "ctx_klt_code": 48, "ctx_klt_pack": 48,
}  # fmt: skip
KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(')
USED = re.compile(r"entry function '(\w+)' for 'sm_90'.*?(\d+) bytes spill stores.*?Used (\d+) registers", re.DOTALL)


def test_files_hold_the_kernels_that_are_named(source: Path) -> None:
    assert {path.name for path in source.glob("*.cu")} == set(FILES)
    for name, kernels in FILES.items():
        assert tuple(KERNEL.findall((source / name).read_text())) == kernels


def test_what_is_installed_is_this_text(source: Path) -> None:
    folder = text_folder()
    names = {path.name for pattern in ("*.cu", "*.cuh") for path in source.glob(pattern)}
    assert {path.name for path in folder.iterdir()} == names
    assert all((folder / name).read_bytes() == (source / name).read_bytes() for name in names)


@pytest.mark.parametrize("name", FILES)
def test_nvcc_compiles_it_for_hopper_without_spills(
    source: Path, name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        reason = "nvcc not found: the CUDA text was run through the shim only"
        if os.environ.get("CTXREUSE_REQUIRE_NVCC") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    command = [nvcc, "-cubin", "-arch=sm_90", "-std=c++17", "-Werror", "all-warnings", "-Xptxas", "-v"]
    done = subprocess.run(
        [*command, "-o", tmp_path / "out.cubin", source / name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {kernel: (int(spilled), int(registers)) for kernel, spilled, registers in USED.findall(done.stderr)}
    assert set(found) == set(FILES[name])
    for kernel, (spilled, registers) in found.items():
        record_property(kernel, registers)
        assert spilled == 0
        assert registers <= MOST[kernel]
