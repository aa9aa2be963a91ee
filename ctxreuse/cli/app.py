"""The root of the command line: groups and global flags."""

from __future__ import annotations

from collections.abc import Sequence

from ctxreuse.cli import bench, calibrate, codec, config, demo, doctor, keys, mcp, replay, store, why
from ctxreuse.cli.common import app_of
from ctxreuse.cli.errors import EXIT_ERROR, EXIT_USAGE, run
from ctxreuse.cli.models import app as models

__all__ = ["EXIT_ERROR", "EXIT_USAGE", "app", "main"]

_EXAMPLES = """[bold]Examples[/bold]

ctxreuse demo                 a context computed once, reused after a restart

ctxreuse doctor               is everything here, and is it healthy?

ctxreuse model get smollm2    fetch the default model (once, about 100 MB)

ctxreuse store stat           what is kept, and how much of it

ctxreuse replay traffic.jsonl --plot hits.svg   which policy and capacity suit one's own traffic

ctxreuse why --last           what the newest request did not reuse, and why

ctxreuse bench store --quick  measure a part against baseline and bound

CTXREUSE_STORE__CAPACITY=20GB ctxreuse config show --origin

[bold]Exit codes[/bold]

0 done · 1 a check failed · 2 wrong usage or setting · 3 other error
"""

app = app_of("ctxreuse", "Compute a context once; then keep, fork, move and reuse it.", _EXAMPLES)
app.add_typer(codec.app, name="codec")
app.add_typer(config.app, name="config")
app.add_typer(keys.app, name="keys")
app.add_typer(models, name="model")
app.add_typer(store.app, name="store")
app.command("demo")(demo.demo)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)
app.command("bench", epilog=bench.EXAMPLES)(bench.bench)
app.command("mcp", epilog=mcp.EXAMPLES)(mcp.mcp)
app.command("why", epilog=why.EXAMPLES)(why.why)
app.command("calibrate", epilog=calibrate.EXAMPLES)(calibrate.calibrate)
app.command("replay", epilog=replay.EXAMPLES)(replay.replay)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit."""
    run(app, "ctxreuse", args)
