"""The NEON table on any machine: cross-compiled for aarch64 and run under QEMU's user-mode emulation."""

import os
import platform

import pytest

from support import native_builds

pytestmark = pytest.mark.build("neon")

INSTALL = "apt-get install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross"


@pytest.mark.skipif(platform.machine() in ("aarch64", "arm64"), reason="test_sanitized runs NEON natively here")
def test_neon_table_under_emulation() -> None:
    if missing := native_builds.missing_for_neon():
        reason = f"{', '.join(missing)} not found; to run this test: {INSTALL}"
        if os.environ.get("CTXREUSE_REQUIRE_NEON") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    printed = native_builds.run_tests(native_builds.neon())
    assert "tables: neon generic\n" in printed
    assert "all native tests passed" in printed
