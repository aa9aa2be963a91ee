"""Models small enough to start an engine on them often."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of three layers, whose answers hang on all of a prompt."""
    import torch
    import transformers as hf

    torch.manual_seed(7)
    config = hf.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, pad_token_id=0,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config)
    for parameter in model.parameters():  # transformers' initial weights give nearly equal logits
        if parameter.ndim > 1:
            parameter.data.mul_(3)
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2 as a Hugging Face folder."""
    from ctxreuse import models

    return Path(models.resolve("smollm2"))
