"""A page of made-up contexts behind a real feed and server: for pictures, and for how fast ten thousand are drawn."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

from starlette.routing import Router

from ctxreuse.daemon.lifecycle import Daemon
from ctxreuse.daemon.middleware import ApiMiddleware
from ctxreuse.daemon.page.feed import Feed, Rows
from ctxreuse.daemon.page.routes import page_routes
from ctxreuse.metrics import Metrics
from support.waiting import until

_NAMES = ("refactor parser", "triage inbox", "release notes", "flaky test", "weekly report", "api review", "migrate db")
_GAPS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, None)


class MadeUp:
    """Panels of a device whose ``contexts`` conversations go on by themselves, each from some system prompts."""

    def __init__(self, contexts: int = 60, seed: int = 7) -> None:
        self._rng, self._since = random.Random(seed), time.time() - 5400
        self._began = time.time()
        self._contexts, self._requests, self._removals, self._decisions = Rows(), Rows(), Rows(), Rows()
        self._sources = {
            "device": 812_000,
            "host": 41_000,
            "disk": 246_000,
            "edge": 0,
            "cloud": 38_000,
            "compute": 263_000,
        }
        self._generated, self._saved, self._gaps = 41_230, 812.4, [0] * len(_GAPS)
        for _ in range(3000):
            self._gap()
        self._grow(contexts)
        for number in range(40):
            self._request(number, self._began - (40 - number) * 19)
        now = self._began
        for number, (how, why, blocks) in enumerate(
            [("evicted", "adaptive: greedy", 12), ("evicted", "adaptive: greedy", 4), ("refused", "declined", 2)] * 3
        ):
            self._removals[str(number)] = [
                now - 700 + number * 41,
                how,
                why,
                blocks,
                f"{self._rng.getrandbits(64):016x}",
            ]
        self._number = 40

    def _gap(self) -> None:
        gap = self._rng.lognormvariate(-3.9, 0.35)
        self._gaps[next(at for at, limit in enumerate(_GAPS) if limit is None or gap <= limit)] += 1

    def _id(self) -> str:
        return f"{self._rng.getrandbits(64):016x}"

    def _grow(self, count: int) -> None:
        rng, now, rows = self._rng, self._began, dict(self._contexts)
        tiers = ["device"] + ["host"] + ["disk"] * 8
        for system in range(max(2, min(5, count // 10))):
            top, tokens = self._id(), rng.choice((640, 1280, 2304))
            rows[top] = [
                "",
                0,
                tokens,
                tokens // 64,
                tokens * 12288,
                "device" if not system else "disk",
                "exact",
                int(system < 2),
                0,
                now - 30,
                "",
            ]
            parents = [(top, tokens)]
            for _ in range(count // max(2, min(5, count // 10))):
                above, start = parents[rng.randrange(len(parents))] if rng.random() < 0.55 else parents[0]
                one, own = self._id(), 64 * rng.randint(3, 60)
                tier = rng.choice(tiers) if rows[above][5] == "device" else rng.choice(tiers[1:])
                used = now - rng.expovariate(1 / 1500)
                level = rng.choice(("exact", "exact", "packed", "kl-0.01"))
                who = f"{rng.choice(_NAMES)} {rng.randint(1, 40)}" if rng.random() < 0.8 else ""
                rows[one] = [
                    above,
                    start,
                    own,
                    own // 64,
                    own * 9216,
                    tier,
                    level,
                    int(rng.random() < 0.04),
                    0,
                    used,
                    who,
                ]
                parents.append((one, start + own))
        self._contexts = Rows(rows)

    def _request(self, number: int, at: float) -> None:
        rng = self._rng
        run = rng.choice(list(self._contexts))
        row = self._contexts[run]
        tokens = row[1] + row[2] + rng.randint(20, 300)
        cached = int(tokens * rng.choice((0.0, 0.62, 0.9, 0.97, 0.99)))
        source = row[5] if cached else ""
        why = rng.choice(("", "new", "new", "evicted")) if cached < tokens * 0.98 else ""
        sources = {source: cached} if cached else {}
        self._requests[f"chatcmpl-{number:06d}"] = [
            at,
            row[10] or f"agent {number % 7}",
            tokens,
            cached,
            sources,
            why,
            run,
            run,
            "",
        ]
        way = rng.choice(("load", "load", "recompute", "layers"))
        seconds = rng.lognormvariate(-2.5, 1.1)
        self._decisions[str(number)] = [way, way, tokens, seconds * rng.lognormvariate(0, 0.25), seconds, ""]
        for rows, most in ((self._requests, 64), (self._decisions, 200)):
            while len(rows) > most:
                del rows[next(iter(rows))]

    def step(self) -> None:
        """A second passes."""
        rng = self._rng
        self._sources["device"] += rng.randint(200, 2600)
        self._sources["disk"] += rng.choice((0, 0, 1800))
        self._sources["compute"] += rng.randint(30, 500)
        self._generated += 60
        self._saved += 0.9
        for _ in range(60):
            self._gap()
        self._number += 1
        self._requests, self._decisions = Rows(self._requests), Rows(self._decisions)
        self._request(self._number, time.time())
        rows = Rows(self._contexts)
        for one in rng.sample(list(rows), max(1, len(rows) // 100)):
            rows[one] = [*rows[one][:9], time.time(), rows[one][10]]
        self._contexts = rows

    def panels(self) -> dict[str, Any]:
        total, gaps = 0, []
        for limit, count in zip(_GAPS, self._gaps):
            total += count
            gaps.append([limit, total])
        now = time.time()

        def tokens() -> Any:
            self.step()
            return {
                "sources": dict(self._sources), "generated": self._generated, "drafted": [0, 0], "saved": self._saved,
                "lost": 3.1, "computing": 96.2, "requests": {"stop": 900}, "gaps": gaps_now(), "first": [],
            }  # fmt: skip

        def gaps_now() -> Any:
            total, found = 0, []
            for limit, count in zip(_GAPS, self._gaps):
                total += count
                found.append([limit, total])
            return found

        answers = [[f"chatcmpl-{number:06d}", now - 4 - number, 2400 + 90 * number, 2300, 40] for number in range(3)]

        def running() -> Any:
            age = int(time.time() - now)
            rows = [[name, since, prompt, cached, made + 21 * age] for name, since, prompt, cached, made in answers]
            return {
                "answers": rows, "active": 5, "queued": 1, "limit": 32, "waiting": 3, "admission": 0,
                "passes": [80_000, 201_000, 12], "resident": [14, 412_000_000, 1 << 30],
            }  # fmt: skip

        sessions = Rows()
        for number in range(9):
            origin = f"{number // 3 * 3:032x}" if number % 3 else ""
            name = f"{_NAMES[number // 3]}{f' fork {number % 3}' if origin else ''}"
            sessions[f"{number:032x}"] = [
                name,
                4 + number,
                origin,
                2,
                now - 9000,
                now - 100 * number,
                number == 3,
                "",
                "",
            ]
        waits = (("tool:shell", "pytest"), ("end_of_turn", ""), ("tool:read", ""), ("tool:human", ""))
        chats = Rows(
            (str(number), [2000 + 311 * number, 10**7, *wait, now - 20 * number, ""])
            for number, wait in enumerate(waits)
        )
        moving = [["put", 24, 0], ["fetch", 12, 4_100_000]]
        links = Rows(
            home=["up", "", 0.011, 41e6, int(8.1e8), int(2.2e9), 1, 5120, 118, 900, moving],
            office=["down", "no answer", None, 0.0, 0, 0, 0, None, 640, 0, []],
        )

        def links_now() -> Any:
            age = time.time() - now
            return Rows(
                {
                    name: [*row[:4], int(row[4] + 9e5 * age), int(row[5] + 3e6 * age), *row[6:]]
                    if row[0] == "up"
                    else row
                    for name, row in links.items()
                }
            )

        return {
            "daemon": lambda: {
                "kind": "edge", "version": "0.1.0", "pid": os.getpid(), "since": self._since,
                "models": [["smollm2", "up", ""]], "block": 64, "texts": False, "failing": "",
            },
            "tokens": tokens,
            "running": running,
            "store": lambda: {
                "tiers": {"host": [41_000_000, 268_435_456, 40], "disk": [6_120_000_000, 8_000_000_000, 9000]},
                "tokens": sum(row[2] for row in self._contexts.values()), "states": 0,
                "levels": {"exact": 6100, "packed": 2400, "kl-0.01": 540}, "hits": 18_230, "evicted": 412,
                "recompressed": 220, "dropped": {"forgotten": 12}, "refused": {"declined": 9}, "failing": False,
                "unwritten": 0, "policy": "greedy",
            },
            "contexts": lambda: self._contexts,
            "sessions": lambda: sessions,
            "chats": lambda: chats,
            "requests": lambda: self._requests,
            "links": links_now,
            "removals": lambda: self._removals,
            "decisions": lambda: self._decisions,
        }  # fmt: skip


@contextlib.contextmanager
def served(panels: dict[str, Any]) -> Iterator[str]:
    """Serve a page with these panels in a thread; yields its address."""
    daemon = Daemon("page", drain=2)
    url = daemon.bind()

    def run() -> None:
        feed = Feed(panels, ended=lambda: bool(daemon.not_ready()))
        app = ApiMiddleware(Router(page_routes(feed)), metrics=Metrics(), route=lambda path: "page")
        daemon.run(app, contextlib.AsyncExitStack)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: not daemon.not_ready())
    try:
        yield url
    finally:
        daemon.stop()
        thread.join()
