"""The C core under the address and undefined-behaviour sanitizers, with every table this machine can use."""

import pytest

from ctxreuse import kernels
from support import native_builds

pytestmark = pytest.mark.build("sanitized")


def test_every_table_under_sanitizers() -> None:
    printed = native_builds.run_tests(native_builds.sanitized())
    assert f"tables: {' '.join(kernels.available())}\n" in printed
    assert "all native tests passed" in printed
