"""Every CUDA file compiles for sm_90 without spilling a register, and holds the kernels that Python names."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ctxreuse import doctor
from ctxreuse.cuda.compiled import Usage, compile_text, find_nvcc
from ctxreuse.cuda.launch import FILES, text_folder
from ctxreuse.errors import ConfigError

# Registers a thread: what was seen, with some room. Beyond, fewer warps fit onto a multiprocessor.
MOST = {
    "ctx_klt_decode": 128, "ctx_klt_quantise": 128,
    "ctx_klt_code": 48, "ctx_klt_pack": 48, "ctx_attend_64": 128, "ctx_attend_128": 128, "ctx_attend_256": 240,
    "ctx_attend_64_wide": 240, "ctx_attend_128_wide": 255, "ctx_attend_merge": 40,
}  # fmt: skip
KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(')


@pytest.fixture(scope="module")
def nvcc() -> str:
    found = find_nvcc()
    if found is None:
        reason = "nvcc not found: the CUDA text was run through the shim only"
        if os.environ.get("CTXREUSE_REQUIRE_NVCC") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def test_files_hold_the_kernels_that_are_named(source: Path) -> None:
    assert {path.name for path in source.glob("*.cu")} == set(FILES)
    for name, kernels in FILES.items():
        assert tuple(KERNEL.findall((source / name).read_text())) == kernels


def test_what_is_installed_is_this_text(source: Path) -> None:
    folder = text_folder()
    names = {path.name for pattern in ("*.cu", "*.cuh") for path in source.glob(pattern)}
    assert {path.name for path in folder.iterdir()} == names
    assert all((folder / name).read_bytes() == (source / name).read_bytes() for name in names)


@pytest.mark.slow
def test_nvcc_compiles_all_for_hopper_without_spills(
    nvcc: str, source: Path, record_property: Callable[[str, object], None]
) -> None:
    found = compile_text(nvcc, source)
    assert set(found) == set(MOST) == {kernel for kernels in FILES.values() for kernel in kernels}
    for kernel, used in found.items():
        record_property(kernel, used.registers)
        assert used.spilled == 0, kernel
        assert used.registers <= MOST[kernel], kernel


@pytest.mark.slow
def test_text_that_does_not_compile_is_reported(nvcc: str, tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).write_text("")
    (tmp_path / "attend.cu").write_text("__global__ void f() { unknown(); }")
    with pytest.raises(ConfigError, match=r"nvcc refuses attend\.cu"):
        compile_text(nvcc, tmp_path)


def test_the_doctor_says_how_the_kernels_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxreuse.cuda.launch.find_spec", lambda name: None)
    monkeypatch.setattr("ctxreuse.cuda.compiled.find_nvcc", lambda: "nvcc")
    monkeypatch.setattr("ctxreuse.cuda.compiled.compile_text", lambda *_: {"a": Usage(30, 0), "b": Usage(142, 8)})
    found = {finding.name: finding for finding in doctor.run_checks() if finding.area == "cuda"}
    assert found["text"].status == "slow"
    assert found["text"].value == "2 kernels compiled for sm_90, 30 to 142 registers, 8 bytes spilled"
    assert (found["device"].status, found["device"].value) == ("missing", "none: cupy is not installed")
    monkeypatch.setattr("ctxreuse.cuda.compiled.find_nvcc", lambda: None)
    found = {finding.name: finding for finding in doctor.run_checks() if finding.area == "cuda"}
    assert found["text"].value == "10 kernels, not compiled here: nvcc is not installed"


def test_importing_the_wrappers_imports_no_device_library() -> None:
    code = "import sys, ctxreuse.cuda.statistics; print({'cupy', 'numba', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
