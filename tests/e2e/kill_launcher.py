"""Starts writers on one memory, kills each with SIGKILL at a random moment, and checks what is left: for test_kill.py.

    python kill_launcher.py FOLDER ROUNDS SEED      one JSON line of figures at the end; any fault is a traceback

torch is imported once; each writer is forked from here, says on a pipe what it is about to do and what was done, and
dies some milliseconds after one of its first 30 lines, however slow the machine is. The parent holds nothing open while
a writer lives.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from support.tiny_text import tiny_engine

GREEDY = {"max_tokens": 8, "ignore_eos": True}

History = list[tuple[int, str, str]]


def without_markers(engine: Any) -> dict[str, Any]:
    """Sampling in which the model says no marker: that would be in the answer's ids and not in its text."""
    return {"ignore_eos": True, "logit_bias": {int(engine.text.encode(one)[0]): -100.0 for one in engine.text.markers}}


def history(session: Any) -> History:
    return [(turn.id, turn.role, turn.content) for turn in session.turns()]


def write(engine: Any, folder: Path, pipe: int, rng: random.Random) -> None:
    """Random verbs for ever; each is announced before and acknowledged after."""
    from ctxreuse_agents import Memory

    from ctxreuse.errors import ContextTooLongError

    def tell(**fields: Any) -> None:
        line = json.dumps(fields).encode() + b"\n"
        assert len(line) <= select.PIPE_BUF, "a longer line could be torn by the kill"
        os.write(pipe, line)

    memory = Memory.open(folder, engine, capacity=64 << 20)
    tell(opened=True)
    while True:
        names = [session.id for session in memory.sessions()]
        session = memory.session(rng.choice(names)) if names and rng.random() < 0.9 else None
        verb = rng.choices(["append", "ask", "fork", "rollback", "evict", "warm", "delete"], [5, 6, 2, 1, 1, 1, 0.5])[0]
        if session is None or len(names) < 2:
            tell(verb="create")
            session = memory.create()
            session.system("Remember " + "".join(rng.choices("abcdef ", k=150)))
        elif verb == "append":
            text = "".join(rng.choices("abcdef ", k=rng.randrange(1, 80)))
            tell(verb=verb, session=session.id, adds=[["user", text]])
            session.user(text)
        elif verb == "ask":
            text = "".join(rng.choices("abcdef ", k=rng.randrange(1, 30)))
            tell(verb=verb, session=session.id, adds=[["user", text], ["assistant", None]])
            try:
                session.ask(text, max_tokens=rng.randrange(1, 12), **without_markers(engine)).text  # noqa: B018
            except ContextTooLongError:
                session.rollback(0)
        elif verb == "fork" and len(names) < 12:
            tell(verb=verb, session=session.id)
            session = session.fork()
        elif verb == "rollback" and session.head:
            tell(verb=verb, session=session.id)
            session.rollback(-1)
        elif verb == "delete" and len(names) > 3:
            tell(verb=verb, session=session.id)
            memory.delete(session)
            tell(done=verb, session=session.id, deleted=True)
            continue
        elif session.head and verb in ("evict", "warm"):
            tell(verb=verb, session=session.id)
            (session.evict if verb == "evict" else session.warm)()
        tell(done=verb, session=session.id, turns=len(session.turns()), head=session.head)


def context(engine: Any, folder: Path, rng: random.Random) -> list[dict[str, Any]]:
    """One writer's life: what it said before it was killed."""
    read, pipe = os.pipe()
    seed = rng.random()
    pid = os.fork()
    if not pid:
        try:
            os.close(read)
            write(engine, folder, pipe, random.Random(seed))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(pipe)
    said = b""
    lines = rng.randrange(30)
    while said.count(b"\n") < lines and (chunk := os.read(read, 1 << 16)):
        said += chunk
    time.sleep(rng.uniform(0, 0.02))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the writer ended by itself: {status}"
    while chunk := os.read(read, 1 << 16):
        said += chunk
    os.close(read)
    return [json.loads(line) for line in said.splitlines()]


