"""A vLLM that the bench `vllm` times: ``python vllm_child.py SETTINGS`` in an environment that has vLLM.

Scheduler and worker share this process and one compute thread, so that its processor time is that of a request. It says
READY, then answers each line, [prompt's name, shared tokens, request], with seconds, processor seconds and first token.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

__all__ = ["main"]

#: Fresh tokens behind the shared ones.
FRESH = 32


def main(settings: dict[str, Any]) -> None:
    """Answer lines of standard input."""
    from vllm import LLM, SamplingParams
    from vllm.triton_utils import dispatcher

    # Its scan of all modules ends with an error at an object of cffi that LMCache's have.
    dispatcher.vars = lambda value: value.__dict__ if isinstance(value.__dict__, dict) else {}

    engine = LLM(**settings)
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def ask(tokens: list[int]) -> int:
        (done,) = engine.generate([{"prompt_token_ids": tokens}], one, use_tqdm=False)
        return int(done.outputs[0].token_ids[0])

    ask([5] * 64)
    print("READY", flush=True)
    for line in sys.stdin:
        name, length, request = json.loads(line)
        shared, fresh = random.Random(f"{name} {length}"), random.Random(f"{name} {length} {request}")
        tokens = [shared.randrange(100, 40_000) for _ in range(length)]
        tokens += [fresh.randrange(100, 40_000) for _ in range(FRESH)]
        wall, processor = time.perf_counter(), time.process_time()
        first = ask(tokens)
        seconds = time.perf_counter() - wall, time.process_time() - processor
        print("SECONDS", json.dumps([*seconds, first]), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
