"""Generate with a model whose KV outlives the process: run it twice, and the second run computes next to nothing.

    python examples/generate.py [FOLDER [MODEL]]

Later prompts reuse what earlier ones computed, as far as they begin alike; the answer says how much, and from where.
"""

from __future__ import annotations

import sys
import tempfile

from ctxreuse import LLM, SamplingParams

MANUAL = "The lamp turns once in twenty seconds. Its clockwork is wound every four hours, at dusk first. " * 12
QUESTIONS = ("How often does the lamp turn?", "When is the clockwork wound first?")


def main(folder: str, model: str = "smollm2") -> None:
    with LLM(model, store=folder) as llm:
        prompts = [f"{MANUAL}\nQuestion: {question}\nAnswer:" for question in QUESTIONS]
        for question, answer in zip(QUESTIONS, llm.generate(prompts, SamplingParams(max_tokens=12))):
            tokens, seconds = answer.usage.tokens, answer.usage.seconds.total
            print(f"{question}\n  {answer.text.strip()}")
            print(f"  {tokens.cached} of {tokens.prompt} tokens reused {tokens.by_source}, {seconds:.2f} s")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(*sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
