"""SmolLM2 over documents in a new order: nearly all of it is reused, and the answer hardly differs."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ctxreuse_agents import Memory

from ctxreuse.calibrate import default_texts
from ctxreuse.engines import open_engine
from ctxreuse.runtime import Runtime
from ctxreuse.store import open_store

S: Any = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "runtime" / "shuffled.py")))
RULES = "Answer from these documents in one sentence, and say where it is written."
NEXT = " It is said in the second document, where the functions of the module are named."


def logs(engine: Any, live: Any, logits: Any, ids: list[int]) -> Any:
    """Log probabilities [n, vocab] of what follows, along ``ids``."""
    rows = [logits]
    for token in ids[:-1]:
        rows.append(engine.prefill(live, np.array([token], "<i4")))
    found = np.stack(rows).astype(np.float64)
    found -= found.max(1, keepdims=True)
    return found - np.log(np.exp(found).sum(1, keepdims=True))


@pytest.mark.model
def test_documents_in_a_new_order(tmp_path: Path) -> None:
    engine = open_engine("smollm2")
    text = engine.text
    assert text is not None
    cut = [text.encode(one)[:192] for one in default_texts()["held-out"][:3]]
    documents = [text.decode(ids).strip() for ids in cut]
    with open_store(tmp_path / "kv", capacity=1 << 30) as store:
        runtime = Runtime(engine, store, gate=S.gate(engine), live_bytes=0)
        with Memory.open(tmp_path / "m", runtime) as memory:

            def ask(order: list[str], lossy: str) -> Any:
                session = memory.create(lossy=lossy)
                session.system(RULES)
                answer = session.ask("What is it about?", documents=order, max_tokens=1)
                assert answer.text is not None
                memory.flush()
                prompt = memory.shared.engine()[1].prompt(session.turns()[:-1])
                return answer.usage, prompt

            ask(documents, "exact")
            usage, prompt = ask(documents[::-1], "kl-0.05")
            assert usage.cached_tokens > 0.9 * usage.prompt_tokens
            assert usage.moved > 0.8 * usage.prompt_tokens
            assert usage.gate == "kl-0.020 by rotate"

            follows = text.encode(NEXT).tolist()
            live = engine.start(len(prompt.ids) + 64)
            full = engine.prefill(live, prompt.ids)
            right = logs(engine, live, full, follows)
            off = {}
            for repair in ("rotate", "v-15%"):
                other = Runtime(engine, store, gate=S.gate(engine, (repair, 0.02)), live_bytes=0)
                done = other.prefill(prompt.ids, parts=prompt.cuts, lossy="kl-0.05", reserve=64)
                assert done.usage.moved + done.usage.mended == usage.moved
                moved = logs(engine, done.live, done.logits, follows)
                off[repair] = float((np.exp(right) * (right - moved)).sum(1).mean())
            # Without the documents it would be about 1.
            assert 1e-5 < off["v-15%"] < 0.1
            assert off["v-15%"] < off["rotate"] < 0.4

            exact = runtime.prefill(prompt.ids, parts=prompt.cuts)
            assert (exact.usage.moved, exact.usage.approx) == (0, False)
            np.testing.assert_allclose(exact.logits, full, atol=2e-3)
            memory.check()
        runtime.close()
