"""The CUDA text under the address and undefined-behaviour sanitizers: no access out of bounds, whatever the bytes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import native_builds
from support.waiting import patient

pytestmark = pytest.mark.build("shim-sanitized")


def test_no_kernel_leaves_its_memory() -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++, whose sanitizers' runtime can be loaded first, not found")
    library = native_builds.shim(sanitize=True)
    asked = [compiler, "-print-file-name=libasan.so"]
    runtime = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    # Python itself keeps memory until it ends: leaks are not what this looks for.
    options = "detect_leaks=0:detect_stack_use_after_return=0"
    path = {"PYTHONPATH": str(native_builds.ROOT / "tests")}
    environment = os.environ | path | {"LD_PRELOAD": runtime, "ASAN_OPTIONS": options}
    script = Path(__file__).with_name("sanitized.py")
    done = subprocess.run(
        [sys.executable, script, library],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(200),
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    name, refused = done.stdout.split()
    assert name == "refused"
    assert int(refused) > 80
