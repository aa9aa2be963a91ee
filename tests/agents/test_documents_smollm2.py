"""SmolLM2 over documents in a new order: nearly all of it is reused, and the answer hardly differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ctxreuse_agents import Memory

from ctxreuse.calibrate import default_texts
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import open_store
from support.shuffled import gate

RULES = "Answer from these documents in one sentence, and say where it is written."
NEXT = " It is said in the second document, where the functions of the module are named."


def logs(engine: Any, context: Any, logits: Any, ids: list[int]) -> Any:
    """Log probabilities [n, vocab] of what follows, along ``ids``."""
    rows = [logits]
    for token in ids[:-1]:
        rows.append(engine.prefill(context, np.array([token], "<i4")))
    found = np.stack(rows).astype(np.float64)
    found -= found.max(1, keepdims=True)
    return found - np.log(np.exp(found).sum(1, keepdims=True))


@pytest.mark.model
def test_documents_in_a_new_order(smollm2: Any, tmp_path: Path) -> None:
    engine, text = smollm2, smollm2.text
    assert text is not None
    reference = default_texts()["held-out"]["prose"][0]
    cut = [text.encode(reference[at : at + 2_000])[:192] for at in (10_000, 40_000, 70_000)]
    documents = [text.decode(ids).strip() for ids in cut]
    with open_store(tmp_path / "kv", capacity=1 << 30) as store:
        runtime = Runtime(engine, store, RuntimeOptions(gate=gate(engine), context_cache_bytes=0))
        with Memory.open(tmp_path / "m", runtime) as memory:

            def ask(order: list[str], max_kl: float) -> Any:
                session = memory.create(max_kl=max_kl)
                session.system(RULES)
                answer = session.ask("What is it about?", documents=order, max_tokens=1)
                assert answer.text is not None
                memory.flush()
                prompt = memory._state.engine()[1].prompt(session.turns()[:-1])
                return answer.usage, prompt

            ask(documents, 0.0)
            usage, prompt = ask(documents[::-1], 0.05)
            assert usage.cached_tokens > 0.9 * usage.prompt_tokens
            assert usage.tokens.relocated > 0.8 * usage.prompt_tokens
            assert usage.gate_decision == "kl-0.020 by rotate"

            follows = text.encode(NEXT).tolist()
            context = engine.new_context(len(prompt.ids) + 64)
            full = engine.prefill(context, prompt.ids)
            right = logs(engine, context, full, follows)
            off = {}
            for repair in ("rotate", "v-15%"):
                other = Runtime(engine, store, RuntimeOptions(gate=gate(engine, (repair, 0.02)), context_cache_bytes=0))
                done = other.prefill(other.request(prompt.ids, parts=prompt.cuts, max_kl=0.05), reserve=64)
                assert done.usage.tokens.relocated + done.usage.tokens.recomputed == usage.tokens.relocated
                moved = logs(engine, done.context, done.logits, follows)
                off[repair] = float((np.exp(right) * (right - moved)).sum(1).mean())
            # Without the documents it would be about 1.
            assert 1e-5 < off["v-15%"] < 0.1
            assert off["v-15%"] < off["rotate"] < 0.4

            exact = runtime.prefill(runtime.request(prompt.ids, parts=prompt.cuts))
            assert (exact.usage.tokens.relocated, exact.usage.approximate) == (0, False)
            np.testing.assert_allclose(exact.logits, full, atol=2e-3)
            memory.check()
        runtime.close()