def judge(before: dict[str, History], after: dict[str, History], said: list[dict[str, Any]]) -> str:
    """Every acknowledged verb is there; the one under way is there in part, wholly or not at all. Returns its name."""
    acked: dict[str, dict[str, Any]] = {}
    pending: dict[str, Any] = {}
    for line in said:
        if "done" in line:
            acked[line["session"]] = line
            pending = {}
        elif "verb" in line:
            pending = line
    busy = pending.get("session")
    for key in before.keys() | acked.keys():
        last = acked.get(key)
        gone = bool(last and last.get("deleted"))
        if key not in after:
            assert gone or (key == busy and pending["verb"] == "delete"), f"session {key} is lost"
            continue
        assert not gone, f"session {key} was deleted and is back"
        turns, head = (last["turns"], last["head"]) if last else (len(before[key]), (before[key] or [(0,)])[-1][0])
        now = after[key]
        if key != busy:
            assert len(now) == turns, f"session {key}: {len(now)} turns, acknowledged {turns}"
            assert (now[-1][0] if now else 0) == head, f"session {key} ends elsewhere"
        elif pending["verb"] in ("append", "ask") and now:
            assert (now[turns - 1][0] if turns else 0) == head, f"session {key} lost an acknowledged turn"
            for (_, role, text), (want, said_text) in zip(now[turns:], pending["adds"], strict=False):
                assert (want, said_text or text) == (role, text), f"session {key} has a turn that nobody wrote"
            assert len(now) <= turns + len(pending["adds"])
        elif pending["verb"] == "rollback":
            assert len(now) in (turns, turns - 1)
        if last is None and key != busy:
            assert now == before[key], f"session {key} changed by itself"
    strange = after.keys() - before.keys() - acked.keys()
    assert len(strange) <= (pending.get("verb") in ("create", "fork")), f"sessions from nowhere: {strange}"
    return str(pending.get("verb", "idle" if said else "opening"))


def inspect(engine: Any, folder: Path, rng: random.Random, figures: Counter[str]) -> dict[str, History]:
    """Store and ledger are sound, and one session continues as if it had never been stored."""
    from ctxreuse_agents import Memory

    from ctxreuse.engines.sampling import SamplingParams
    from ctxreuse.errors import ContextTooLongError
    from ctxreuse.runtime import Runtime
    from ctxreuse.store import verify

    with Memory.open(folder, engine, capacity=64 << 20) as memory:
        memory.check()
        found = {session.id: history(session) for session in memory.sessions()}
        full = [key for key, turns in found.items() if turns]
        if full:
            key = rng.choice(full)
            fork = memory.session(key).fork()
            fork.user("And then?")
            prompt = fork.tokens(generate=True)
            text = engine.text.render(fork.messages(), generate=True)
            assert engine.text.decode(prompt, markers=True) == text, "the ids do not say what the text says"
            try:
                answer = fork.complete(**GREEDY)
            except ContextTooLongError:
                # A writer may append more than the model takes.
                assert len(prompt) >= engine.space.max_tokens
                figures["too_long"] += 1
            else:
                usage = answer.usage
                assert answer.text is not None
                room = engine.space.max_tokens - len(prompt)
                few = GREEDY | {"max_tokens": min(GREEDY["max_tokens"], room)}
                plain = Runtime(engine, None).complete(prompt, SamplingParams(**few))
                plain.drain()
                assert answer.tokens == plain.tokens, f"{answer.tokens} with the store, {plain.tokens} without"
                figures["continued"] += 1
                figures["prompt"] += usage.prompt_tokens
                figures["cached"] += usage.cached_tokens
            memory.delete(fork)
        figures["gc"] += memory.gc()
        memory.check()
    verdict = verify(folder)
    assert verdict.clean, verdict
    return found


def main(folder: Path, rounds: int, seed: int) -> None:
    import torch

    torch.set_num_threads(1)
    engine = tiny_engine()
    rng, figures, moments = random.Random(seed), Counter[str](), Counter[str]()
    known: dict[str, History] = {}
    for n in range(rounds):
        said = context(engine, folder, rng)
        figures["acknowledged"] += sum("done" in line for line in said)
        found = inspect(engine, folder, rng, figures)
        try:
            moments[judge(known, found, said)] += 1
        except AssertionError as error:
            raise AssertionError(f"round {n} of seed {seed}: {error}; said {said[-4:]}") from error
        known = found
    print(json.dumps({"rounds": rounds, "killed_in": moments, **figures}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
