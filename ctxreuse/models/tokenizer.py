"""Builds tokenizer.json and tokenizer_config.json from the vocabulary inside a GGUF."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxreuse.errors import FormatError

__all__ = ["write_tokenizer"]

# Token kinds of the GGUF specification (tokenizer.ggml.token_type).
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6


def write_tokenizer(meta: Mapping[str, Any], folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into `folder`.

    `meta` holds the GGUF's metadata by key. Byte-level BPE (``gpt2`` with the ``smollm`` splits) and SentencePiece
    BPE (``llama``) are known; anything else raises FormatError, as does a vocabulary that contradicts itself.
    """
    try:
        tokens: list[str] = list(meta["tokenizer.ggml.tokens"])
        kinds: list[int] = list(meta["tokenizer.ggml.token_type"])
        model, pre = meta["tokenizer.ggml.model"], meta.get("tokenizer.ggml.pre", "default")
    except (KeyError, TypeError) as error:
        raise FormatError(f"the GGUF holds no usable vocabulary: {error}") from error
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise FormatError("the GGUF's vocabulary has doubled tokens or kinds that do not match")
    build = _BUILDERS.get((model, pre))
    if build is None:
        raise FormatError(f"tokenizer {model!r} with pre-tokenizer {pre!r} is not known")
    from tokenizers import AddedToken

    tokenizer = build(meta, tokens, kinds)
    special = [token for token, kind in zip(tokens, kinds) if kind == _CONTROL]
    plain = [token for token, kind in zip(tokens, kinds) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    if tokenizer.get_vocab_size(with_added_tokens=True) != len(tokens):
        raise FormatError("the GGUF's added tokens do not fit its vocabulary")
    names = {
        role: _token(meta, tokens, key)
        for role, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        )
    }
    if meta.get("tokenizer.ggml.add_bos_token") and names["bos_token"] is not None:
        from tokenizers.processors import TemplateProcessing

        bos = names["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        # The generic class: transformers' own Llama class would put its splits in place of the ones written here.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{role: token for role, token in names.items() if token is not None},
    }
    if isinstance(length := _context(meta), int):
        settings["model_max_length"] = length
    if template := meta.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False, indent=2) + "\n", "utf-8")


def _token(meta: Mapping[str, Any], tokens: Sequence[str], key: str) -> str | None:
    index = meta.get(f"tokenizer.ggml.{key}")
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise FormatError(f"tokenizer.ggml.{key} = {index!r} lies outside the vocabulary")
    return tokens[index]


def _context(meta: Mapping[str, Any]) -> object:
    return meta.get(f"{meta.get('general.architecture')}.context_length")


def _byte_level(meta: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(text.split(" ")) for text in meta.get("tokenizer.ggml.merges", ())]
    try:
        bpe = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    except Exception as error:  # the Rust side raises bare Exception for a merge outside the vocabulary
        raise FormatError(f"the GGUF's merges do not fit its vocabulary: {error}") from error
    tokenizer = Tokenizer(bpe)
    # SmolLM2 was trained with every digit on its own; without this split, blanks before digits come out wrong.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(meta: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    scores = list(meta.get("tokenizer.ggml.scores", ()))
    if len(scores) != len(tokens):
        raise FormatError("the GGUF's vocabulary has no score for each token")
    unknown = _token(meta, tokens, "unknown_token_id")
    bpe = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=_merges(tokens, kinds, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    blanks: list[Any] = [normalizers.Replace(" ", "▁")]
    if meta.get("tokenizer.ggml.add_space_prefix", True):
        blanks.insert(0, normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence(blanks)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _merges(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Merges in the order in which SentencePiece would apply them: the best score of the joined token first.

    Control, user-defined and byte tokens never come out of a merge: they are cut out of the text before.
    """
    whole = {token for token, kind in zip(tokens, kinds) if kind not in (_CONTROL, _USER_DEFINED, _BYTE)}
    order = sorted(range(len(tokens)), key=lambda index: (-scores[index], index))
    return [
        (token[:cut], token[cut:])
        for token in (tokens[index] for index in order)
        if token in whole
        for cut in range(1, len(token))
        if token[:cut] in whole and token[cut:] in whole
    ]


_BUILDERS: dict[tuple[str, str], Callable[[Mapping[str, Any], Sequence[str], Sequence[int]], Any]] = {
    ("gpt2", "smollm"): _byte_level,
    ("llama", "default"): _sentencepiece,
}
