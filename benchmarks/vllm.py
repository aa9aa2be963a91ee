"""Time to first token inside vLLM on the CPU: alone, with our connector, and with LMCache's.

Prompts of 1,024, 2,048 and 4,096 tokens that are shared, and 32 fresh ones. ``fill``: the first request with such
tokens, which computes and saves them. ``later``: those after it. ``restart``: the first with each of these prompts in a
new engine over the same store (LMCache's server stays, its KV in memory; ours is on disk). ``shared``: the first in a
second engine beside the one that filled, which reads its store. SmolLM2 in bfloat16, one compute thread on every side.

All engines are up at once and take turns request by request, so that what else the machine does meets all of them; a
time is the least of several, as whatever disturbs only adds. ``processor`` rows compare medians of processor time, that
of LMCache's server included. ``floor`` is vLLM's own prefix cache, in the memory of one engine and lost with it: the 32
tokens are computed, and nothing is loaded. What is above it is a connector's own.

``CTXREUSE_VLLM`` names the environment with vLLM, this package and, for the peer, ``lmcache`` (`make test-connectors`
makes one).
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

from benchmarks.children import wait_or_kill
from benchmarks.vllm_server import free_port
from ctxreuse import models
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.errors import ConfigError, EngineError

__all__ = ["OPTIONS", "run"]

OPTIONS = ("model",)

#: Shares of LMCache's time that ours must not exceed, and of vLLM's own for a fill.
LATER, RESTART, FILL, SHARED = 0.62, 0.77, 1.03, 1.2
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_MP_TRANSFER_MODE": "lmcache_driven",
    "LMCACHE_TRACK_USAGE": "false",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
#: Pages of 128 tokens in an engine: room for the prompts of a round.
_PAGES = 96
#: Seconds, processor seconds and first token of a request.
_Row = tuple[float, float, int]
#: Seconds between two requests: what one saves behind its own back is no part of the next.
_PAUSE = 0.2


class _Vllm:
    """An engine in a process of its own."""

    def __init__(
        self, place: Path, model: str, connector: dict[str, Any] | None, log: Path, *, prefixes: bool = False
    ) -> None:
        settings: dict[str, Any] = {
            "model": model, "dtype": "bfloat16", "max_model_len": 8192, "max_num_seqs": 8, "enforce_eager": True,
            "enable_prefix_caching": prefixes, "skip_tokenizer_init": True, "num_gpu_blocks_override": _PAGES,
        }  # fmt: skip
        if connector is not None:
            settings["kv_transfer_config"] = {"kv_role": "kv_both", **connector}
        program = Path(__file__).with_name("vllm_child.py")
        with open(log, "a") as errors:
            self._process = subprocess.Popen(
                # -P: beside this program lies a module called vllm
                [str(place / "bin" / "python"), "-P", str(program), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | _ENVIRONMENT,
            )
        self._log = log
        self._read("READY")

    def _read(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line[len(word) :]
        raise EngineError("vLLM ended", where=str(self._log), fix=self._log.read_text("utf-8")[-500:])

    def ask(self, name: str, length: int, request: int) -> _Row:
        """Time a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, length, request]) + "\n")
        self._process.stdin.flush()
        found: _Row = json.loads(self._read("SECONDS"))
        return found

    def __enter__(self) -> _Vllm:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        wait_or_kill(self._process, 60)
        self._process.stdout.close()


class _Server:
    """LMCache's server; None of its time if there is none."""

    def __init__(self, process: psutil.Process | None, connector: dict[str, Any] | None) -> None:
        self._process, self.connector = process, connector

    @property
    def processor(self) -> float:
        """Processor seconds that it has used."""
        if self._process is None:
            return 0.0
        times = self._process.cpu_times()
        return float(times.user + times.system)


