"""An engine in a process of its own, one for all tests of a file: importing torch there takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from ctxreuse.engines.process.engine import ChildEngine, EngineStart

OPENER = "support.tiny_models:engine_of"


@pytest.fixture(scope="module")
def python_path() -> Iterator[None]:
    """Children find the modules that tests import; programs that other tests start do not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(entry for entry in sys.path if entry))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def child(python_path: None) -> Iterator[ChildEngine]:
    """A tiny Llama on torch, in a process."""
    engine = EngineStart(OPENER, {"name": "llama"}).opened()
    yield engine
    engine.close()
    assert engine.state == "closed"
