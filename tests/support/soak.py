"""Mixed requests through a real edge daemon and a real cloud, and what their processes hold meanwhile.

By hand: ``PYTHONPATH=tests:examples python -m support.soak 100000 [--fill 68000] [--seed 1]``; it prints a line of
figures now and then.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil

from support.cluster import Cluster, Node
from support.tiny_text import save_model
from support.waiting import patient, until

__all__ = ["FULL", "Held", "Soak", "growth"]

#: Blocks after which all that remembers blocks of late is full: 65,536 of those that left, and of those that were asked
#: for, and the texts of 52,428.
FULL = 68_000
#: Tokens of a context that fills (attention takes most of its time, so not many), and of a block.
_LONG, _BLOCK = 1024, 64

_ROOTS = ["".join(chr(97 + (i * i + k * i * 7 + k) % 26) for i in range(400)) for k in range(12)]


class Held(NamedTuple):
    """What one process holds after ``requests``; bytes without files that are mapped, whose pages the kernel owns.

    ``used``: bytes of native memory in use, and ``blocks``: pieces of memory of Python's objects, as a daemon says.
    What was freed and is kept by the C library for later is in ``anonymous`` too, and comes and goes.
    """

    requests: int
    anonymous: int
    resident: int
    descriptors: int
    threads: int
    used: int = 0
    blocks: int = 0

    @classmethod
    def of(cls, pid: int, requests: int, url: str = "") -> Held:
        lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        found = {words[0]: words[1] for words in lines if len(words) > 1}
        held = (int(found["RssAnon:"]) << 10, int(found["VmRSS:"]) << 10, len(list(Path(f"/proc/{pid}/fd").iterdir())))
        said = httpx.get(f"{url}/metrics", timeout=patient(60)).text.splitlines() if url else []
        values = dict(line.rsplit(" ", 1) for line in said if not line.startswith("#"))
        own = (values.get(name, 0) for name in ('ctxreuse_heap_bytes{state="used"}', "ctxreuse_python_blocks"))
        return cls(requests, *held, int(found["Threads:"]), *(int(float(value)) for value in own))


def growth(held: Sequence[Held], what: str = "anonymous") -> float:
    """Growth of a figure: the median of the last fifth of ``held`` over that of the first, less one."""
    fifth = max(1, len(held) // 5)
    early, late = (float(np.median([getattr(one, what) for one in part])) for part in (held[:fifth], held[-fifth:]))
    return late / early - 1


class Soak:
    """An edge that gives to and fetches from a cloud, whose proxy has the edge as its server, under mixed requests.

    Stores and caches hold a fraction of what is asked for, names of sessions never come again, and the link is cut
    now and then.
    """

    def __init__(self, folder: Path, *, seed: int = 0, clients: int = 3) -> None:
        model = save_model(folder / "model", positions=2048)
        self._cluster = Cluster(folder, model)
        self._seed, self._clients = seed, clients
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        backend = {"url": f"http://127.0.0.1:{port}", "name": "edge"}
        self.cloud = self._cluster.cloud(store_bytes=2 << 20, store__host_bytes=1 << 20, backends=[backend])
        self._relay = self._cluster.relay()
        small = {"store__capacity": 1 << 20, "edge__context_cache_bytes": 1 << 20, "store__host_bytes": 1 << 20}
        self.edge = self._cluster.edge("edge", endpoint=self._relay.endpoint, edge__port=port, **small)
        _card_for(model, Path(self.edge.cards))
        self.edge.start().ready()
        until(lambda: self.edge.link()["state"] == "up")
        until(lambda: self.cloud.status()["backends"][0]["healthy"], 30)
        self.done, self.busy, self.kinds, self.wrong = 0, 0, Counter[str](), list[str]()
        self._lock = threading.Lock()
        assert self.edge.process is not None
        assert self.cloud.process is not None
        (engine,) = psutil.Process(self.edge.process.pid).children()
        self._pids = {"edge": self.edge.process.pid, "its engine": engine.pid, "cloud": self.cloud.process.pid}
        self.held: dict[str, list[Held]] = {name: [] for name in self._pids}

    def close(self) -> None:
        """End both daemons."""
        self._cluster.close()

    def fill(self, blocks: int = FULL) -> None:
        """Compute so many blocks, no two alike: what remembers blocks of late, or their texts, is full then."""
        chances = [random.Random(f"{self._seed} fills {i}") for i in range(self._clients)]
        each = -(-blocks // (_LONG // _BLOCK * self._clients))
        threads = [threading.Thread(target=_Client(self, 0).fill, args=(each, chance)) for chance in chances]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def run(self, requests: int, samples: int = 40, told: Callable[[str], None] = lambda line: None) -> None:
        """Make so many requests and measure the processes evenly often meanwhile; failures are in ``wrong``."""
        begun, at = time.monotonic(), self.done
        for n in range(samples):
            end = at + requests * (n + 1) // samples
            clients = [_Client(self, self._seed * 1_000_003 + end * 31 + i) for i in range(self._clients)]
            threads = [threading.Thread(target=client.run, args=(end,)) for client in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if n % 4 == 3:
                self._relay.cut()
                until(lambda: self.edge.link()["state"] == "up", 30)
            self.measure()
            if self.wrong:
                return
            rate = (self.done - at) / (time.monotonic() - begun)
            told(f"{self.done} requests, {rate:.0f}/s; " + "; ".join(f"{k} {v[-1][1:]}" for k, v in self.held.items()))

    def measure(self) -> None:
        """Note what the processes hold, at rest."""
        time.sleep(0.05)
        urls = {"edge": self.edge.url, "cloud": self.cloud.url}
        for name, pid in self._pids.items():
            self.held[name].append(Held.of(pid, self.done, urls.get(name, "")))

    def began(self, kind: str, end: int) -> bool:
        with self._lock:
            if self.done >= end or self.wrong:
                return False
            self.done += 1
            self.kinds[kind] += 1
            return True


class _Client:
    """One caller with connections of its own."""

    def __init__(self, soak: Soak, seed: int) -> None:
        self._soak, self._chance, self._seed = soak, random.Random(seed), seed
        self._open: dict[str, http.client.HTTPConnection] = {}
        self._kinds: dict[str, tuple[int, Callable[[], None]]] = {
            "chat": (20, self._chat),
            "through the cloud": (15, lambda: self._chat(self._soak.cloud)),
            "lossy": (10, lambda: self._chat(ctxreuse={"lossy": "kl-0.05"})),
            "stream": (10, lambda: self._stream(self._soak.edge)),
            "cancelled": (10, lambda: self._stream(self._soak.edge, events=2)),
            "cancelled at the cloud": (5, lambda: self._stream(self._soak.cloud, events=2)),
            "tokens": (15, self._tokens),
            "pause": (5, self._pause),
            "context": (5, self._context),
            "forget": (3, self._forget),
            "why": (4, self._why),
            "refused": (4, self._refused),
        }

    def run(self, end: int) -> None:
        names, weights = list(self._kinds), [weight for weight, _ in self._kinds.values()]
        try:
            while self._soak.began(kind := self._chance.choices(names, weights)[0], end):
                self._kinds[kind][1]()
        except Exception as error:
            self._soak.wrong.append(f"{kind}, seed {self._seed}: {error!r}")
        finally:
            for connection in self._open.values():
                connection.close()

    def fill(self, contexts: int, chance: random.Random) -> None:
        """Ask for an answer to so many long contexts."""
        try:
            for _ in range(contexts):
                ids = [chance.randrange(250) for _ in range(_LONG)]
                body = {"tokens": ids, "sampling": {"max_tokens": 1, "ignore_eos": True}}
                self._ask(self._soak.edge, "POST", "/api/tokens/complete", body)
        except Exception as error:
            self._soak.wrong.append(f"filling: {error!r}")
        finally:
            for connection in self._open.values():
                connection.close()

    def _ask(self, node: Node, method: str, path: str, body: Any = None, *expected: int) -> Any:
        host = node.url.removeprefix("http://")
        connection = self._open.setdefault(host, http.client.HTTPConnection(host, timeout=patient(60)))
        raw = None if body is None else json.dumps(body)
        for _ in range(100):
            try:
                connection.request(method, path, raw, {"Content-Type": "application/json"})
                answer = connection.getresponse()
            except (BrokenPipeError, ConnectionResetError):  # idle for so long that the daemon closed it
                connection.close()
                continue
            data = answer.read()
            if answer.status not in (429, 503):  # on a busy machine a daemon may be too slow for its peer's checks
                break
            self._soak.busy += 1
            time.sleep(0.2)
        if answer.status not in (expected or (200,)):
            raise AssertionError(f"{method} {path} answered {answer.status}: {data[:300]!r}")
        return json.loads(data) if data.startswith(b"{") else data

    def _body(self, **more: Any) -> dict[str, Any]:
        chance = self._chance
        said = [{"role": "system", "content": chance.choice(_ROOTS)[: chance.randrange(100, 400)]}]
        for _ in range(chance.randrange(3)):
            said += [{"role": "user", "content": f"{chance.random()}"}, {"role": "assistant", "content": "yes"}]
        said += [{"role": "user", "content": f"What of {chance.random()}?"}]
        return {"messages": said, "max_tokens": chance.randrange(1, 4), "temperature": 0, "ignore_eos": True} | more

    def _chat(self, node: Node | None = None, **more: Any) -> None:
        found = self._ask(node or self._soak.edge, "POST", "/v1/chat/completions", self._body(**more))
        assert found["usage"]["completion_tokens"] > 0, found

    def _stream(self, node: Node, events: int = 0) -> None:
        """Read a stream to its end, or leave after so many events."""
        host = node.url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=patient(60))
        try:
            body = self._body(stream=True) | {"max_tokens": 200 if events else 3}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status in (429, 503):
                self._soak.busy += 1
                return
            assert answer.status == 200, answer.read()[:300]
            lines = 0
            while (line := answer.readline()) and not (events and lines == events):
                lines += line.startswith(b"data: {")
                assert b'"error"' not in line, line
            assert lines == events if events else lines >= 2
        finally:
            connection.close()

    def _ids(self) -> list[int]:
        root = self._chance.choice(_ROOTS)[: self._chance.randrange(70, 300)].encode()
        return [
            *(byte - 33 for byte in root),
            *(self._chance.randrange(250) for _ in range(self._chance.randrange(40))),
        ]

    def _tokens(self) -> None:
        """A turn of a session of the memory library, then another fork of it."""
        ids, name = self._ids(), f"session {self._chance.random()}"
        for tail in ([1, 2, 3], [4, 5, 6, 7]):
            body = {"tokens": [*ids, *tail], "branches": [len(ids)], "sampling": {"max_tokens": 2, "ignore_eos": True}}
            about = {"session": name, "parts": [["root", len(ids)]]}
            raw = self._ask(self._soak.edge, "POST", "/api/tokens/complete", body | {"about": about})
            assert b'"finish"' in raw, raw[-300:]

    def _pause(self) -> None:
        ids, edge = self._ids(), self._soak.edge
        kind = self._chance.choice(["tool", f"tool:{self._chance.random()}", "end_of_turn", "length"])
        self._ask(edge, "POST", "/api/tokens/warm", {"tokens": ids})
        self._ask(edge, "POST", "/api/tokens/pause", {"tokens": ids, "kind": kind, "expect": self._chance.random()})
        self._ask(edge, "POST", "/api/tokens/hint", {"tokens": ids, "name": "demote", "until": 1.0})
        if self._chance.random() < 0.7:
            self._ask(edge, "POST", "/api/tokens/resume", {"tokens": ids})

    def _context(self) -> None:
        edge, name = self._soak.edge, f"context-{self._chance.getrandbits(64):x}"
        said = [{"role": "system", "content": self._chance.choice(_ROOTS)}]
        new = {"name": name, "messages": said, "pin": self._chance.random() < 0.5}
        self._ask(edge, "POST", "/api/contexts", new, 201)
        self._chat(context=name)
        self._ask(edge, "GET", "/api/contexts?limit=5")
        self._ask(edge, "DELETE", f"/api/contexts/{name}")

    def _forget(self) -> None:
        self._ask(self._soak.edge, "POST", "/api/tokens/forget", {"tokens": self._ids()})

    def _why(self) -> None:
        self._ask(self._soak.edge, "GET", "/api/why", None, 200, 404)
        for node in (self._soak.edge, self._soak.cloud):
            self._ask(node, "GET", self._chance.choice(["/api/status", "/metrics", "/readyz"]))

    def _refused(self) -> None:
        edge = self._soak.edge
        self._ask(edge, "POST", "/v1/chat/completions", self._body(temperature=self._chance.random() + 3), 400)
        self._ask(edge, "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 9000}]}, 400)
        self._ask(edge, "GET", f"/nowhere/{self._chance.random()}", None, 404)
        self._ask(edge, "DELETE", f"/api/contexts/none{self._chance.random()}", None, 404)


def _card_for(model: Path, cards: Path) -> None:
    """Write a card with lossy levels of this model."""
    from ctxreuse.block.format import parse
    from ctxreuse.codec import ProfileStore, write_profile
    from ctxreuse.engines import open_engine
    from ctxreuse.identity.keys import ROOT, prefix_keys
    from ctxreuse.testing.profiles import plain_profile

    engine = open_engine(str(model), threads=1)
    ids = np.random.default_rng(0).integers(0, 256, 512).astype("<i4")
    live = engine.new_context(len(ids))
    engine.prefill(live, ids)
    keys = prefix_keys(engine.space.digest, bytes(16), ids, engine.space.block_tokens)
    views = [parse(data) for data in engine.export(live, keys, ROOT, 0)]
    ProfileStore(cards).add(write_profile(plain_profile(engine.space, views, theta=lambda _: 10000.0)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m support.soak")
    parser.add_argument("requests", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--fill", type=int, default=0, metavar="BLOCKS", help=f"compute so many before, such as {FULL}")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), seed=given.seed, clients=given.clients)
        try:
            if given.fill:
                soak.fill(given.fill)
            soak.run(given.requests, given.samples, lambda line: print(line, flush=True))
            print(dict(soak.kinds), f"{soak.busy} refused as busy", *soak.wrong, sep="\n")
            for name, held in soak.held.items():
                figures = ("anonymous",) if name == "its engine" else ("anonymous", "used", "blocks")
                for what in figures:
                    print(f"{name}, {what}: {growth(held[len(held) // 3 :], what):+.2%} after the first third")
        finally:
            soak.close()
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