@contextlib.contextmanager
def _lmcache(place: Path, log: Path) -> Iterator[_Server]:
    if not (place / "bin" / "lmcache").exists():
        yield _Server(None, None)
        return
    port, http = free_port(), free_port()
    words = ["--host", "127.0.0.1", "--port", port, "--http-host", "127.0.0.1", "--http-port", http, "--l1-size-gb", 1]
    words += ["--chunk-size", 256, "--eviction-policy", "LRU", "--disable-observability"]
    words += ["--supported-transfer-mode", "auto"]
    with open(log, "a") as errors:
        process = subprocess.Popen(
            [str(place / "bin" / "lmcache"), "server", *map(str, words)],
            stdout=errors,
            stderr=errors,
            env=os.environ | _ENVIRONMENT,
        )
    try:
        until = time.monotonic() + 300
        while not _answers(f"http://127.0.0.1:{http}/healthcheck"):
            if process.poll() is not None or time.monotonic() > until:
                raise EngineError("LMCache's server did not start", where=str(log))
            time.sleep(1)
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
        yield _Server(
            psutil.Process(process.pid), {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}
        )
    finally:
        process.terminate()
        wait_or_kill(process, 60)


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def run(options: Options) -> list[Figure]:
    """Figures in milliseconds, of which `bar` is a share of the peer's."""
    place = Path(os.environ.get("CTXREUSE_VLLM", ""))
    if not (place / "bin" / "python").exists():
        fix = "Run make test-connectors once, and set it to the folder .venv-connectors"
        raise ConfigError("CTXREUSE_VLLM names no environment with vLLM", where=str(place), fix=fix)
    model = str(models.resolve(options.model or "smollm2"))
    lengths, rounds = options.pick((2048,), (1024, 2048, 4096)), options.pick(1, 3)
    count = options.pick(3, 5)
    times = _Times()
    with tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as folder:
        home, log = Path(folder), Path(folder) / "log"
        module = {"kv_connector": "CtxReuseConnector", "kv_connector_module_path": "ctxreuse_cloud.connectors.vllm"}
        ours = {**module, "kv_connector_extra_config": {"path": str(home / "store")}}
        with _lmcache(place, log) as server:

            def turns(engines: dict[str, _Vllm], phase: str, prompt: str, length: int, request: int) -> None:
                for side, engine in engines.items():
                    before = server.processor
                    wall, processor, token = engine.ask(prompt, length, request)
                    if side == "lmcache":
                        processor += server.processor - before
                    times.add(side, phase, length, wall, processor)
                    times.tokens[prompt, length, request].append(token)
                    time.sleep(_PAUSE)

            with contextlib.ExitStack() as stack:

                def start(connector: dict[str, Any] | None, *, prefixes: bool = False) -> _Vllm:
                    return stack.enter_context(_Vllm(place, model, connector, log, prefixes=prefixes))

                options.step("engines start", 0, rounds)
                alone, floor = start(None), start(None, prefixes=True)
                others = {} if server.connector is None else {"lmcache": server.connector}
                for number in range(rounds):
                    prompt = str(number)
                    with contextlib.ExitStack() as these:

                        def fresh(
                            connectors: dict[str, dict[str, Any]], these: contextlib.ExitStack = these
                        ) -> dict[str, _Vllm]:
                            return {
                                side: these.enter_context(_Vllm(place, model, connector, log))
                                for side, connector in connectors.items()
                            }

                        engines = {"floor": floor, **fresh({"ours": ours, **others})}
                        for length in lengths:
                            options.step(f"{length} tokens", number, rounds)
                            turns({"none": alone, **engines}, "fill", prompt, length, 0)
                            for request in range(1, count):
                                turns(engines, "later", prompt, length, request)
                        second = fresh({"ours": ours})
                        for length in lengths:
                            options.step(f"{length} tokens beside the first engine", number, rounds)
                            turns(second, "shared", prompt, length, count)
                    with contextlib.ExitStack() as these:
                        again = fresh({"ours": ours, **others}, these)
                        for length in lengths:
                            options.step(f"{length} tokens in a new engine", number, rounds)
                            turns(again, "restart", prompt, length, count + 1)
                            turns({"floor": floor}, "later", prompt, length, count + 1)
    figures = []
    for kind, seconds in times.summaries():
        for length in lengths:
            figures += _figures(kind, length, seconds)
    same = [len(set(found)) == 1 for found in times.tokens.values()]
    note = "requests whose first token is the same on every side"
    figures.append(Figure(metric="same_tokens", value=sum(same) / len(same), unit="share", bar=1.0, note=note))
    return figures


class _Times:
    """What was measured, by side, phase and length."""

    def __init__(self) -> None:
        self._wall: dict[tuple[str, str, int], list[float]] = defaultdict(list)
        self._processor: dict[tuple[str, str, int], list[float]] = defaultdict(list)
        #: First tokens of a request, by prompt, length and its number.
        self.tokens: dict[tuple[str, int, int], list[int]] = defaultdict(list)

    def add(self, side: str, phase: str, length: int, wall: float, processor: float) -> None:
        self._wall[side, phase, length].append(wall)
        self._processor[side, phase, length].append(processor)

    def summaries(self) -> list[tuple[str, dict[tuple[str, str, int], float]]]:
        return [
            ("", {key: min(each) for key, each in self._wall.items()}),
            ("_processor", {key: statistics.median(each) for key, each in self._processor.items()}),
        ]


def _figures(kind: str, length: int, seconds: dict[tuple[str, str, int], float]) -> list[Figure]:
    def at(side: str, phase: str) -> float | None:
        found = seconds.get((side, phase, length))
        return None if found is None else 1e3 * found

    alone, floor, figures = at("none", "fill"), at("floor", "later"), []
    assert alone is not None
    assert floor is not None
    for phase, limit in (("fill", FILL), ("later", LATER), ("restart", RESTART), ("shared", SHARED)):
        value, peer = at("ours", phase), at("lmcache", phase)
        if value is None:
            continue
        against = alone if phase == "fill" else at("ours", "later") if phase == "shared" else peer
        what = {"fill": "vLLM alone", "shared": "its own later requests"}.get(phase, "LMCache")
        figures.append(
            Figure(
                metric=f"{phase}{kind}_{length}",
                value=value,
                unit="ms",
                baseline=alone,
                peer=peer,
                bound=alone if phase == "fill" else floor,
                better="lower",
                bar=None if against is None else limit * against,
                note=f"bar: {limit} times {what}; baseline: vLLM alone, computing; peer: LMCache's server; bound: "
                "vLLM alone for a fill, else its own prefix cache in memory",
            )
        )
    return figures
