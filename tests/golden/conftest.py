"""What version 0.1.0 left behind, unpacked; and the models that wrote it, weights and all."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DATA = Path(__file__).with_name("data")


@pytest.fixture
def unpacked(tmp_path: Path) -> Callable[[str], Path]:
    """A fresh copy of a packed folder."""

    def unpack(name: str) -> Path:
        with tarfile.open(DATA / f"{name}.tar.xz") as tar:
            tar.extractall(tmp_path / name, filter="data")
        return tmp_path / name

    return unpack


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings and no cards of this user."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("CTXREUSE_CARDS", str(tmp_path / "cards"))


@pytest.fixture(scope="session")
def models() -> Iterator[dict[str, Any]]:
    """The engines that computed what is in the store: one of full layers, one of windows."""
    import torch
    import transformers

    known = json.loads((DATA / "stores/edge.json").read_text("utf-8"))["transformers"]
    if transformers.__version__ != known:
        pytest.skip(f"a model's space depends on transformers; the store was written with {known}")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {"llama": tiny_llama(), "gemma": tiny_gemma()}
    torch.set_num_threads(before)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def fill_weights(model: Any) -> Any:
    """Numbers that every machine makes alike."""
    import torch

    with torch.no_grad():
        for at, (_, parameter) in enumerate(sorted(model.named_parameters())):
            flat = (np.arange(parameter.numel(), dtype=np.int64) * 7919 + 104729 * (at + 1)) % 2003
            wide = 0.6 if parameter.ndim > 1 else 0.0
            numbers = (1.0 - wide / 0.6) + wide * (flat / 2003 - 0.5)
            parameter.copy_(torch.from_numpy(numbers.astype(np.float32).reshape(parameter.shape)))
        model.lm_head.weight[256] = 0
    return model.eval()


def tiny_text() -> Any:
    """One token a byte, and the two marks of ChatML."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from ctxreuse.engines.text import HFText

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return HFText(tokenizer, template=CHATML, stop_ids=frozenset({257}))


SIZES = {
    "vocab_size": 258, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 2048, "bos_token_id": 256, "eos_token_id": 257,
    "pad_token_id": 257, "tie_word_embeddings": False,
}  # fmt: skip


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    from ctxreuse.engines.torch_hf import TorchEngine

    return TorchEngine(fill_weights(LlamaForCausalLM(LlamaConfig(**SIZES))), tiny_text(), block_tokens=16)


def tiny_gemma() -> Any:
    """Two windows around a layer that keeps all tokens: it needs states."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    from ctxreuse.engines.torch_hf import TorchEngine

    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(**{**SIZES, "num_hidden_layers": 3}, head_dim=8, sliding_window=24, layer_types=types,
                              query_pre_attn_scalar=8)  # fmt: skip
    return TorchEngine(fill_weights(Gemma3ForCausalLM(config)), tiny_text(), block_tokens=16)
