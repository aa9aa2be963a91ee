"""A Llama with random weights, a tokenizer of bytes and a ChatML template: a real engine, quick as a fake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_text(template: str = CHATML) -> Any:
    """One token a byte, and the two marks of ChatML."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from ctxreuse.engines.text import HFText

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return HFText(tokenizer, template=template, stop_ids=frozenset({257}))


def merging_text(template: str | None = None) -> Any:
    """As `tiny_text`, and some tokens of several characters, which reach over the ends of lines and words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from ctxreuse.engines.text import HFText

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("o", "n"), ("on", "e"), ("t", "w"), ("tw", "o"), ("Ċ", "Ċ"), ("Ċ", "o"), ("Ċ", "on"), ("Ċ", "t")]
    merges += [("ĊĊ", "n"), ("ĊĊ", "t"), ("ĊĊ", "one")]
    vocab = {piece: i for i, piece in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return HFText(tokenizer, template=template or CHATML)


def tiny_model(seed: int = 7, positions: int = 2048, **other: Any) -> Any:
    """Two layers of width 32; weights wide enough that greedy answers vary. ``other``: settings that differ."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
        "initializer_range": 0.3,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 257,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**settings | other)).eval()
    with torch.no_grad():
        model.lm_head.weight[256] = 0  # a greedy answer never begins a turn inside itself, so its ids spell its text
    return model


def save_model(folder: Path, *, seed: int = 7, positions: int = 2048, **other: Any) -> Path:
    """Write `tiny_model` with the tokenizer and template of `tiny_text` as a Hugging Face folder."""
    tiny_model(seed, positions, **other).save_pretrained(folder)
    tiny_text()._tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tiny_engine(template: str = CHATML, *, seed: int = 7, positions: int = 2048, **options: Any) -> Any:
    """The engine over both; equal arguments give an equal model space."""
    from ctxreuse.engines.torch_hf import TorchEngine

    return TorchEngine(tiny_model(seed, positions), tiny_text(template), **options)
