"""The page: bytes of its files, frames a second with ten thousand contexts, and what a reader costs the daemon.

A process serves the real feed over a store on disk of that many contexts, one of which grows each second; CPU is that
of this process, without and with readers. Frames are those of a headless Chromium, if one is installed, that draws the
tree in each of them.
"""

from __future__ import annotations

import contextlib
import http.client
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.routing import Router

from benchmarks.children import Child
from benchmarks.chromium import Chromium, chromium
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.daemon.lifecycle import Daemon
from ctxreuse.daemon.middleware import ApiMiddleware
from ctxreuse.daemon.page.feed import Feed
from ctxreuse.daemon.page.panels import ContextPanel, KnownUse, removal_rows, store_figures
from ctxreuse.daemon.page.routes import EVENTS, FILES, page_routes
from ctxreuse.metrics import Metrics
from ctxreuse.metrics.table import SOURCES
from ctxreuse.store import BlockStore
from ctxreuse.store.tiered import TieredStore
from ctxreuse.testing.store import Context

__all__ = ["main", "run"]

_CONTEXTS, _BLOCKS, _READERS = 10_000, 4, 4
#: Blocks that the contexts begin with: as many system prompts.
_STARTS = 8
#: Counts frames while the tree is drawn in each, under a pointer that goes over it.
_FRAMES = """(async (seconds) => {
  const canvas = document.getElementById("icicle"), box = canvas.getBoundingClientRect(), began = performance.now();
  let frames = 0;
  for (let now = began; now - began < seconds * 1000; frames++) {
    const at = { clientX: box.left + (now - began) / 5 % box.width, clientY: box.top + 5 + frames % 2 * 22 };
    canvas.dispatchEvent(new MouseEvent("mousemove", at));
    now = await new Promise(requestAnimationFrame);
  }
  return frames / seconds;
})"""


def run(options: Options) -> list[Figure]:
    """See the module's docstring."""
    contexts, seconds = (1_000, 4.0) if options.quick else (_CONTEXTS, 30.0)
    size = sum(len(files("ctxreuse.daemon.page").joinpath(name).read_bytes()) for name, _ in FILES.values())
    figures = [
        Figure(metric="bytes", value=size, unit="B", better="lower", bar=150_000, note="all files, uncompressed")
    ]
    with Child("benchmarks.page", contexts) as child:
        costs: dict[int, float] = {}
        for number, readers in enumerate((0, 1, _READERS)):
            options.step("page", number, 4)
            with _reading(child.said, readers):
                time.sleep(3)
                began, before = time.perf_counter(), child.seconds
                time.sleep(seconds)
                costs[readers] = 100 * (child.seconds - before) / (time.perf_counter() - began)
        bar = None if options.quick else 1.0
        note = f"of the daemon, with {contexts:,} contexts, one of which grows each second; less that without a reader"
        more = (costs[_READERS] - costs[1]) / (_READERS - 1)
        rows = (
            ("first_reader", costs[1] - costs[0], bar, note),
            ("further_reader", more, bar, f"each of {_READERS - 1} more at the same time"),
            ("without_reader", costs[0], None, "the growing context alone"),
        )
        for metric, value, limit, about in rows:
            figures.append(
                Figure(metric=metric, value=value, unit="% of a core", better="lower", bar=limit, note=about)
            )
        if chromium() is not None:
            options.step("page", 3, 4)
            figures.append(_frames(child.said, contexts, quick=options.quick))
    return figures


def _frames(url: str, contexts: int, *, quick: bool) -> Figure:
    with Chromium(1600, 1100) as browser:
        browser.goto(url)
        end = time.monotonic() + 60
        while not browser.text("#tree-count"):
            if time.monotonic() > end:
                raise TimeoutError("the page shows no contexts")
        rounds = [float(browser.run(f"{_FRAMES}({1 if quick else 4})")) for _ in range(3)]
        wrong = browser.errors + browser.failures
    note = f"median of three, {contexts:,} contexts drawn anew in each frame, 1600 px; drawn by the CPU, 60 at most"
    if wrong:
        raise RuntimeError(f"the console is not empty: {wrong}")
    bar = None if quick else 30.0
    return Figure(metric="frames", value=statistics.median(rounds), unit="/s", better="higher", bar=bar, note=note)


@contextlib.contextmanager
def _reading(url: str, readers: int) -> Iterator[None]:
    """Read the feed ``readers`` times at once, as pages do."""
    ended = threading.Event()

    def read() -> None:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        connection.request("GET", EVENTS)
        answer = connection.getresponse()
        while not ended.is_set():
            answer.readline()
        connection.close()

    threads = [threading.Thread(target=read) for _ in range(readers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _panels(store: TieredStore, uses: list[KnownUse]) -> dict[str, Any]:
    metrics = Metrics()

    def gaps() -> list[list[float | None]]:
        return [[limit if limit < 1e9 else None, n] for limit, n in metrics.buckets("ctxreuse_inter_token_seconds")]

    return {
        "daemon": lambda: {
            "kind": "edge", "version": "bench", "pid": 0, "since": 0, "models": [], "texts": False, "failing": "",
        },
        "tokens": lambda: {
            "sources": {name: int(metrics.read("ctxreuse_prompt_tokens_total", name)) + 1 for name in SOURCES},
            "generated": 0, "saved": 0, "lost": 0, "computing": 0, "requests": {},
            "gaps": gaps(),
        },
        "running": lambda: {"answers": [], "active": 0, "queued": 0, "limit": 32},
        "store": lambda: store_figures(store),
        "contexts": ContextPanel(store, lambda: uses).rows,
        "removals": lambda: removal_rows(store),
    }  # fmt: skip


def main(contexts: int) -> None:
    """Serve the page of a store with so many contexts, one of which grows each second, until standard input ends."""
    with tempfile.TemporaryDirectory() as folder:
        store = TieredStore(1 << 26, BlockStore.open(Path(folder) / "store", capacity=2 << 30))
        for number in range(contexts):
            one = Context(_BLOCKS, seed=number % _STARTS, branch=number // _STARTS, fork=1, floats=16)
            for block in range(_BLOCKS):
                store.put(one.keys[block], one.block(block))
            if number % 256 == 0:
                store.flush()
        store.flush()
        uses: list[KnownUse] = []
        ended = threading.Event()

        def grow() -> None:
            one = Context(2_000, branch=2_000, fork=1, floats=16)
            for block in range(1, 2_000):
                if ended.wait(1):
                    return
                store.put(one.keys[block], one.block(block))
                uses[:] = [KnownUse(time.time(), "bench", one.keys[block][:8])]

        daemon = Daemon("page", drain=1)
        url = daemon.bind()
        growing = threading.Thread(target=grow)

        def obey() -> None:
            growing.start()
            print(url, flush=True)
            sys.stdin.read()
            ended.set()
            daemon.stop()

        threading.Thread(target=obey).start()
        feed = Feed(_panels(store, uses), ended=lambda: bool(daemon.not_ready()))
        app = ApiMiddleware(Router(page_routes(feed)), metrics=Metrics(), route=lambda path: "page")
        daemon.run(app, contextlib.AsyncExitStack)
        growing.join()
        store.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
