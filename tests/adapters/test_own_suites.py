"""Tests of sessions and stores that frameworks ship in their source archives, run on the adapters in their places.

LlamaIndex, Google's ADK and mem0 ship none; LangGraph's conformance suite is a package, see `test_langgraph_saver`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from support.waiting import patient

#: Archives of suites.txt, fetched by `make test-adapters`.
SUITES = Path(sys.prefix) / "suites"
#: Tests of the classes that the adapters stand in for, not of what these promise: SQLite's tables, locks and
#: connections; vectors of the store in memory, which ours says it has none of; fields of the saver in memory.
OF_SQLITE = (
    "worker_thread or retired_conn or closed_rejects or corrupt or file_lock or session_failed or rollback_failure"
)
OF_SQLITE += " or close_retries or post_commit"
OF_VECTORS = "vector or embed_with_path or non_ascii"
OF_FIELDS = (
    "DeltaChannel or FallbackGetChannelWrites or PreDeltaBlob or (test_memory_saver and not allowlist and not msgpack)"
)


@pytest.mark.parametrize(
    ("archive", "files", "others", "least"),
    [
        (
            "openai_agents-*",
            ("tests/memory/test_session.py", "tests/memory/test_session_limit.py"),
            OF_SQLITE,
            45,
        ),
        ("langgraph_checkpoint-*", ("tests/test_store.py",), OF_VECTORS, 60),
        ("langgraph_checkpoint-*", ("tests/test_memory.py",), OF_FIELDS, 3),
    ],
    ids=["openai-session", "langgraph-store", "langgraph-saver"],
)
def test_a_frameworks_own_tests_pass(
    archive: str, files: tuple[str, ...], others: str, least: int, tmp_path: Path
) -> None:
    (found,) = SUITES.glob(f"{archive}.tar.gz")
    with tarfile.open(found) as opened:
        opened.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    plugins = [word for name in ("pytest_asyncio.plugin", "pytest_mock", "own_suites") for word in ("-p", name)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, "-c", "pyproject.toml", "-k", f"not ({others})", *files],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=patient(300),
    )
    assert done.returncode == 0, done.stdout[-3000:]
    counted = re.search(r"adapters in (\d+) tests", done.stdout)
    assert counted is not None
    assert int(counted[1]) >= least, done.stdout[-1000:]
