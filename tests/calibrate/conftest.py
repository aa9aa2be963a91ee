"""Tiny models with random weights and a tokenizer of bytes, as gauges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from ctxreuse.calibrate import Settings, Target, Texts, default_texts
from ctxreuse.engines.text import HFText
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.engines.torch_hf.fisher import TorchCalibrationModel

_BASE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _model(name: str) -> Any:
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**_BASE, num_hidden_layers=2))
    if name == "yarn":  # scales what it rotates
        rope = {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "attention_factor": 1.25,
        }
        return hf.LlamaForCausalLM(hf.LlamaConfig(**_BASE, num_hidden_layers=2, rope_parameters=rope))
    if name == "gemma3":
        types = ["sliding_attention", "full_attention", "sliding_attention"]
        config = hf.Gemma3TextConfig(
            **_BASE,
            head_dim=16,
            num_hidden_layers=3,
            sliding_window=24,
            layer_types=types,
            query_pre_attn_scalar=16,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        )
        return hf.Gemma3ForCausalLM(config)
    if name == "cohere":  # pairs of neighbours turn together
        return hf.CohereForCausalLM(hf.CohereConfig(**_BASE, num_hidden_layers=2))
    if name == "falconh1":
        mamba = {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 32,
        }
        return hf.FalconH1ForCausalLM(hf.FalconH1Config(**_BASE, **mamba, num_hidden_layers=2))
    if name == "gpt2":  # positions are learnt vectors, nothing turns
        config = hf.GPT2Config(
            vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=512, bos_token_id=0, eos_token_id=0
        )
        return hf.GPT2LMHeadModel(config)
    raise KeyError(name)


@pytest.fixture(scope="session")
def text() -> HFText:
    """One token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return HFText(tokenizer)


@pytest.fixture(scope="session")
def engine_of(text: HFText) -> Callable[[str], TorchEngine]:
    """engine_of(name, **options) -> an engine on a tiny model, the same weights each time."""

    def make(name: str, **options: Any) -> TorchEngine:
        torch.manual_seed(7)
        model = _model(name).eval()
        for parameter in model.parameters():  # transformers' initial weights give nearly equal scores
            if parameter.ndim > 1:
                parameter.data.mul_(4)
        return TorchEngine(model, text, block_tokens=16, **options)

    return make


@pytest.fixture(scope="session")
def gauge_of(engine_of: Callable[[str], TorchEngine]) -> Callable[[str], TorchCalibrationModel]:
    """gauge_of(name) -> a gauge on such an engine."""
    return lambda name: TorchCalibrationModel(engine_of(name))


@pytest.fixture(scope="session")
def texts() -> Texts:
    """What `ctxreuse calibrate` uses by default; parsing the library takes a second."""
    return default_texts()


@pytest.fixture(scope="session")
def settings() -> Settings:
    """Little text, for seconds."""
    counts: Any = {"calibration": 5, "validation": 3, "held-out": 3}
    return Settings(counts, prefix=96, scored=24, targets=(Target(0.05, 0.012), Target(0.01), Target(0.05, joint=True)))
