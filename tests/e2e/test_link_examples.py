"""The examples about the link run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.cluster import Cluster
from support.waiting import patient

pytestmark = pytest.mark.daemon

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *args: str) -> str:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args], env=env, capture_output=True, text=True, timeout=patient(240)
    )
    assert done.returncode == 0, done.stderr
    assert len((EXAMPLES / name).read_text().splitlines()) < 80
    return done.stdout


def test_a_client_of_an_edge(cluster: Cluster) -> None:
    edge = cluster.edge("a", bus__clouds=[]).start().ready()
    first, second = run("edge_client.py", edge.url), run("edge_client.py", edge.url)
    told = [line for out in (first, second) for line in out.splitlines() if "s to the first token;" in line]
    assert len(told) == 4
    assert told[0].endswith(" compute")
    assert all(" device, " in line for line in told[1:])
    assert edge.end() == 0


@pytest.mark.model
def test_two_nodes() -> None:
    out = run("two_nodes.py").splitlines()
    assert out[0].endswith("reused nothing")
    assert "gave the cloud 22 blocks" in out[1]
    assert "'cloud'" in out[2]
    assert out[-1] == "the same answer: True"
