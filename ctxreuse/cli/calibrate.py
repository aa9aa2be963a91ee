"""The command ``ctxreuse calibrate``: makes the profile of lossy levels, chunk reuse, early exits, or a judge."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from ctxreuse.cli.common import ProgressBars

if TYPE_CHECKING:
    from rich.console import Console

    from ctxreuse.exits.profile import ExitProfile
    from ctxreuse.judge import JudgeProfile
    from ctxreuse.reuse.profile import ChunkProfile

__all__ = ["EXAMPLES", "calibrate", "show_chunk_profile"]

EXAMPLES = """[bold]Examples[/bold]

ctxreuse calibrate smollm2                       minutes; on a mix of prose, chat, code, tables and languages

ctxreuse calibrate smollm2 --text notes.txt --text chats.txt   on your own texts

ctxreuse calibrate ./my-model --levels 0.03,0.01+0.0015,0.05-joint --plot rate.svg

ctxreuse calibrate smollm2 --chunks              error of documents reused at other positions

ctxreuse calibrate smollm2 --exits               ramps at which tokens can leave the model early

ctxreuse calibrate smollm2 --exits --engine onnxruntime   the same of what was built of it for onnxruntime

ctxreuse calibrate smollm2 --judge               how far it is trusted to judge steps that devices write

ctxreuse calibrate smollm2 --judge --text steps.jsonl   on your own labelled steps

ctxreuse calibrate gemma3-270m --chunks --whole  a sliding-window model, with the KV of all tokens

