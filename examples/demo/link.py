"""The second half of the demo: a context that one device read serves another one, over a slow link and after it.

A cloud and three edge daemons run as processes, each edge behind a relay that is as slow as a home link. Edge A reads
the handbook and sends its KV to the cloud; edge B answers the same question from there; a device with an unknown
key gets nothing and computes; then the cloud is stopped and B answers from its own store.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxreuse_agents import Memory
from rich.table import Table

from ctxreuse.units import rounded_bytes
from demo.acts import QUESTIONS, TASK, document, engine_name, timed
from demo.children import events
from demo.nodes import Node, Place, unbroken, wait_for
from demo.relay import Relay

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

__all__ = ["play_link"]

_RATE, _RTT = 100e6 / 8, 0.020
_LINK = "100 Mbit/s, 20 ms"
_SLOW, _SLOW_LINK = 20e6 / 8, "20 Mbit/s, 20 ms"


def play_link(truth: Mapping[str, Sequence[int]], console: Console) -> bool:
    """Play it; True if B fetched, the stranger got nothing, and all answers have the tokens of ``truth`` (by question).

    Every process is ended when this returns or raises (LinkDownError with a node's last words; KeyboardInterrupt).
    """
    console.print(
        "\n[bold]The link: a cloud and three devices, each a process with its own key and store.[/]\n"
        f"Every device is behind a relay of {_LINK}, as in a home. Blocks come from the end while the device computes "
        "from the front, until both meet. Every answer is compared with that of a full recompute.\n"
    )
    with (
        tempfile.TemporaryDirectory(prefix="ctxreuse-link-") as folder,
        console.status("starting a cloud") as status,
        _terminable(),
        _profiles(),
        ExitStack() as stack,
    ):
        link = _Link(Path(folder), stack, console, status)
        rows = link.play()
        status.update("stopping all daemons")
    console.print(_table(rows, truth))
    if link.levels:
        console.print(_levels_table(link.levels))
    else:
        console.print("lossy levels are calibrated and shown on torch: --engine torch", markup=False)
    verdict = _verdict(rows, truth)
    console.print(verdict or "a context read once served two devices · same tokens: [bold green]yes[/]", soft_wrap=True)
    return not verdict


@contextmanager
def _profiles() -> Iterator[None]:
    """Use the user's calibration profile of the model if there is one, else a folder of the demo's own.

    The demo calibrates in a minute, too roughly for other programs.
    """
    from ctxreuse.codec import ProfileStore, read_profile
    from ctxreuse.errors import FormatError

    def serves(path: Path) -> bool:
        try:
            return read_profile(path.read_bytes()).notes.get("model") == "smollm2"
        except (FormatError, OSError):
            return False

    store = ProfileStore()
    if any(serves(path) for path in store.folder.glob("*/*.card")):
        yield
        return
    before = os.environ.get("CTXREUSE_CARDS")
    os.environ["CTXREUSE_CARDS"] = str(store.folder.with_name(f"{store.folder.name}-of-the-demo"))
    try:
        yield
    finally:
        if before is None:
            del os.environ["CTXREUSE_CARDS"]
        else:
            os.environ["CTXREUSE_CARDS"] = before


class _Link:
    """The story, a step a method; rows of the tables gather in ``rows`` and ``levels``."""

    def __init__(self, folder: Path, stack: ExitStack, console: Console, status: Status) -> None:
        self._stack, self._console, self._status = stack, console, status
        self._place = Place(folder)
        self.rows: list[dict[str, Any]] = []
        self.levels: list[dict[str, Any]] = []

    def play(self) -> list[dict[str, Any]]:
        """All steps; returns the rows."""
        cloud = self._start(self._place.cloud)
        host, port = cloud.call("GET", "/api/status")["bus"]["endpoint"].removeprefix("tcp://").rsplit(":", 1)
        target = host, int(port)
        # One engine at a time: what the others take of the cores would be counted as the link's.
        a = self._edge("edge-a", target)
        a.ask("A reads it", QUESTIONS[0], "edge A reads the handbook")
        self.rows.append(a.give())
        b = self._edge("edge-b", target)
        c = self._edge("stranger", target, allowed=False)
        b.wait_for_blocks(self.rows[-1]["blocks"])
        b.ask("B fetches it", QUESTIONS[0], "edge B fetches the missing blocks")
        c.ask("C, key unknown", QUESTIONS[0], "C is refused, and reads the handbook")
        if engine_name() == "torch":
            self._at_levels(target)
        self._status.update("stopping the cloud")
        cloud.close()
        b.ask("B, cloud stopped", QUESTIONS[0], "edge B answers without the cloud")
        b.ask("B, new question", QUESTIONS[1], "edge B answers another question")
        return self.rows

    def _at_levels(self, target: tuple[str, int]) -> None:
        """A device of its own fetches what A gave at three levels, and measures what each does to the model."""
        relay = self._stack.enter_context(Relay(target, rate=_SLOW, rtt=_RTT))
        key_file, server_key = self._place.device("edge-d")
        arguments = (str(self._place.folder / "edge-d"), relay.endpoint, key_file, server_key)
        for event in events("demo.levels", *arguments):
            if event["event"] == "doing":
                self.status(event["what"])
            elif event["event"] == "calibrating":
                filled = round(20 * event["done"] / max(event["total"], 1))
                self.status(f"calibrating once, kept for later: {event['what']} {'█' * filled:░<20}")
            else:
                self.levels.append(event)

    def _start(self, start: Callable[[], Node]) -> Node:
        with unbroken():
            node = self._stack.enter_context(start())
        return node.ready()

    def _edge(self, name: str, target: tuple[str, int], *, allowed: bool = True) -> _Edge:
        self._status.update(f"{name} starts and loads the model")
        relay = self._stack.enter_context(Relay(target, rate=_RATE, rtt=_RTT))
        node = self._start(lambda: self._place.edge(name, relay, allowed=allowed))
        return _Edge(self, node, relay, "up" if allowed else "refused")

    def show(self, row: dict[str, Any]) -> None:
        """Add a row and print it."""
        self.rows.append(row)
        reused, nbytes = _reused(row) or "nothing", rounded_bytes(row["nbytes"])
        self._console.print(
            f"[bold]{row['question']}[/] [dim]({row['who']})[/]\n  {row['text']}\n"
            f"  [green]{row['seconds']:.2f} s[/] to the first token, "
            f"{reused} reused of {row['prompt']:,} tokens, {nbytes} over the link\n"
        )

    def status(self, text: str) -> None:
        """Say what is done now."""
        self._status.update(text)


class _Edge:
    """One device: its daemon, its link, and an agent's memory attached to it."""

    def __init__(self, link: _Link, node: Node, relay: Relay, state: str) -> None:
        self._link, self._node, self._relay = link, node, relay
        wait_for(lambda: self._cloud()["state"] == state, f"the link of {node.name} being {state!r}")

    def _cloud(self) -> Any:
        return self._node.call("GET", "/api/status")["clouds"][0]

    def _traffic(self) -> int:
        total = self._relay.traffic()
        return int(total.up + total.down)

    def ask(self, who: str, question: str, doing: str) -> None:
        """Have an agent that is attached to this device ask."""
        self._link.status(doing)
        folder = self._node.store.with_name(f"{self._node.name}-agent")
        before = self._traffic()
        with Memory.open(folder, engine=self._node.url) as memory:
            handbook = memory.session("handbook")
            if not handbook.head:
                handbook.system(TASK + document())
            answer = timed(handbook.fork(), question)
        self._link.show({"who": who, "nbytes": self._traffic() - before, **answer})

    def wait_for_blocks(self, blocks: int) -> None:
        """Wait until the cloud has announced so many blocks to this device."""
        wait_for(lambda: (self._cloud()["announced"] or 0) >= blocks, "the announcement of the cloud's blocks")

    def give(self) -> dict[str, Any]:
        """Send the cloud everything that this device computed; returns the row of the table.

        An idle device would do it by itself; a sync does it now.
        """
        self._link.status("edge A sends the cloud the missing blocks")
        began, before = time.perf_counter(), self._traffic()

        def done() -> Any:
            given = self._node.call("POST", "/api/sync")["links"][0]
            return given if given["pending_blocks"] == 0 and given["sent_blocks"] else None

        given = wait_for(done, "the sync of edge A", 120.0)
        seconds, nbytes = time.perf_counter() - began, self._traffic() - before
        return {"who": "A to the cloud", "blocks": given["sent_blocks"], "seconds": seconds, "nbytes": nbytes}


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that no process stays behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _reused(row: dict[str, Any]) -> str:
    """Tokens that needed no computing by where they came from, as text."""
    return ", ".join(f"{count:,} {source}" for source, count in row["sources"].items() if count)


def _verdict(rows: Sequence[dict[str, Any]], truth: Mapping[str, Sequence[int]]) -> str:
    """What went wrong; "" if nothing did."""
    answers = [row for row in rows if "tokens" in row]
    b, c = (next(row for row in answers if row["who"].startswith(name)) for name in "BC")
    if any(row["tokens"] != list(truth[row["question"]]) for row in answers):
        return "same tokens: [bold red]NO[/]"
    if not b["sources"].get("cloud"):
        return "[bold red]B did not fetch[/]: is this machine quicker than such a link?"
    if c["cached"]:
        return "[bold red]C received another tenant's blocks[/]"
    return ""


def _levels_table(levels: Sequence[dict[str, Any]]) -> Table:
    title = f"The same context over {_SLOW_LINK}, by what the request allows"
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("allowed", "came as"):
        table.add_column(name)
    for name in ("fetched", "link", "seconds", "KL, nats", "same top token"):
        table.add_column(name, justify="right")
    for row in levels:
        nbytes, fetched = rounded_bytes(row["nbytes"]), f"{row['fetched']:,} of {row['prompt']:,}"
        figures = (f"{row['seconds']:.2f}", f"{row['kl']:.4f}", f"{100 * row['top1']:.1f} %")
        table.add_row(row["allowed"], ", ".join(row["levels"]), fetched, nbytes, *figures)
    table.caption = f"agreement with exact KV, measured on the {levels[0]['scored']} tokens that follow"
    return table


def _table(rows: Sequence[dict[str, Any]], truth: Mapping[str, Sequence[int]]) -> Table:
    table = Table(title=f"Over a link of {_LINK}", title_justify="left", title_style="bold")
    table.add_column("who")
    table.add_column("reused")
    table.add_column("computed", justify="right")
    table.add_column("seconds", justify="right")
    table.add_column("link", justify="right")
    table.add_column("same")
    for row in rows:
        nbytes = rounded_bytes(row["nbytes"])
        if "tokens" in row:
            same = "yes" if row["tokens"] == list(truth[row["question"]]) else "[bold red]NO[/]"
            computed = f"{row['prompt'] - row['cached']:,}"
            table.add_row(row["who"], _reused(row), computed, f"{row['seconds']:.2f}", nbytes, same)
        else:
            table.add_row(row["who"], f"{row['blocks']} blocks sent", "", f"{row['seconds']:.2f}", nbytes, "")
    return table
