"""Keys, salts and digests of spaces are what version 0.1.0 made of the same input: else nothing stored is found."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from ctxreuse.codec import model_digest
from ctxreuse.identity.keys import ROOT, as_tokens, chunk_key, chunk_keys, prefix_key, prefix_keys, tenant_salt
from ctxreuse.identity.model import ModelSpace

GIVEN = json.loads(Path(__file__).with_name("data").joinpath("keys.json").read_text("utf-8"))


@pytest.mark.parametrize("given", GIVEN["spaces"], ids=lambda given: given["fields"]["architecture"])
def test_spaces(given: dict[str, object]) -> None:
    space = msgspec.msgpack.decode(bytes.fromhex(str(given["msgpack"])), type=ModelSpace)
    assert space.digest.hex() == given["digest"]
    assert model_digest(space).hex() == given["model"]
    assert msgspec.msgpack.encode(space).hex() == given["msgpack"]
    assert msgspec.convert(given["fields"], ModelSpace) == space


def test_salts() -> None:
    for given in GIVEN["salts"]:
        assert tenant_salt(given["tenant"], bytes.fromhex(given["secret"])).hex() == given["salt"]


def test_keys() -> None:
    space, salt = bytes.fromhex(GIVEN["spaces"][0]["digest"]), bytes.fromhex(GIVEN["salt"])
    tokens, spans = as_tokens(GIVEN["tokens"]), [tuple(span) for span in GIVEN["spans"]]
    assert ROOT.hex() == GIVEN["root"]
    assert [key.hex() for key in prefix_keys(space, salt, tokens, GIVEN["block_tokens"])] == GIVEN["prefix_keys"]
    assert prefix_key(space, salt, bytes(range(32)), tokens[:5]).hex() == GIVEN["after_parent"]
    assert [key.hex() for key in chunk_keys(space, salt, tokens, spans)] == GIVEN["chunk_keys"]
    assert chunk_key(space, salt, tokens[3:19]).hex() == GIVEN["chunk_key"]
