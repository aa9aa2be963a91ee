"""The NEON table on any machine: cross-compiled for aarch64 and run under QEMU's user-mode emulation."""

import os
import platform
import shutil
from collections.abc import Callable

import pytest

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
INSTALL = "apt-get install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross"


@pytest.mark.skipif(platform.machine() in ("aarch64", "arm64"), reason="test_sanitized runs NEON natively here")
def test_neon_table_under_emulation(run_native_tests: Callable[..., str]) -> None:
    missing = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    if missing:
        reason = f"{', '.join(missing)} not found; to run this test: {INSTALL}"
        if os.environ.get("CTXREUSE_REQUIRE_NEON") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    printed = run_native_tests(
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_C_COMPILER={COMPILER}",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
        f"-DCMAKE_CROSSCOMPILING_EMULATOR={EMULATOR}",
    )
    assert "tables: neon generic\n" in printed
    assert "all native tests passed" in printed
