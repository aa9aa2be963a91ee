"""Leaves the process on the table it had."""

from collections.abc import Iterator

import pytest

from ctxreuse import kernels


@pytest.fixture(autouse=True, scope="module")
def _same_table_afterwards() -> Iterator[None]:
    before = kernels.active()
    yield
    kernels.use(before)
