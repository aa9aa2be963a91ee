"""Plays the acts in processes of their own, shows what happens, prints the table, and goes on with the link."""

from __future__ import annotations

import signal
import statistics
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ctxreuse import models
from ctxreuse.errors import StoreError
from ctxreuse.units import rounded_bytes
from demo.acts import QUESTIONS, document, engine_name
from demo.children import events

__all__ = ["play"]

_STEPS = {
    "cold": "cold",
    "warm": "warm",
    "restart": "after kill -9",
    "fork": "in a fork",
    "evicted": "after eviction",
}


def play(keep: str | None = None, console: Console | None = None) -> bool:
    """Run both acts and the link, and print; True if all went as it should. See `demo.run`."""
    console = console or Console()
    (models.get_gguf if engine_name() == "llama_cpp" else models.get)("smollm2")
    console.print(
        f"\n[bold]A handbook of {len(document().split()):,} words, a small language model, one question at a time.[/]"
        "\nEach line: the question, seconds to the first token, reused tokens.\n"
    )
    if keep is not None:
        folder = Path(keep)
        if folder.exists() and any(folder.iterdir()):
            raise StoreError("the folder is not empty", where=keep, fix="Name a new folder for the demo's memory")
        return _play(folder, console)
    with tempfile.TemporaryDirectory(prefix="ctxreuse-demo-") as folder_name:
        return _play(Path(folder_name), console)


def _play(folder: Path, console: Console) -> bool:
    seen: list[dict[str, Any]] = []
    with console.status("starting") as status:
        for act in ("first", "second"):
            for event in _events(act, folder):
                seen.append(event)
                if event["event"] == "doing":
                    status.update(event["what"])
                elif event["event"] == "answered":
                    console.print(_line(event))
                elif event["event"] == "killed":
                    console.print(f"[bold red]kill -9[/] process {event['pid']} is gone; a new one opens the memory\n")
    same = _same(seen)
    console.print()
    console.print(_table(seen))
    console.print(_summary(seen, same), soft_wrap=True)
    return _link(_truth(seen), console) and same


def _link(truth: dict[str, list[int]], console: Console) -> bool:
    missing = [name for name in ("zmq", "uvicorn", "starlette", "aiohttp") if find_spec(name) is None]
    if missing:
        fix = "pip install 'ctxreuse[edge,cloud]'"
        console.print(f"\nThe link is not shown: it needs {', '.join(missing)} ({fix})", markup=False)
        return True
    from demo.link import play_link

    return play_link(truth, console)


def _events(act: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Events of one act as they come. Raises what the act raised, EngineError if its process ends in another way."""
    return events("demo.acts", act, str(folder), ends=-signal.SIGKILL if act == "first" else 0)


def _line(event: dict[str, Any]) -> str:
    share = 100 * event["cached"] / event["prompt"]
    return (
        f"[bold]{event['question']}[/] [dim]({_STEPS[event['step']]})[/]\n"
        f"  {event['text']}\n"
        f"  [green]{event['seconds']:.2f} s[/] to the first token, "
        f"{event['cached']:,} of {event['prompt']:,} tokens reused ({share:.0f} %)\n"
    )


def _truth(seen: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The tokens that each question got with nothing reused."""
    return {event["question"]: event["tokens"] for event in seen if event["event"] == "plain"}


def _same(seen: list[dict[str, Any]]) -> bool:
    """True if every answer has the tokens that the same question got with nothing reused."""
    truth = _truth(seen)
    answers = [event for event in seen if event["event"] == "answered"]
    return bool(answers) and set(truth) == set(QUESTIONS) and all(e["tokens"] == truth[e["question"]] for e in answers)


def _table(seen: list[dict[str, Any]]) -> Table:
    table = Table(title="Time to first token", title_justify="left", title_style="bold")
    table.add_column("when")
    table.add_column("questions", justify="right")
    table.add_column("reused", justify="right", no_wrap=True)
    table.add_column("from")
    table.add_column("seconds", justify="right")
    table.add_column("faster", justify="right")
    full = statistics.median(event["seconds"] for event in seen if event["event"] == "plain")
    for step, name in _STEPS.items():
        rows = [event for event in seen if event["event"] == "answered" and event["step"] == step]
        seconds = statistics.median(row["seconds"] for row in rows)
        reused = statistics.median_low(row["cached"] for row in rows)
        prompt = statistics.median_low(row["prompt"] for row in rows)
        tiers = sorted({tier for row in rows for tier in row["sources"]})
        table.add_row(
            name,
            str(len(rows)),
            f"{reused:,} / {prompt:,}",
            ", ".join(tiers) or "computed",
            f"{seconds:.2f}",
            f"{full / seconds:.1f}x" if reused else "",
        )
    table.add_row("nothing reused", str(len(QUESTIONS)), "0", "computed", f"{full:.2f}", "")
    return table


def _summary(seen: list[dict[str, Any]], same: bool) -> str:
    forks = [event["seconds"] for event in seen if event["event"] == "forked"]
    stored = next(event for event in seen if event["event"] == "stored")
    blocks = stored["stats"]["blocks"]
    return (
        f"forking took {1000 * statistics.median(forks):.1f} ms · "
        f"{rounded_bytes(blocks['nbytes'])} of KV in {blocks['blocks']} blocks on disk · "
        f"same tokens: {'[bold green]yes[/]' if same else '[bold red]NO[/]'}"
    )
