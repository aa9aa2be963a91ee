"""A vLLM that the bench `vllm` times: ``python vllm_child.py SETTINGS`` in an environment that has vLLM.

Scheduler and worker share this process and one compute thread, so that its processor time is that of a request. It says
READY, then answers each line, a list of lengths and of how many requests each, with a line of seconds, processor
seconds and first tokens.
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
        seed, lengths, count = json.loads(line)
        found = []
        for length in lengths:
            made = random.Random(f"{seed} {length}")
            shared = [made.randrange(100, 40_000) for _ in range(length)]
            rows = []
            for _ in range(count):
                tokens = shared + [made.randrange(100, 40_000) for _ in range(FRESH)]
                wall, processor = time.perf_counter(), time.process_time()
                first = ask(tokens)
                rows.append((time.perf_counter() - wall, time.process_time() - processor, first))
                time.sleep(0.2)  # what is saved behind a request's back is no part of the next one
            found.append(rows)
        print("SECONDS", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
