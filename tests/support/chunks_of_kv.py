"""KV like that of a small model, as chunks of LMCache, and the profile of that model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from ctxreuse_cloud.connectors.chunks.place import join_planes

from ctxreuse.block.format import BlockWriter, block_layout, parse
from ctxreuse.codec import CodecProfile, ProfileStore, write_profile
from ctxreuse.identity.keys import ROOT
from ctxreuse.identity.model import LayerSpec, ModelSpace
from ctxreuse.kernels.convert import from_float32
from ctxreuse.rope import Rotary
from ctxreuse.testing.profiles import plain_profile

__all__ = ["DIM", "HEADS", "LAYERS", "MODEL", "chunk_of", "keep_profile", "kv", "shape_of"]

LAYERS, HEADS, DIM, THETA = 3, 2, 32, 10_000.0
MODEL = "tiny"
SPACE = ModelSpace(
    weights="w", architecture="tiny", tokenizer="t", dtype="float32", rope="{}", vocab_size=512, max_tokens=1 << 17,
    layers=(LayerSpec("full", HEADS, DIM, DIM),) * LAYERS,
)  # fmt: skip

Floats = npt.NDArray[np.float32]


def kv(position: int, tokens: int, seed: int = 1) -> tuple[Floats, Floats]:
    """K and V [layers, heads, tokens, dim] of tokens from ``position`` on: K has a mean before it is rotated."""
    means = np.random.default_rng(5).normal(size=(2, LAYERS, HEADS, 1, DIM))
    noise = np.random.default_rng([seed, position]).normal(size=(2, LAYERS, HEADS, tokens, DIM))
    k, v = (means + 0.5 * noise).astype(np.float32)
    rope = Rotary("half", tuple(THETA ** (-2.0 * i / DIM) for i in range(DIM // 2)))
    return rope.rotate(k, np.arange(position, position + tokens)), v


def keep_profile(folder: Path, *, seed: int = 1, name: str = MODEL, joint: bool = False) -> CodecProfile:
    """Make the model's profile from KV of its own, keep it as calibration does, and return it."""
    views = []
    for at in range(0, 512, 64):
        writer = BlockWriter(
            block_layout(SPACE), kind="block", space=SPACE.digest, key=bytes(32), parent=ROOT, end=at + 64,
            tokens=np.zeros(64, np.int32), rope_at=at,
        )  # fmt: skip
        for role, planes in zip("kv", kv(at, 64, seed)):
            for layer, plane in enumerate(planes):
                writer.plane(layer, role)[:] = plane.view(np.uint8).reshape(-1)
        views.append(parse(writer.seal()))
    made = plain_profile(SPACE, views, theta=lambda _: THETA, joint=joint)
    profile = msgspec.structs.replace(made, notes={"model": name, "seed": str(seed)})
    ProfileStore(folder).add(write_profile(profile))
    return profile


def shape_of(halves: int, tokens: int) -> tuple[int, ...]:
    return halves, LAYERS, tokens, (3 - halves) * HEADS * DIM


def chunk_of(
    planes: Sequence[Floats], dtype: str = "float32", *, halves: int = 1, page: int = 0
) -> npt.NDArray[np.uint8]:
    """The bytes of a chunk with these K and V."""
    k, v = (from_float32(np.ascontiguousarray(each), dtype) for each in planes)
    chunk: Any = np.empty(shape_of(halves, k.shape[2]), k.dtype)
    join_planes(k, v, chunk, page)
    return np.asarray(chunk.reshape(-1).view(np.uint8))


def key_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
