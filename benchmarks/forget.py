"""Bytes of deleted texts and token ids that are left in files of a device and its cloud, and seconds of compaction.

A daemon and a sidecar as processes; half of the chats and contexts is deleted over HTTP. The baseline is what is found
before compaction, the peer LMDB's own compacting copy. ``--model``: a GGUF file, or a known name, instead of SmolLM2.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx
import lmdb
import numpy as np

from benchmarks.agents_http import prose
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.config import StoreConfig
from ctxreuse.errors import EngineError
from ctxreuse.runtime.compaction import compact_folder
from ctxreuse.store import BlockStore, Ledger, NewTurn
from ctxreuse.testing.store_context import Context

__all__ = ["OPTIONS", "run"]

OPTIONS = ("model",)
_WAIT, _SPACE = 300.0, b"bench-forget".ljust(32)
#: Token ids in a row that are looked for, and characters of a text.
_RUN, _PIECE = 8, 24


def run(options: Options) -> list[Figure]:
    """Plant, delete, compact, search; then compact stores of some size."""
    with tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as place:
        figures = _planted(options, Path(place))
        options.step("rewriting files of some size")
        return [*figures, *_speed(options, Path(place))]


@contextmanager
def _process(words: Sequence[str], log: Path, ready: Path) -> Iterator[str]:
    env = os.environ | {"CTXREUSE_CONFIG": "", "CTXREUSE_CLOUD__PREFILL_WORKERS": "0"}
    with open(log, "ab") as out:
        process = subprocess.Popen([sys.executable, "-m", *words], env=env, stdout=out, stderr=out)
    try:
        end = time.monotonic() + _WAIT
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise EngineError("the process did not start", where=str(log))
            time.sleep(0.05)
        yield json.loads(ready.read_text("utf-8"))["url"]
    finally:
        process.terminate()
        process.wait(60)


def _planted(options: Options, place: Path) -> list[Figure]:
    from ctxreuse.models import get_gguf

    model = options.model or "smollm2"
    path = Path(model) if model.endswith(".gguf") else get_gguf(model)
    device, cloud, ready = place / "device", place / "cloud", place / "ready.json"
    serve = ["ctxreuse_cloud", "serve", "--port", "0", "--bus", "tcp://127.0.0.1:0", "--store", str(cloud)]
    count = options.pick(2, 4)
    with _process([*serve, "--ready-file", str(ready)], place / "cloud.log", ready) as sidecar:
        bus = httpx.get(sidecar + "/api/status").json()["bus"]["endpoint"]
        words = ["ctxreuse_edge", "serve", "--model", str(path), "--port", "0", "--store", str(device), "--cloud", bus]
        edge = _process(words, place / "device.log", device / "edge.json")
        with edge as url, httpx.Client(base_url=url, timeout=_WAIT) as http:
            found = _deleted(options, http, count, lambda needles: _found(needles, (device, cloud)))
            began = time.perf_counter()
            http.post("/api/compact", json={}).raise_for_status()
            seconds = time.perf_counter() - began
    # The sidecar does it by itself within a day: here it has ended.
    compact_folder(StoreConfig(path=str(cloud)))
    left, kept = _found(found[0], (device, cloud)), _found(found[1], (device, cloud))
    if not kept or not found[2]:
        raise EngineError("the search finds nothing of what was kept, or was planted")
    note = f"{count} chats and contexts deleted, as many kept ({kept:,} bytes of them found); baseline: not compacted"
    return [
        Figure(metric="found", value=left, unit="bytes", baseline=found[2], better="lower", bar=0, note=note),
        Figure(metric="compact_device", value=seconds, unit="s", better="lower", note="of that daemon, over HTTP"),
    ]


def _deleted(
    options: Options, http: httpx.Client, count: int, search: Callable[[list[bytes]], int]
) -> tuple[list[bytes], list[bytes], int]:
    """Plant texts and delete half of them; return what is to be gone, what is to stay, bytes found of the former."""
    texts, chats = [prose(Random(n), 2_000)[:2_000] for n in range(2 * count)], list[str]()
    for n, text in enumerate(texts):
        options.step("planting", n, len(texts))
        if n % 4 < 2:
            http.post("/api/contexts", json={"name": f"context {n}", "text": text}).raise_for_status()
            chats.append("")
            continue
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
        chats.append(http.post("/v1/chat/completions", json=body).raise_for_status().json()["id"])
    while any(link["pending_blocks"] or link["state"] != "up" for link in http.post("/api/sync").json()["links"]):
        time.sleep(0.2)
    ids = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]
    stays = range(1, len(texts), 2)
    other = b"\0".join([*(texts[n].encode() for n in stays), *(np.asarray(ids[n], "<i4").tobytes() for n in stays)])
    gone = [needle for n in range(0, len(texts), 2) for needle in _needles(texts[n], ids[n]) if needle not in other]
    waiting: dict[str, int] = {}
    for n in range(0, len(texts), 2):
        body = {"request": chats[n]} if chats[n] else {"context": f"context {n}"}
        waiting = http.post("/api/forget", json=body).raise_for_status().json()["clouds"]
    while waiting:  # asking for what nobody said changes nothing
        time.sleep(0.2)
        waiting = http.post("/api/forget", json={"request": "nothing"}).json()["clouds"]
    return gone, [needle for n in stays for needle in _needles(texts[n], ids[n])], search(gone)


def _needles(text: str, ids: Sequence[int]) -> list[bytes]:
    pieces = [text[at : at + _PIECE].encode() for at in range(0, len(text) - _PIECE, 10 * _PIECE)]
    runs = [np.asarray(ids[at : at + _RUN], "<i4").tobytes() for at in range(2, len(ids) - _RUN - 2, 4 * _RUN)]
    return [*pieces, *runs]


def _found(needles: Sequence[bytes], folders: Sequence[Path]) -> int:
    """Bytes of all needles in all files; there are two in each block."""
    total = 0
    for folder in folders:
        for file in folder.rglob("*"):
            if file.is_file():
                raw = file.read_bytes()
                total += sum(len(needle) * raw.count(needle) for needle in needles)
    return total


def _speed(options: Options, place: Path) -> list[Figure]:
    """Seconds a gigabyte of a ledger and of a cache, half of which was deleted."""
    rng, figures = Random(1), list[Figure]()
    mark, megabytes = b"the needle in the ledger", options.pick(32, 256)
    home = place / "ledger-only"
    with Ledger.open(home) as ledger:
        for n in range(megabytes):
            text = (mark.decode() if n % 2 else "hay ") + rng.randbytes(4_000).hex()
            ids = np.arange(4_096, dtype="<i4").tobytes()
            long = [NewTurn("user", text, {}, ids, _SPACE) for _ in range(40)]
            ledger.create(f"session {n}", turns=[*long, *(NewTurn("user", text[:40]) for _ in range(40))])
        for n in range(1, megabytes, 2):
            ledger.delete(f"session {n}")
        ledger.gc()
        copy = place / "copy"
        copy.mkdir()
        with lmdb.open(str(copy / "none"), max_dbs=8):
            pass
        began = time.perf_counter()
        ledger._env._env.copy(str(copy), compact=True)
        copied = time.perf_counter() - began
        before = home.joinpath("ledger", "data.mdb").read_bytes().count(mark)
        began = time.perf_counter()
        ledger.compact()
        seconds = time.perf_counter() - began
        size = ledger.stats().file_bytes / 1e9
    left = home.joinpath("ledger", "data.mdb").read_bytes().count(mark)
    figures.append(
        Figure(
            metric="found_in_ledger", value=left * len(mark), unit="bytes", baseline=before * len(mark), bar=0,
            peer=(copy / "data.mdb").read_bytes().count(mark) * len(mark), better="lower",
            note=f"{megabytes // 2} of {megabytes} sessions deleted; peer: LMDB's compacting copy",
        )
    )  # fmt: skip
    figures.append(
        Figure(
            metric="compact_ledger", value=seconds / size, unit="s/GB", peer=copied / size, better="lower",
            note=f"of {size:.2f} GB that are left; peer: LMDB's compacting copy, not on disk when it returns",
        )
    )  # fmt: skip
    with BlockStore.open(place / "cache", capacity=8 << 30) as store:
        contexts = [Context(8, seed=n, size=64, floats=1 << 17) for n in range(options.pick(16, 128))]
        for context in contexts:
            context.fill(store)
        for context in contexts[::2]:
            store.drop(context.keys[0], "forgotten")
        store.flush()
        began = time.perf_counter()
        store.compact()
        seconds, size = time.perf_counter() - began, store.stats().file_bytes / 1e9
    note = f"of {size:.2f} GB of KV that are left"
    return [*figures, Figure(metric="compact_cache", value=seconds / size, unit="s/GB", better="lower", note=note)]
