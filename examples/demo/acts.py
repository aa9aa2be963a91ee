"""The acts of the demo, each run in a process of its own that reports one JSON line an event.

``python -m demo.acts ACT FOLDER`` in ``examples/``. The first act ends by killing its own process with SIGKILL, as a
crash or a flat battery would; the second starts from what is on disk.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ctxreuse.errors import CtxReuseError

if TYPE_CHECKING:
    from ctxreuse_agents import Memory, Session

__all__ = ["ACTS", "ENGINE", "QUESTIONS", "SHORT", "TASK", "document", "engine_name", "report", "timed"]

#: Set in the environment: the demo reads less and answers shorter. Its processes inherit it.
SHORT = "DEMO_SHORT"
#: The environment's name of the engine; llama_cpp if it is not set.
ENGINE = "DEMO_ENGINE"

QUESTIONS = (
    "Who founded the observatory?",
    "How is the mirror of the largest telescope cleaned?",
    "What does it mean when the bell rings three times?",
)
TASK = "You answer questions about this handbook, in one sentence.\n\n"
_ANSWER_TOKENS, _SHORT_ANSWER = 24, 8
#: The handbook's chapters before this one answer all questions.
_REST = "4. The night log"
# Memory for one context, taken at the start as engines do: the document, a question and its answer.
_ROOM = 2304


def document() -> str:
    """The handbook that the demo asks about, about 2,000 tokens (800 if short), written for this project."""
    text = Path(__file__).with_name("document.txt").read_text("utf-8")
    return text.partition(_REST)[0] if SHORT in os.environ else text


def engine_name() -> str:
    """The engine of all the demo's processes."""
    return os.environ.get(ENGINE, "llama_cpp")


def _answer_tokens() -> int:
    return _SHORT_ANSWER if SHORT in os.environ else _ANSWER_TOKENS


def report(event: str, **fields: Any) -> None:
    """One event to the process that shows the demo."""
    sys.stdout.buffer.write(msgspec.json.encode({"event": event, **fields}) + b"\n")
    sys.stdout.buffer.flush()


def timed(session: Session, question: str) -> dict[str, Any]:
    """Ask, timing the first piece: what was reused, from where, and which tokens came out."""
    started = time.perf_counter()
    answer = session.ask(question, max_tokens=_answer_tokens())
    pieces = iter(answer)
    first = next(pieces)
    seconds = time.perf_counter() - started
    text = first + "".join(pieces)
    usage = answer.usage
    return {
        "question": question,
        "seconds": seconds,
        "prompt": usage.prompt_tokens,
        "cached": usage.cached_tokens,
        "sources": usage.tokens.by_source,
        "tokens": list(answer.tokens),
        "text": text.strip(),
    }


def ask(session: Session, question: str, step: str) -> None:
    """Ask and report it."""
    report("answered", step=step, **timed(session, question))


def open_memory(folder: Path) -> Memory:
    """The memory with its engine, warmed up so that the first question is not charged for starting it."""
    from ctxreuse_agents import Memory

    from ctxreuse.engines import open_engine

    report("doing", what="loading the model")
    memory = Memory.open(folder, engine=open_engine("smollm2", engine=engine_name(), reserve=_ROOM))
    assert memory.runtime is not None
    memory.runtime.prefill([1, 2, 3, 4])
    return memory


def first(folder: Path) -> None:
    """Read the document cold, ask warm, and die."""
    memory = open_memory(folder)
    handbook = memory.create("handbook")
    handbook.system(TASK + document())
    report("doing", what="reading the document for the first time")
    ask(handbook.fork("cold"), QUESTIONS[0], "cold")
    for i, question in enumerate(QUESTIONS):
        report("doing", what="asking again in the same process")
        ask(handbook.fork(f"warm-{i}"), question, "warm")
    memory.flush()
    report("killed", pid=os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


def second(folder: Path) -> None:
    """After the kill: ask from disk, fork twice, evict and rebuild; then compute all answers with nothing reused."""
    memory = open_memory(folder)
    handbook = memory.session("handbook", create=False)
    assert memory.runtime is not None
    for i, question in enumerate(QUESTIONS):
        report("doing", what="asking after the restart")
        memory.runtime.context_cache.clear()  # else the second question would find the first one in memory
        ask(handbook.fork(f"restart-{i}"), question, "restart")

    parent = memory.session("restart-0", create=False)
    for i, question in enumerate(QUESTIONS[1:]):
        started = time.perf_counter()
        fork = parent.fork(f"fork-{i}", at=handbook.head)
        report("forked", seconds=time.perf_counter() - started)
        report("doing", what="asking in a fork")
        ask(fork, question, "fork")

    for name in [session.name for session in memory.sessions()]:
        memory.session(name, create=False).evict()
    report("doing", what="rebuilding after the KV was evicted")
    for question in QUESTIONS[:1]:
        ask(handbook.fork("evicted"), question, "evicted")
    memory.flush()
    report("stored", stats=memory.stats())

    report("doing", what="computing every answer again with nothing reused, to compare")
    _without_reuse(memory, handbook)
    memory.close()


def _without_reuse(memory: Memory, handbook: Session) -> None:
    from ctxreuse.engines.sampling import SamplingParams
    from ctxreuse.runtime import Runtime, RuntimeOptions

    assert memory.runtime is not None
    plain = Runtime(memory.runtime.engine, None, RuntimeOptions(context_cache_bytes=0))
    for question in QUESTIONS:
        fork = handbook.fork()
        fork.user(question)
        started = time.perf_counter()
        completion = plain.complete(fork.tokens(generate=True), SamplingParams(max_tokens=_answer_tokens()))
        next(completion)
        seconds = time.perf_counter() - started
        completion.drain()
        report("plain", question=question, seconds=seconds, tokens=list(completion.tokens))
        memory.delete(fork.id)


ACTS: dict[str, Callable[[Path], None]] = {"first": first, "second": second}


def main(arguments: Sequence[str]) -> int:
    """Run one act: ACT FOLDER."""
    act, folder = arguments
    try:
        ACTS[act](Path(folder))
    except CtxReuseError as error:
        report("failed", error=type(error).__name__, what=error.what, where=error.where, fix=error.fix)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
