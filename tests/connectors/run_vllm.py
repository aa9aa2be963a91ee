"""An offline vLLM that answers lines of JSON: ``python run_vllm.py OPTIONS`` in the environment that has vLLM.

A line is a list of prompts for one batch: {"tokens": [...], "salt": "", "new": 8}; with "hints", an envelope of KV
hints, they come one after another, as what is built on vLLM's engine hands them over. With "whole" the answer has the
log-probabilities of all tokens at each step, by id, for which ``max_logprobs`` must be -1. The answer is a line that
begins with ANSWER, with ids, log-probabilities and cached tokens of each; its first one says that the engine is ready.
With ``disable_log_stats`` false the first of a batch also says how many requests were preempted so far.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def answered(llm: Any, wanted: list[dict[str, Any]], prompts: list[Any], sampling: list[Any]) -> list[Any]:
    if not any(one.get("hints") for one in wanted):
        return list(llm.generate(prompts, sampling, use_tqdm=False))
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    done: list[Any] = []
    for number, (one, prompt, params) in enumerate(zip(wanted, prompts, sampling)):
        given = one["hints"]
        hints = KvHintsEnvelope(**{**given, "actions": [KvHintAction(**action) for action in given["actions"]]})
        params.output_kind = RequestOutputKind.FINAL_ONLY
        llm.llm_engine.add_request(f"hinted {number}", prompt, params, kv_hints=hints)
        while llm.llm_engine.has_unfinished_requests():
            done += llm.llm_engine.step()
    return done


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.triton_utils import dispatcher

    # Its scan of all modules ends with an error at an object of cffi that LMCache's have.
    dispatcher.vars = lambda value: value.__dict__ if isinstance(value.__dict__, dict) else {}

    options = json.loads(sys.argv[1])
    llm = LLM(**options)
    print("ANSWER", json.dumps("ready"), flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        prompts = [
            {"prompt_token_ids": one["tokens"], **({"cache_salt": one["salt"]} if one.get("salt") else {})}
            for one in wanted
        ]
        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=one.get("new", 8),
                ignore_eos=True,
                logprobs=-1 if one.get("whole") else 0,
            )
            for one in wanted
        ]
        answers = [
            {
                "ids": list(done.outputs[0].token_ids),
                "logprobs": [next(iter(step.values())).logprob for step in done.outputs[0].logprobs],
                "cached": done.num_cached_tokens,
                "whole": [[step[i].logprob for i in range(len(step))] for step in done.outputs[0].logprobs]
                if one.get("whole")
                else [],
            }
            for one, done in zip(wanted, answered(llm, wanted, prompts, sampling))
        ]
        if options.get("disable_log_stats") is False:  # vLLM counts only if it logs
            found = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"]
            answers[0]["preempted"] = sum(found)
        print("ANSWER", json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
