"""SmolLM2-135M: what a second process answers from the first one's KV is what it would have computed itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import patient

FIRST = """
import json, sys
from ctxreuse_agents import Memory

with Memory.open(sys.argv[1], engine="smollm2") as memory:
    session = memory.create("harbour")
    session.system("You answer from these notes. " + "The harbour master opens the lock at high water. " * 20)
    for question in ("When does the lock open?", "Who opens it?"):
        session.ask(question, max_tokens=12).text
    print(json.dumps(session.tokens().tolist()))
"""

SECOND = """
import json, sys
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse_agents import Memory

with Memory.open(sys.argv[1], engine="smollm2") as memory:
    session = memory.session("harbour", create=False)
    before = session.tokens().tolist()
    fork = session.fork()
    fork.user("And at low water?")
    prompt = fork.tokens(generate=True)
    answer = fork.complete(max_tokens=12)
    usage = answer.usage
    answer.text
    runtime = Runtime(memory.engine, None, RuntimeOptions(context_cache_bytes=0))
    alone = runtime.complete(runtime.request(prompt), SamplingParams(max_tokens=12))
    alone.drain()
    memory.check()
    print(json.dumps({"before": before, "stored": answer.tokens, "alone": alone.tokens, "cached": usage.cached_tokens,
                      "sources": usage.tokens.by_source, "prompt": usage.prompt_tokens}))
"""


def run(code: str, folder: Path, env: dict[str, str]) -> object:
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], env=env, capture_output=True, text=True, timeout=patient(240)
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.model
def test_a_fresh_process_continues_token_for_token(tmp_path: Path, child_env: dict[str, str]) -> None:
    tokens = run(FIRST, tmp_path / "m", child_env)
    second = run(SECOND, tmp_path / "m", child_env)
    assert isinstance(second, dict)
    assert second["before"] == tokens, "not one id was made anew"
    assert second["stored"] == second["alone"]
    assert second["sources"]["disk"] == second["cached"] >= len(second["before"]) // 64 * 64 - 64
    assert second["prompt"] - second["cached"] < 128
