"""Keys and matching of a long context that is held: what every request pays before anything else happens."""

from __future__ import annotations

import hashlib

import numpy as np

from ctxreuse.bench.measure import Options, paired
from ctxreuse.bench.report import Figure
from ctxreuse.identity.keys import ROOT, Tokens, as_tokens, prefix_keys, tenant_salt
from ctxreuse.tree import ContextTree

__all__ = ["run"]

_TOKENS, _BLOCK = 131_072, 64
_SPACE, _SALT = hashlib.sha256(b"bench").digest(), tenant_salt("bench")


def _filled(keys: list[bytes]) -> ContextTree:
    tree, parent = ContextTree(), ROOT
    for key in keys:
        tree.insert(key, parent, _BLOCK, 1 << 20)
        parent = key
    return tree


def _node_bytes(blocks: int) -> float:
    tree = _filled([i.to_bytes(32, "little") for i in range(blocks)])
    return tree.memory / len(tree)


def _one_hash(tokens: Tokens) -> None:
    hashlib.sha256(tokens.tobytes()).digest()


def run(options: Options) -> list[Figure]:
    """One context of 131,072 tokens in blocks of 64, all of it held."""
    tokens = as_tokens(np.random.default_rng(0).integers(0, 49_152, _TOKENS))
    keys = prefix_keys(_SPACE, _SALT, tokens, _BLOCK)
    tree, held = _filled(keys), set(keys)
    options.step("hash and match 131,072 tokens")
    times = paired(
        {
            "both": lambda: tree.match(prefix_keys(_SPACE, _SALT, tokens, _BLOCK)),
            "hash": lambda: prefix_keys(_SPACE, _SALT, tokens, _BLOCK),
            "match": lambda: tree.match(keys),
            "set": lambda: held.issuperset(keys),
            "bound": lambda: _one_hash(tokens),
            "insert": lambda: _filled(keys),
        },
        rounds=options.pick(9, 51),
        warm=3,
    )
    ms = {name: spent * 1e3 for name, spent in times.items()}
    blocks = len(keys)
    options.step("memory of the tree")
    bound = "bound: one SHA-256 over the same token ids"
    return [
        Figure(
            metric="hash_and_match", value=ms["both"], unit="ms", bound=ms["bound"], better="lower", bar=10, note=bound
        ),
        Figure(metric="hash", value=ms["hash"], unit="ms", bound=ms["bound"], better="lower"),
        Figure(
            metric="match",
            value=ms["match"],
            unit="ms",
            bound=ms["set"],
            better="lower",
            note="bound: the same keys looked up in a Python set by one C call",
        ),
        Figure(metric="insert", value=blocks / times["insert"], unit="blocks/s"),
        Figure(metric="memory", value=_node_bytes(options.pick(20_000, 200_000)), unit="bytes/block", better="lower"),
    ]
