"""The example of the page on operating runs as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import ROOT
from support.tiny_text import save_model
from support.waiting import patient

PAGE = ROOT / "docs" / "guide" / "operating.md"


@pytest.mark.daemon
def test_a_daemon_with_https_and_keys(tmp_path: Path) -> None:
    found = re.search(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {name: value for name, value in os.environ.items() if not name.startswith("CTXREUSE_")}
    env |= {name: str(tmp_path) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")}
    env |= {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "CTXREUSE_EDGE__PORT": port}
    env |= {"CTXREUSE_ENGINE__MODEL": str(save_model(tmp_path / "tiny")), "CTXREUSE_ENGINE__THREADS": "1"}
    command = f'ctxreuse-edge() {{ {shlex.quote(sys.executable)} -m ctxreuse_edge "$@"; }}\n'
    # `exec` in the background: the daemon itself is the job that is ended.
    serve = f"(exec {shlex.quote(sys.executable)} -m ctxreuse_edge serve) &"
    lines = found[1].replace(":7351", f":{port}").replace("ctxreuse-edge serve &", serve)
    script = "set -eu\ntrap 'kill %1; wait' EXIT\n" + command + lines
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"status":"ready"' in done.stdout
    assert '"object":"list"' in done.stdout
    assert re.search(r"^daemon +process \d+", done.stdout, re.MULTILINE)
    assert "1 revoked" in done.stdout
    assert "BEGIN CERTIFICATE" in (tmp_path / "edge.pem").read_text()
