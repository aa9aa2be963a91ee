"""Sessions over a model with sliding windows: forks from the end of a turn are resumed there, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import Memory, SamplingParams

from ctxreuse.runtime import Runtime, RuntimeOptions
from support.tiny_text import tiny_text

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def windows() -> Any:
    """A Gemma 3 of random weights whose local layers see 24 tokens, over the byte tokenizer."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    from ctxreuse.engines.torch_hf import TorchEngine

    torch.manual_seed(3)
    config = Gemma3TextConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=4096,
        bos_token_id=256,
        eos_token_id=257,
    )
    return TorchEngine(Gemma3ForCausalLM(config), tiny_text(), block_tokens=16)


def test_a_second_question_over_one_document_is_resumed(tmp_path: Path, windows: Any) -> None:
    questions = [f"{word} " * 20 for word in ("who", "where", "when")]
    plain = Runtime(windows, None, RuntimeOptions(context_cache_bytes=0))
    for _ in range(2):  # the second time in a new memory object, from disk
        with Memory.open(tmp_path, windows) as memory:
            document = memory.session("document")
            if not document.turns():
                document.system("A long document. " * 30)
            for i, question in enumerate(questions):
                answer = document.fork().ask(question, sampling=GREEDY)
                assert answer.text
                held = len(document.tokens()) // 16 * 16
                if i:
                    assert answer.usage.cached_tokens >= held
                fresh = document.fork()
                fresh.user(question)
                alone = plain.complete(fresh.tokens(generate=True), GREEDY)
                alone.drain()
                assert alone.tokens == answer.tokens
            assert memory.runtime is not None
            memory.runtime.context_cache.clear()
            memory.flush()
            memory.check()