A level kl-0.01 moves the distribution of the next token by at most 0.01 nats, measured on the kind of validation text
that suffers most (each file is a kind); the table is measured on yet other text. 0.01+0.0015 is a level with a
refinement, which can be fetched later. 0.05-joint codes K and V of up to ten layers as one: about half of the bytes,
for links and disks, at four times the decoding. With --chunks the profile has the error of reused chunks under each
recompute policy; a request's max_kl chooses among them.
"""


def calibrate(
    model: Annotated[str, typer.Argument(help="A name from `ctxreuse model ls`, or a Hugging Face folder.")],
    text: Annotated[
        list[Path] | None, typer.Option("--text", metavar="FILE", help="Text to calibrate on; may be repeated.")
    ] = None,
    levels: Annotated[
        str | None, typer.Option("--levels", metavar="KL,KL+KL", help="Target KL of the levels, in nats a token.")
    ] = None,
    windows: Annotated[
        int,
        typer.Option("--windows", min=2, max=512, help="Windows of text for calibration; as many more for measuring."),
    ] = 20,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Threads of the engine.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw rate against divergence.")] = None,
    chunks: Annotated[
        bool, typer.Option("--chunks", help="Measure reuse at other positions, for the quality gate.")
    ] = False,
    exits: Annotated[
        bool, typer.Option("--exits", help="Make ramps at which tokens can leave the model early.")
    ] = False,
    engine_name: Annotated[
        str, typer.Option("--engine", help="With --exits: whose ramps they are, torch or onnxruntime.")
    ] = "torch",
    judge: Annotated[bool, typer.Option("--judge", help="Measure how well the model judges steps of answers.")] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Less text; with --chunks also fewer recompute policies."),
    ] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="With --chunks: keep all tokens of sliding-window layers.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the profile to FILE.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress; print only the profile's path.")] = False,
) -> None:
    """Measure how a model's K and V can be coded, and store the result as a calibration profile."""
    output = _Output(out, plot, quiet, time.monotonic())
    _check_engine(engine_name, exits=exits and not judge)
    if judge:
        _judge(model, text or [], threads or 0, output, quick=quick)
        return
    if exits:
        _exits(model, engine_name, text or [], threads or 0, output, quick=quick)
        return
    if chunks:
        _chunks(model, text or [], threads or 0, output, quick=quick, whole=whole)
        return
    from ctxreuse import calibrate as work
    from ctxreuse.calibrate.plot import draw
    from ctxreuse.cli.codec import show_profile
    from ctxreuse.codec import ProfileStore, profile_digest, write_profile
    from ctxreuse.engines import open_for_calibration

    targets = work.Target.parse(levels) if levels else work.DEFAULT_TARGETS
    given = work.read_texts(text) if text else None
    engine, tokenizer = open_for_calibration(model, threads=threads or 0)
    settings = work.settings_for(
        engine, calibration=windows, validation=max(1, windows // 2), held_out=max(1, windows // 2)
    )._replace(targets=targets)
    counts = "/".join(str(n) for n in settings.windows.values())
    notes = _notes(model, text) | {"windows": f"{counts} of {settings.prefix}+{settings.scored} tokens"}
    with ProgressBars(quiet=quiet, lines=True) as bars:
        profile = work.calibrate(engine, tokenizer, given or work.default_texts(), settings, bars.advance, notes)
    data = write_profile(profile)
    # Two curves: levels of each plane alone, and joint ones.
    curves: dict[str, list[tuple[float, float]]] = {}
    for level in profile.levels:
        name = notes["model"] + (", joint" if level.joint else "")
        curves.setdefault(name, []).append((level.info.bits, level.info.kl))
    output.write(
        ProfileStore().add(data),
        data,
        lambda file: draw(curves, f"Levels of {notes['model']}", file),
        lambda console: show_profile(profile, profile_digest(data).hex(), console),
    )


class _Output(NamedTuple):
    """What to do with a profile besides storing it: copy, plot, print."""

    copy: Path | None
    plot: Path | None
    quiet: bool
    began: float

    def write(self, path: Path, data: bytes, draw: Callable[[Path], object], show: Callable[[Console], None]) -> None:
        """Write copy and plot, show the profile, and print the ``path`` where it is stored."""
        from rich.console import Console

        if self.copy is not None:
            self.copy.write_bytes(data)
        if self.plot is not None:
            draw(self.plot)
        if not self.quiet:
            console = Console(stderr=True)
            show(console)
            console.print(f"[dim]{time.monotonic() - self.began:.0f} s[/dim]")
        typer.echo(path)


def _notes(model: str, text: list[Path] | None) -> dict[str, str]:
    source = ", ".join(path.name for path in text) if text else "prose, chat, code, tables and other languages"
    return {"model": Path(model).name, "text": source}


def _chunks(model: str, text: list[Path], threads: int, output: _Output, *, quick: bool, whole: bool) -> None:
    """Measure chunks at other positions and store the profile."""
    from ctxreuse import calibrate as work
    from ctxreuse.calibrate.chunks import calibrate_chunks, chunk_settings
    from ctxreuse.calibrate.plot import draw_policies
    from ctxreuse.engines.torch_hf import TorchEngine
    from ctxreuse.reuse import ChunkProfileStore, write_chunk_profile

    given = work.read_texts(text) if text else None
    engine = TorchEngine.open(model, threads=threads, full_kv_for_windows=whole)
    windows = engine.space.needs_state and all(spec.kind in ("full", "sliding") for spec in engine.space.layers)
    if windows and not output.quiet:
        typer.echo(
            "Note: this model keeps sliding windows as states, so no row of a chunk can be computed anew. With --whole"
            " it is measured as engines use it that have engine.full_kv_for_windows set.",
            err=True,
        )
    settings = chunk_settings(engine, quick=quick)
    shapes = ", ".join(f"{count} of {shape.name}, next {shape.following}" for shape, count in settings.shapes)
    notes = _notes(model, text) | {"scenes": shapes}
    with ProgressBars(quiet=output.quiet, lines=True) as bars:
        profile = calibrate_chunks(engine, given or work.default_texts(), settings, bars.advance, notes)
    output.write(
        ChunkProfileStore().add(profile),
        write_chunk_profile(profile),
        lambda file: draw_policies(profile.measured, f"Chunks of {notes['model']} at other positions", file),
        lambda console: show_chunk_profile(profile, console),
    )


def _check_engine(name: str, *, exits: bool) -> None:
    from ctxreuse.errors import ConfigError

    if name not in (("torch", "onnxruntime") if exits else ("torch",)):
        raise ConfigError(
            f"that is not made on the engine {name!r}", fix="Leave --engine out, or use onnxruntime with --exits"
        )


def _exits(model: str, engine_name: str, text: list[Path], threads: int, output: _Output, *, quick: bool) -> None:
    """Make ramps and store the profile."""
    from ctxreuse import calibrate as work
    from ctxreuse.calibrate.exits import calibrate_exits, exit_settings
    from ctxreuse.engines import open_engine
    from ctxreuse.engines.exits import ExitCalibration
    from ctxreuse.errors import ConfigError
    from ctxreuse.exits.profile import ExitProfileStore, write_exit_profile

    if output.plot is not None:
        raise ConfigError("ramps have no plot", fix="Leave --plot out")
    given = work.read_texts(text) if text else None
    engine = open_engine(model, engine=engine_name, threads=threads)
    assert isinstance(engine, ExitCalibration)
    with ProgressBars(quiet=output.quiet, lines=True) as bars:
        profile = calibrate_exits(
            engine, given or work.default_texts(), exit_settings(engine, quick=quick), bars.advance, _notes(model, text)
        )
    output.write(
        ExitProfileStore().add(profile),
        write_exit_profile(profile),
        lambda file: None,
        lambda console: _show_exit_profile(profile, console),
    )


def _judge(model: str, files: list[Path], threads: int, output: _Output, *, quick: bool) -> None:
    """Measure a judge and store the profile; refuse it where it cannot be trusted."""
    from ctxreuse.calibrate.judge import calibrate_judge
    from ctxreuse.engines import open_engine
    from ctxreuse.errors import ConfigError
    from ctxreuse.judge import LEAST_AUC, JudgeProfileStore, make_steps, read_steps
    from ctxreuse.judge.profile import write_judge_profile

    if output.plot is not None:
        raise ConfigError("a judge has no plot", fix="Leave --plot out")
    steps = [step for file in files for step in read_steps(file)] if files else make_steps(40 if quick else 160)
    engine = open_engine(model, threads=threads)
    notes = _notes(model, files) | ({} if files else {"text": "generated sums and lists"})
    with ProgressBars(quiet=output.quiet, lines=True) as bars:
        profile = calibrate_judge(engine, steps, bars.advance, notes)
    output.write(
        JudgeProfileStore().add(profile),
        write_judge_profile(profile),
        lambda file: None,
        lambda console: _show_judge_profile(profile, console),
    )
    if all(judged.auc < LEAST_AUC for judged in profile.judges.values()):
        name, best = max(profile.judges.items(), key=lambda one: one[1].auc)
        best.check(f"{name} of {notes['model']}")


def _show_judge_profile(profile: JudgeProfile, console: Console) -> None:
    """Print how often each way of judging puts a right step above a wrong one."""
    from rich.table import Table

    from ctxreuse.judge import LEAST_AUC

    table = Table(title="judges", title_justify="left")
    for column in ("judge", "steps", "AUC", "by task", "accepts from", ""):
        table.add_column(column, justify="right" if column in ("steps", "AUC", "accepts from") else "left")
    for name, one in profile.judges.items():
        tasks = ", ".join(f"{task} {auc:.2f}" for task, auc in one.tasks.items())
        verdict = "trusted" if one.auc >= LEAST_AUC else f"refused: under {LEAST_AUC}"
        table.add_row(name, f"{one.steps}", f"{one.auc:.2f}", tasks, f"{one.threshold:.2f}", verdict)
    console.print(table)


def _show_exit_profile(profile: ExitProfile, console: Console) -> None:
    """Print where the ramps are, and how often they say what the model says."""
    from rich.table import Table

    table = Table(title="ramps", title_justify="left")
    for column in ("after layer", "of", "tokens", "agrees on held-out text"):
        table.add_column(column, justify="right")
    for ramp in profile.ramps:
        table.add_row(f"{ramp.depth}", f"{profile.layers}", f"{len(ramp.candidates):,}", f"{ramp.agrees:.1%}")
    console.print(table)


def show_chunk_profile(profile: ChunkProfile, console: Console) -> None:
    """Print the error of each recompute policy, and the text it was measured on."""
    from rich.table import Table

    table = Table(title="chunks at other positions", title_justify="left")
    for column in ("chunks", "position", "policy", "KL", "at most", "top-1", "ΔNLL", "recomputed"):
        words = column in ("chunks", "position", "policy")
        table.add_column(column, justify="left" if words else "right", overflow="fold")
    for one in sorted(profile.measured, key=lambda one: (one.chunks * one.tokens, one.kind, one.recomputed)):
        figures = (f"{one.kl:.4f}", f"{one.kl_high:.4f}", f"{one.top1:.1%}", f"{one.dnll:+.4f}")
        table.add_row(f"{one.chunks} x {one.tokens}", one.kind, one.policy, *figures, f"{one.recomputed:.1%}")
    console.print(table)
    if profile.in_place:
        table = Table(title="runs read in place", title_justify="left")
        for column in ("tokens", "encoding", "KL", "at most", "top-1", "ΔNLL"):
            table.add_column(
                column, justify="right" if column not in ("tokens", "encoding") else "left", overflow="fold"
            )
        for read in profile.in_place:
            figures = (f"{read.kl:.4f}", f"{read.kl_high:.4f}", f"{read.top1:.1%}", f"{read.dnll:+.4f}")
            table.add_row(f"{read.tokens}", read.words, *figures)
        console.print(table)
    for name, value in profile.notes.items():
        console.print(f"[dim]{name}: {value}[/dim]", highlight=False, markup=True)
