"""From a clone to the first reuse on a fresh machine: seconds, and bytes that are installed.

Each way has a home folder of its own, and no cache of packages: with a package index that is far away, most of it is
downloading. Ours is ``make demo`` until it prints an answer that reused a context; and the demo on torch, which is the
CPU build only where the index has that. The peer, where ``CTXREUSE_PEERS`` is set, is llama-cpp-python as its
documentation says, compiled here, with the same GGUF already at hand: a prompt, and another one that begins alike.
Ollama comes by a script that is no package, and its models from a hub: it is left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.errors import EngineError
from ctxreuse.models import get_gguf

__all__ = ["run"]

_SECONDS, _MEGABYTES, _LONGEST = 90.0, 250.0, 1500
_REUSED = re.compile(r"[1-9][\d,]* of [\d,]+ tokens reused")
_PEER = """
import sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=2048, verbose=False)
said = "The harbour of Whitby has a lamp that is lit at dusk. " * 40
for question in ("Where is the lamp?", "When is it lit?"):
    print(model.create_completion(said + question, max_tokens=8)["choices"][0]["text"])
"""


def run(options: Options) -> list[Figure]:
    """Ours with and without torch, and the peer (not if quick)."""
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as place:
        options.step("llama-cpp-python", 0, 3)
        peer = _peer(Path(place)) if os.environ.get("CTXREUSE_PEERS") and not options.quick else None
        options.step("make demo", 1, 3)
        reuse, end, size = _ours(root, Path(place) / "plain")
        options.step("make demo, with torch", 2, 3)
        torch = None if options.quick else _ours(root, Path(place) / "torch", torch=True)
    figures = [
        Figure(
            metric="seconds from a clone to the first reuse",
            value=reuse,
            unit="s",
            peer=peer and peer[0],
            better="lower",
            bar=_SECONDS,
            note="the model is downloaded; "
            + ("no peer here" if peer is None else "the peer has it, and reuses in memory only"),
        ),
        Figure(
            metric="seconds to the demo's end",
            value=end,
            unit="s",
            better="lower",
            note="reuse after a restart, in forks and on another device",
        ),
        Figure(metric="installed", value=size, unit="MB", peer=peer and peer[1], better="lower", bar=_MEGABYTES),
    ]
    if torch is not None:
        figures.append(
            Figure(metric="seconds to the first reuse, with torch", value=torch[0], unit="s", better="lower")
        )
        figures.append(Figure(metric="installed, with torch", value=torch[2], unit="MB", better="lower"))
    return figures


def _ours(root: Path, place: Path, *, torch: bool = False) -> tuple[float, float, float]:
    """Seconds from the clone to the first reuse and to the demo's end, and megabytes of the environment."""
    home, clone = place / "home", place / "ctxreuse"
    home.mkdir(parents=True)
    _do(["git", "clone", "-q", str(root), str(clone)], place, home)
    began = time.perf_counter()
    if torch:
        _do(["make", "-s", "VENV=.venv-demo", "EXTRAS=edge,torch", ".venv-demo/.ready"], clone, home)
        lines = _do([".venv-demo/bin/python", "examples/demo", "--engine", "torch"], clone, home)
    else:
        lines = _do(["make", "-s", "demo"], clone, home)
    reuse = next(when for when, line in lines if _REUSED.search(line))
    return reuse - began, time.perf_counter() - began, _megabytes(clone / ".venv-demo")


def _peer(place: Path) -> tuple[float, float]:
    model, home, venv = get_gguf("smollm2"), place / "peer", place / "peer" / "venv"
    home.mkdir()
    began = time.perf_counter()
    _do([sys.executable, "-m", "venv", str(venv)], place, home)
    _do([str(venv / "bin" / "pip"), "install", "-q", "llama-cpp-python"], place, home)
    _do([str(venv / "bin" / "python"), "-c", _PEER, str(model)], place, home)
    return time.perf_counter() - began, _megabytes(venv)


def _do(command: Sequence[str], place: Path, home: Path) -> list[tuple[float, str]]:
    """Run a command as somebody who has nothing yet; returns what it printed, each line with when it came."""
    hidden = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "MAKEFLAGS", "MAKELEVEL", "XDG_CACHE_HOME")
    env = {name: value for name, value in os.environ.items() if name not in hidden and "CTXREUSE" not in name}
    env |= {"HOME": str(home), "PIP_NO_CACHE_DIR": "1"}
    lines: list[tuple[float, str]] = []
    with subprocess.Popen(
        command, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        watch = threading.Timer(_LONGEST, process.kill)
        watch.start()
        try:
            lines += [(time.perf_counter(), line) for line in process.stdout or ()]
        finally:
            watch.cancel()
    if process.returncode:
        said = "".join(line for _, line in lines)[-500:]
        raise EngineError(f"{' '.join(command[:3])} failed: {said}", where=str(place))
    return lines


def _megabytes(folder: Path) -> float:
    return sum(file.lstat().st_size for file in folder.rglob("*")) / 1e6
