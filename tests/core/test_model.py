"""The digest of a model space: stable over releases, different for every difference."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ctxreuse.errors import ConfigError
from ctxreuse.identity.model import LayerSpec, ModelSpace

FULL = LayerSpec("full", kv_heads=3, k_dim=64, v_dim=64)
SPACE = ModelSpace(
    weights="ab" * 32,
    architecture="LlamaForCausalLM",
    tokenizer="cd" * 32,
    dtype="float32",
    layers=(FULL, FULL),
    rope='{"rope_theta":100000}',
    vocab_size=49152,
    max_tokens=8192,
)


def test_golden_digest() -> None:
    # A changed digest makes every stored block a miss: if this must change, raise the schema version and say so.
    assert SPACE.digest.hex() == "58104c8e089d99059727873939e24ac875be7182a7a3c76e2b1a1b59cfd44140"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", "ac" * 32),
        ("architecture", "Llama"),
        ("tokenizer", "ce" * 32),
        ("dtype", "float16"),
        ("layers", (FULL,)),
        ("layers", (FULL, LayerSpec("full", kv_heads=3, k_dim=64, v_dim=32))),
        ("layers", (FULL, LayerSpec("full", kv_heads=3, k_dim=32, v_dim=64))),
        ("layers", (FULL, LayerSpec("full", kv_heads=4, k_dim=64, v_dim=64))),
        ("layers", (FULL, LayerSpec("sliding", kv_heads=3, k_dim=64, v_dim=64))),
        ("layers", (FULL, LayerSpec("full", kv_heads=3, k_dim=64, v_dim=64, window=512))),
        ("rope", '{"rope_theta":10000}'),
        ("vocab_size", 49153),
        ("max_tokens", 4096),
        ("block_tokens", 32),
        ("attention", "eager"),
    ],
)
def test_every_field_matters(field: str, value: Any) -> None:
    other = msgspec.structs.replace(SPACE, **{field: value})
    assert other.digest != SPACE.digest
    assert len(other.digest) == 32


def test_every_field_is_tried() -> None:
    tried = {mark.args[1][i][0] for mark in test_every_field_matters.pytestmark for i in range(len(mark.args[1]))}  # type: ignore[attr-defined]
    assert tried == {field.name for field in msgspec.structs.fields(ModelSpace)}


def test_equal_fields_give_equal_digests() -> None:
    assert msgspec.structs.replace(SPACE).digest == SPACE.digest


def test_what_layers_keep() -> None:
    linear = LayerSpec("linear")
    hybrid = LayerSpec("hybrid", kv_heads=1, k_dim=8, v_dim=8)
    assert not SPACE.needs_state
    assert msgspec.structs.replace(SPACE, layers=(FULL, linear)).needs_state
    assert SPACE.token_nbytes == 2 * 3 * (64 + 64) * 4
    mixed = msgspec.structs.replace(SPACE, layers=(FULL, hybrid, linear, LayerSpec("none")), dtype="bfloat16")
    assert mixed.token_nbytes == (3 * 128 + 16) * 2
    assert [layer.blocked for layer in mixed.layers] == [True, True, False, False]
    assert [layer.stateful for layer in mixed.layers] == [False, True, True, False]


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "int8"), ("block_tokens", 0), ("block_tokens", 4097), ("layers", ())]
)
def test_impossible_spaces(field: str, value: Any) -> None:
    with pytest.raises(ConfigError):
        msgspec.structs.replace(SPACE, **{field: value})
