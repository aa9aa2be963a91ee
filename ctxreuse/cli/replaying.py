"""What ``ctxreuse replay`` needs besides the lab: sizes and prices from flags, files and models, and progress bars."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ctxreuse.errors import ConfigError
from ctxreuse.units import parse_bytes, parse_duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from ctxreuse.lab.replay import Line
    from ctxreuse.lab.trace import Trace

__all__ = ["Bars", "cores", "line_of", "size_of", "source"]

_COST_FILE = "cost.bin"


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def source(path: Path | None, format: str, kind: str | None, requests: int, seed: int) -> Trace:
    """The trace that was asked for. Raises ConfigError where none or two are, or as opening does."""
    from ctxreuse.lab.generate import generate
    from ctxreuse.lab.opening import open_trace

    if (path is None) == (kind is None):
        raise ConfigError(
            "name a trace file or --generate KIND, one of them" if path is None else "a trace file and --generate",
            fix="Run `ctxreuse replay --help` for examples",
        )
    return generate(kind, requests=requests, seed=seed) if kind is not None else open_trace(path or "", format)


def size_of(
    trace: Trace,
    path: Path | None,
    block: str | None,
    token: str | None,
    model: str | None,
    config: str | None,
) -> int:
    """Bytes of a block: as flags say, else as the recording does; 0 if nobody says. Raises ConfigError for nonsense."""
    from ctxreuse.lab.recording import recording_head

    if sum(flag is not None for flag in (block, token, model)) > 1:
        raise ConfigError("--block-bytes, --token-bytes and --model say the same", fix="Give one of them")
    size: int | None = None
    if block is not None:
        size = parse_bytes(block)
    elif token is not None:
        size = parse_bytes(token) * trace.block_tokens
    elif model is not None:
        size = _of_model(model, config) * trace.block_tokens
    if size is not None and size < 1:
        raise ConfigError("a block of no bytes", fix="Give a size such as 128KiB")
    if size is None and path is not None and trace.format == "recording":
        size = recording_head(path).token_bytes * trace.block_tokens
    return size or 0


class _Shape(msgspec.Struct):
    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None


def _of_model(name: str, config: str | None) -> int:
    """Bytes of K and V of a token, from the model's own description and the engine's numeric type."""
    from ctxreuse.config import load
    from ctxreuse.model import DTYPE_BYTES
    from ctxreuse.models import CATALOG
    from ctxreuse.models import path as model_path

    folder = model_path(name) if name in CATALOG else Path(name).expanduser()
    file = folder / "config.json"
    try:
        shape = msgspec.json.decode(file.read_bytes(), type=_Shape)
    except OSError as error:
        fix = f"Run: ctxreuse model get {name}" if name in CATALOG else "Name a Hugging Face folder, or --token-bytes"
        raise ConfigError(f"the model {name!r} is not here", where=str(file), fix=fix) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"the model's sizes are unknown: {error}", where=str(file), fix="Give --token-bytes"
        ) from None
    heads = shape.num_key_value_heads or shape.num_attention_heads
    wide = shape.head_dim or shape.hidden_size // max(shape.num_attention_heads, 1)
    return 2 * shape.num_hidden_layers * heads * wide * DTYPE_BYTES[load(config).settings.engine.dtype]


def line_of(prefill: str | None, cost: Path | None, config: str | None) -> tuple[Line, str]:
    """The price of prefill and where it comes from: the flag, a file of measured costs, this device's, or a guess."""
    from ctxreuse.config import load
    from ctxreuse.lab.replay import Line

    if prefill is not None:
        parts = [parse_duration(part) for part in prefill.split(",")]
        if cost is not None or len(parts) > 2:
            raise ConfigError(f"{prefill!r} is no price of prefill", fix="Write --prefill 1ms,100ns, without --cost")
        return Line(parts[0], parts[1] if len(parts) == 2 else 0.0), "prices as given"
    own = load(config).settings.store.folder() / _COST_FILE
    if cost is not None or own.is_file():
        found = _measured(cost or own)
        if found is not None:
            return found, "prices as this device measured them" if cost is None else f"prices of {cost.name}"
        if cost is not None:
            raise ConfigError("no prefill was measured there", where=str(cost), fix="Name the cost.bin of a daemon")
    return Line(), "prices are a guess: --prefill or --cost says better"


def _measured(file: Path) -> Line | None:
    from ctxreuse.cost import CostModel
    from ctxreuse.lab.replay import Line

    model = CostModel()
    try:
        file = file / _COST_FILE if file.is_dir() else file
        known = model.restore(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"the costs cannot be read: {error.strerror}", where=str(file), fix="Name a file") from error
    found = model.prefill.coefficients if known else None
    return None if found is None else Line(found[1], found[2])


class Bars:
    """Progress on standard error: reading, then a bar over all requests of all replays."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description:<28}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._bar: Progress = Progress(*columns, console=console, transient=True, disable=quiet)
        self._task: TaskID | None = None

    def __enter__(self) -> Bars:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def reading(self, rows: int | None) -> Callable[[int], None]:
        """Before a trace of ``rows`` requests (None: who knows) is read; the result takes how many are."""
        task = self._task = self._bar.add_task("reading", total=rows)
        return lambda done: self._bar.update(
            task, completed=done if rows else 0, description=f"reading: {done:,} requests"
        )

    def replaying(self, requests: int, replays: int) -> None:
        """Reading is done; so many replays follow."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task("bounds", total=requests * replays)

    def at(self, name: str, capacity: int, done: int) -> None:
        """``done`` requests of all replays together are behind, and this one is under way."""
        from ctxreuse.units import rounded_bytes

        assert self._task is not None
        self._bar.update(self._task, completed=done, description=f"{name} at {rounded_bytes(capacity)}")
