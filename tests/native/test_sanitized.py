"""The C core under the address and undefined-behaviour sanitizers, with every table this machine can use."""

import shutil
from collections.abc import Callable

from ctxreuse import kernels


def test_every_table_under_sanitizers(run_native_tests: Callable[..., str]) -> None:
    compiler = shutil.which("gcc") or shutil.which("clang") or "cc"  # clang often lacks the sanitizers' runtime
    printed = run_native_tests("-DCTXREUSE_SANITIZE=ON", f"-DCMAKE_C_COMPILER={compiler}")
    assert f"tables: {' '.join(kernels.available())}\n" in printed
    assert "all native tests passed" in printed
