"""A tiny random-weight Llama and a tiny Gemma 3 with sliding windows, as engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from ctxreuse.engines.torch_hf import TorchEngine

BLOCK = 16
VOCAB = 256


def _llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def _gemma() -> Any:
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=VOCAB,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=16,
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            max_position_embeddings=512,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def make_engine(kind: str, seed: int = 0) -> TorchEngine:
    torch.manual_seed(seed)
    model = {"llama": _llama, "gemma": _gemma}[kind]()
    return TorchEngine(model, block_tokens=BLOCK, chunk=64)


@pytest.fixture(scope="session")
def llama() -> TorchEngine:
    return make_engine("llama")


@pytest.fixture(scope="session")
def gemma() -> TorchEngine:
    return make_engine("gemma")


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest, llama: TorchEngine, gemma: TorchEngine) -> TorchEngine:
    return {"llama": llama, "gemma": gemma}[request.param]


@pytest.fixture(scope="session")
def other_llama() -> TorchEngine:
    """The same architecture with other weights: another model space."""
    return make_engine("llama", seed=1)
