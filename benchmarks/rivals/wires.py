"""Gets from a store of another process by other software, in a Python that has it: Mooncake over TCP, LMCache's server.

Run as a program of that Python, which need not have ctxreuse: ``python wires.py mooncake SIZE ROUNDS`` prints seconds
of single gets of ``SIZE`` bytes and of gets of 16 at once, as JSON. LMCache brings a client that measures its server
itself (``lmcache bench server``); `lmcache_seconds` runs both programs.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

__all__ = ["BATCH", "lmcache_seconds", "mooncake_seconds"]

BATCH = 16
_LOCAL, _WAIT = "127.0.0.1", 120.0


def _port() -> int:
    with socket.socket() as one:
        one.bind((_LOCAL, 0))
        return int(one.getsockname()[1])


def _store(metadata: int, master: int, segment: int) -> Any:
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    where = (f"{_LOCAL}:{_port()}", f"http://{_LOCAL}:{metadata}/metadata")
    until = time.monotonic() + _WAIT
    while code := store.setup(*where, segment, 256 << 20, "tcp", "", f"{_LOCAL}:{master}"):
        if time.monotonic() > until:
            raise SystemExit(f"Mooncake's store was not set up: {code}")
        time.sleep(0.5)
    return store


def _mooncake(size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of gets into registered memory; the node that has the values is a process of its own."""
    numpy = importlib.import_module("numpy")
    master, metadata = _port(), _port()
    program = str(Path(sys.executable).with_name("mooncake_master"))
    flags = [f"-rpc_port={master}", f"-rpc_address={_LOCAL}", "-enable_http_metadata_server=true"]
    flags += [f"-http_metadata_server_host={_LOCAL}", f"-http_metadata_server_port={metadata}"]
    flags += [f"-metrics_host={_LOCAL}", f"-metrics_port={_port()}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    node = [sys.executable, __file__, "node", str(metadata), str(master)]
    with subprocess.Popen([program, *flags], **quiet) as one:  # type: ignore[call-overload]
        try:
            with subprocess.Popen(node, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as two:
                assert two.stdout is not None
                while two.stdout.readline().strip() not in ("ready", ""):
                    pass  # its library prints as well
                found = _gets(_store(metadata, master, 0), numpy, size, rounds)
                two.kill()
        finally:
            one.kill()
    return found


def _gets(store: Any, numpy: Any, size: int, rounds: int) -> dict[str, list[float]]:
    value, names = os.urandom(size), [f"value{n}" for n in range(BATCH)]
    for name in names:
        if code := store.put(name, value):
            raise SystemExit(f"Mooncake stored nothing: {code}")
    room = numpy.zeros(BATCH * size, numpy.uint8)
    store.register_buffer(room.ctypes.data, room.nbytes)
    places = [room.ctypes.data + n * size for n in range(BATCH)]
    found: dict[str, list[float]] = {"single": [], "batch": []}
    for _ in range(rounds):
        for name, place in zip(names, places):
            began = time.perf_counter()
            got = store.get_into(name, place, size)
            found["single"].append(time.perf_counter() - began)
            if got != size:
                raise SystemExit(f"Mooncake got {got} of {size} bytes")
        began = time.perf_counter()
        all_got = store.batch_get_into(names, places, [size] * BATCH)
        found["batch"].append(time.perf_counter() - began)
        if set(all_got) != {size}:
            raise SystemExit(f"Mooncake got {all_got}")
    if room[-size:].tobytes() != value:
        raise SystemExit("Mooncake got other bytes")
    return found


def mooncake_seconds(python: str, size: int, rounds: int) -> dict[str, float]:
    """Medians. Raises RuntimeError if it does not run there."""
    command = [python, __file__, "mooncake", str(size), str(rounds)]
    env = os.environ | {"PYTHONPATH": "", "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "3"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    made = json.loads(done.stdout.strip().splitlines()[-1])
    return {name: statistics.median(values) for name, values in made.items()}


def lmcache_seconds(python: str, tokens: int, heads: int, layers: int, rounds: int) -> dict[str, float]:
    """Medians of LMCache's retrieve (without its lookup) of chunks of so many tokens of keys and values, heads of 64.

    The server holds them in shared memory, and copies into the client's cache (``lmcache_driven``). Raises RuntimeError
    if it does not run there.
    """
    program = str(Path(python).with_name("lmcache"))
    rpc, web = _port(), _port()
    env = os.environ | {
        "PYTHONHASHSEED": "0", "LMCACHE_MP_TRANSFER_MODE": "lmcache_driven", "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1", "PYTHONPATH": "",
    }  # fmt: skip
    serve = [program, "server", "--host", _LOCAL, "--port", str(rpc), "--http-host", _LOCAL, "--http-port", str(web)]
    serve += ["--l1-size-gb", "1", "--chunk-size", str(tokens), "--eviction-policy", "LRU", "--disable-observability"]
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "wb") as log:
        server = subprocess.Popen([*serve, "--supported-transfer-mode", "auto"], stdout=log, stderr=log, env=env)
        try:
            _until_up(f"http://{_LOCAL}:{web}/healthcheck", server)
            for name, count, start in (("single", 1, 0), ("batch", BATCH, rounds)):
                out = Path(folder) / f"{name}.json"
                shape = f"(2,{2 * BATCH * tokens // 16},16,{heads},64):bfloat16:{layers}"
                ask = [program, "bench", "server", "--rpc-url", f"tcp://{_LOCAL}:{rpc}", "--mode", "cpu", "-q"]
                ask += ["--url", f"http://{_LOCAL}:{web}", "--transfer-mode", "lmcache_driven", "--interval", "0"]
                ask += ["--num-tokens", str(count * tokens), "--kvcache-shape-spec", shape]
                ask += ["--num-blocks", str(2 * BATCH * tokens // 16), "--start", str(start)]
                ask += ["--end", str(start + rounds), "--format", "json", "--output", str(out)]
                done = subprocess.run(ask, capture_output=True, text=True, env=env, check=False, timeout=300)
                if done.returncode or not out.exists():
                    raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
                seen = json.loads(out.read_text("utf-8"))["metrics"]["warm_retrieve"]
                found[name] = seen["warm_retrieve_p50"] / 1e3
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
    return found


def _until_up(url: str, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _WAIT
    while True:
        try:
            with urlopen(url, timeout=5):
                return
        except (URLError, OSError):
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError("LMCache's server did not come up") from None
            time.sleep(0.5)


if __name__ == "__main__":
    if sys.argv[1] == "node":
        held = _store(int(sys.argv[2]), int(sys.argv[3]), 512 << 20)
        print("\nready", flush=True)
        sys.stdin.read()
    else:
        print("\n" + json.dumps(_mooncake(int(sys.argv[2]), int(sys.argv[3]))), flush=True)
