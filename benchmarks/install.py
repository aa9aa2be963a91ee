"""From a clone to the first reuse on a fresh machine: seconds, and bytes that are installed.

Each way has a home folder of its own, and no cache of packages: with a package index that is far away, most of it is
downloading. Ours is ``make demo``; and the demo on torch, which is the CPU build only where the index has that. The
peer is llama-cpp-python as its documentation says, compiled here, with the same GGUF already at hand: a prompt, and
another one that begins alike. Ollama comes by a script that is no package, and its models from a hub: it is left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.errors import EngineError
from ctxreuse.models import get_gguf

__all__ = ["run"]

_SECONDS, _MEGABYTES, _LONGEST = 90.0, 250.0, 1500
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
        peer = None if options.quick else _peer(Path(place))
        options.step("make demo", 1, 3)
        seconds, size = _ours(root, Path(place) / "plain")
        options.step("make demo, with torch", 2, 3)
        torch = None if options.quick else _ours(root, Path(place) / "torch", torch=True)
    figures = [
        Figure(
            metric="seconds from a clone to the first reuse",
            value=seconds,
            unit="s",
            peer=peer and peer[0],
            better="lower",
            bar=_SECONDS,
            note="make demo to its end: reuse after a restart, in forks and on another device; the model is downloaded",
        ),
        Figure(metric="installed", value=size, unit="MB", peer=peer and peer[1], better="lower", bar=_MEGABYTES),
    ]
    if torch is not None:
        figures.append(Figure(metric="seconds, with torch", value=torch[0], unit="s", better="lower"))
        figures.append(Figure(metric="installed, with torch", value=torch[1], unit="MB", better="lower"))
    return figures


def _ours(root: Path, place: Path, *, torch: bool = False) -> tuple[float, float]:
    """Seconds of everything after the clone, and megabytes of the environment."""
    home, clone = place / "home", place / "ctxreuse"
    home.mkdir(parents=True)
    _do(["git", "clone", "-q", str(root), str(clone)], place, home)
    began = time.perf_counter()
    if torch:
        _do(["make", "-s", "VENV=.venv-demo", "EXTRAS=edge,torch", ".venv-demo/.ready"], clone, home)
        _do([".venv-demo/bin/python", "examples/demo", "--engine", "torch"], clone, home)
    else:
        _do(["make", "-s", "demo"], clone, home)
    return time.perf_counter() - began, _megabytes(clone / ".venv-demo")


def _peer(place: Path) -> tuple[float, float]:
    model, home, venv = get_gguf("smollm2"), place / "peer", place / "peer" / "venv"
    home.mkdir()
    began = time.perf_counter()
    _do([sys.executable, "-m", "venv", str(venv)], place, home)
    _do([str(venv / "bin" / "pip"), "install", "-q", "llama-cpp-python"], place, home)
    _do([str(venv / "bin" / "python"), "-c", _PEER, str(model)], place, home)
    return time.perf_counter() - began, _megabytes(venv)


def _do(command: Sequence[str], place: Path, home: Path) -> None:
    """Run a command as somebody who has nothing yet."""
    hidden = ("VIRTUAL_ENV", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", "XDG_CACHE_HOME")
    env = {name: value for name, value in os.environ.items() if name not in hidden and "CTXREUSE" not in name}
    env |= {"HOME": str(home), "PIP_NO_CACHE_DIR": "1"}
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=_LONGEST, check=False)
    if done.returncode:
        raise EngineError(f"{' '.join(command[:3])} failed: {(done.stdout + done.stderr)[-500:]}", where=str(place))


def _megabytes(folder: Path) -> float:
    return sum(file.lstat().st_size for file in folder.rglob("*")) / 1e6
