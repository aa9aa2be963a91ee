"""A world without a model: prompts whose blocks say of each row what it was computed for, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from ctxreuse.block.format import BlockWriter, block_layout
from ctxreuse.block.levels import EXACT, approx, limit_of
from ctxreuse.identity.keys import ROOT, Tokens, as_tokens, prefix_keys, tenant_salt
from ctxreuse.identity.model import LayerSpec
from ctxreuse.reuse.chunking import chunks
from ctxreuse.reuse.plan import ChunkRun, forget, plan, read, record, used
from ctxreuse.store import Store
from support import made_up

SPACE = msgspec.structs.replace(
    made_up.SPACE, layers=(LayerSpec("full", 1, 2, 2),), vocab_size=1 << 20, max_tokens=1 << 20, block_tokens=16
)


class Asked(NamedTuple):
    """What one prompt met: tokens of its exact prefix, runs that were moved, and spans that were computed."""

    prefix: int
    runs: list[ChunkRun]
    computed: list[tuple[int, int]]

    @property
    def moved(self) -> int:
        return sum(run.end - run.start for run in self.runs)


class World:
    """Prompts over one store, as a runtime would bring them: the prefix, then runs from elsewhere, then the rest.

    K of a row is (token id, position at which it was computed, how many times it was moved), V the prompt's number.
    """

    space = SPACE

    def __init__(self, store: Store, level: str = "kl-0.05") -> None:
        self.store, self.level = store, level
        self.salt = tenant_salt("test")
        self.prompts = 0

    def keys(self, tokens: Tokens) -> list[bytes]:
        return prefix_keys(self.space.digest, self.salt, tokens, self.space.block_tokens)

    def plan(
        self, tokens: Tokens, start: int = 0, parts: Sequence[int] = (), max_kl: float | None = 0.05
    ) -> list[ChunkRun]:
        return plan(self.store, self.salt, self.space, tokens, start, parts, max_kl)

    def ask(self, tokens: Tokens, parts: Sequence[int] = (), max_kl: float | None = 0.05) -> Asked:
        """One prompt from beginning to end; checks that every row that is reused is what it should be."""
        self.prompts += 1
        size, keys = self.space.block_tokens, self.keys(tokens)
        self.store.on_lookup(keys, size)
        held = self.store.match(keys[: (len(tokens) - 1) // size], max_kl).tokens
        rows = np.zeros((len(tokens), 4), np.float32)
        rows[:, 0], rows[:, 1], rows[:, 3] = tokens, np.arange(len(tokens)), self.prompts
        levels = np.zeros(len(tokens), bool)
        with self.store.read(max_kl) as reader:
            for i in range(held // size):
                view = reader.block(keys[i], tokens[i * size : (i + 1) * size], self.space.digest)
                assert view is not None
                rows[i * size : (i + 1) * size] = self.rows(view)
                levels[i * size : (i + 1) * size] = view.header.level != EXACT
            runs = self.plan(tokens, held, parts, max_kl) if max_kl is not None else []
            done: list[ChunkRun] = []
            for run in runs:
                pieces = read(reader, run, tokens, self.space)
                if pieces is None:
                    forget(self.store.chunks, run)
                    continue
                found = np.concatenate([self.rows(view)[row : row + count] for view, row, count in pieces])
                assert (found[:, 0] == tokens[run.start : run.end]).all(), "other tokens"
                assert (found[:, 2] == 0).all(), "rows that were moved already"
                assert (found[:, 1] == np.arange(run.start, run.end) - run.shift).all(), "not where they stood"
                assert (run.kind == "head") == (found[0, 1] == 0)
                found[:, 2] += 1
                rows[run.start : run.end] = found
                done.append(run)
        used(self.store, done)
        spans = complement(held, len(tokens), done)
        below = held if not done else min(held, done[0].start)
        at = done[0].start if done else len(tokens)
        levels[at:] = True
        put = self.put(
            keys, tokens, rows, levels, held // size, upto=max((b for a, b in spans if b - a >= 64), default=held)
        )
        exact = [(0, below)] if not levels[:below].any() else []
        record(self.store.chunks, self.salt, self.space, tokens, keys[:put], chunks(tokens, parts), [*exact, *spans])
        self.store.flush()  # what waits in a queue is not to be seen in the next prompt by chance only
        return Asked(held, done, spans)

    def put(self, keys: list[bytes], tokens: Tokens, rows: np.ndarray, lossy: np.ndarray, first: int, upto: int) -> int:
        """Blocks up to position ``upto``, and a little further as blocks are whole; returns how many are stored."""
        size = self.space.block_tokens
        for i in range(first, len(keys)):
            if i * size >= upto:
                return i
            here = slice(i * size, (i + 1) * size)
            level = approx(self.level) if lossy[here].any() else EXACT
            writer = BlockWriter(
                block_layout(self.space),
                kind="block",
                space=self.space.digest,
                key=keys[i],
                parent=keys[i - 1] if i else ROOT,
                end=(i + 1) * size,
                tokens=tokens[here],
                level=level,
                rope_at=i * size,
            )
            for role, columns in (("k", rows[here, :2]), ("v", rows[here, 2:])):
                writer.plane(0, role)[:] = np.ascontiguousarray(columns).view(np.uint8).ravel()
            if not self.store.put(keys[i], writer.seal(), max_kl=None if level == EXACT else limit_of(self.level)):
                return i
        return len(keys)

    def rows(self, view) -> np.ndarray:
        return np.concatenate([view.array(0, "k")[0], view.array(0, "v")[0]], axis=1)


def complement(start: int, end: int, runs: Sequence[ChunkRun]) -> list[tuple[int, int]]:
    """What lies between ``start`` and ``end`` and in no run."""
    spans, at = [], start
    for run in runs:
        if run.start > at:
            spans.append((at, run.start))
        at = run.end
    return [*spans, (at, end)]


def tokens_of(*parts: tuple[int, int]) -> tuple[Tokens, list[int]]:
    """A prompt of parts (seed, tokens), and where they end."""
    pieces = [np.random.default_rng(seed).integers(0, 50_000, n) for seed, n in parts]
    return as_tokens(np.concatenate(pieces)), np.cumsum([n for _, n in parts]).tolist()


@pytest.fixture
def new_world() -> Iterator[Callable[[Store], World]]:
    """Worlds whose stores are closed at the end."""
    worlds: list[World] = []

    def make(store: Store) -> World:
        worlds.append(World(store))
        return worlds[-1]

    yield make
    for world in worlds:
        world.store.check()
        world.store.chunks.check()
        world.store.close()


@pytest.fixture
def prompt() -> Callable[..., tuple[Tokens, list[int]]]:
    """Makes a prompt of parts (seed, tokens): its tokens, and where the parts end."""
    return tokens_of
