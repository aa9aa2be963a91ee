"""What is deleted with a text: KV that no known context needs, token ids and explanations of requests, hints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ctxreuse.identity.keys import KEY_BYTES, ROOT, Tokens, common_prefix
from ctxreuse.runtime.partial_blocks import stored_partials
from ctxreuse.runtime.request import more_keys
from ctxreuse.store.removals import SHORT_KEY

if TYPE_CHECKING:
    from ctxreuse.identity.model import ModelSpace
    from ctxreuse.runtime.paused import PausedContexts
    from ctxreuse.store.base import Store
    from ctxreuse.why import LoggedEntry, RequestLog

__all__ = ["Eraser", "Erasure", "erase_stored"]


class Erasure(msgspec.Struct, frozen=True, array_like=True):
    """What is to be deleted: ``keys`` of blocks, with all that is stored below them, in a row; ids of requests; keys of
    the blocks under the salt of each cloud, by its name."""

    keys: bytes = b""
    requests: tuple[str, ...] = ()
    clouds: dict[str, bytes] = {}

    @property
    def blocks(self) -> list[bytes]:
        """The keys one by one."""
        return [self.keys[at : at + KEY_BYTES] for at in range(0, len(self.keys), KEY_BYTES)]


class Eraser:
    """Plans and carries out deletions of one tenant. Any thread may call.

    Between the two a caller can write down what is to be done: carrying out an erasure again changes nothing.
    """

    def __init__(
        self,
        store: Store | None,
        requests: RequestLog,
        forget_texts: Callable[[], None],
        paused: PausedContexts,
        space: ModelSpace,
        salt: bytes,
    ) -> None:
        self._store, self._requests, self._forget_texts, self._paused = store, requests, forget_texts, paused
        self._space, self._salt = space, salt
        #: The salts under which clouds may have copies, by their names.
        self.salts: Callable[[], Mapping[str, bytes]] = dict

    def begun_with(self, tokens: Tokens, session: str = "") -> list[LoggedEntry]:
        """Return the logged requests that begin with these ids, or are of that session."""
        return self._entries(
            lambda entry: (
                (bool(session) and entry.session == session)
                or (bool(entry.ids) and len(tokens) > 0 and common_prefix(entry.numbers, tokens) == len(tokens))
            )
        )

    def chat_of(self, request: str) -> list[LoggedEntry]:
        """Return the logged request of that id, and those of the same chat: that go on from it, or it from them."""
        found = {id(one): one for one in self._entries(lambda entry: entry.named(request))}
        for one in list(found.values()):
            for other in self._entries(lambda entry, one=one: _same_chat(one, entry)):  # type: ignore[misc]
                found[id(other)] = other
        return list(found.values())

    def before(self, time: float) -> list[LoggedEntry]:
        """Return the logged requests made before a time, in seconds since 1970."""
        return self._entries(lambda entry: entry.at < time)

    def saying(self, text: str, decode: Callable[[Tokens], str]) -> list[LoggedEntry]:
        """Return the logged requests of this model whose text contains ``text``, and those of the same chats."""
        found: dict[int, LoggedEntry] = {}
        for entry in self._entries(lambda entry: entry.space == self._space.digest and bool(entry.ids)):
            if id(entry) not in found and text in decode(entry.numbers):
                found |= {id(one): one for one in (entry, *self.chat_of(entry.request))}
        return list(found.values())

    def _entries(self, fits: Callable[[LoggedEntry], bool]) -> list[LoggedEntry]:
        tenant = self._requests.tenant(self._salt)
        return [entry for entry in self._requests.entries() if entry.tenant == tenant and fits(entry)]

    def plan_context(self, tokens: Tokens, session: str = "", keep: Iterable[Tokens] = ()) -> Erasure:
        """Return what goes with a context of these ids, and with the requests that begin so or are of ``session``."""
        return self.plan([tokens] if len(tokens) else [], self.begun_with(tokens, session), keep)

    def plan(self, tokens: Sequence[Tokens], entries: Sequence[LoggedEntry], keep: Iterable[Tokens] = ()) -> Erasure:
        """Return what goes with contexts of these ids and with these requests.

        What other logged requests, and contexts of the ids in ``keep``, share with them stays.
        """
        removed = {id(entry) for entry in entries}
        kept = {
            entry.keys[at : at + SHORT_KEY]
            for entry in self._entries(lambda entry: id(entry) not in removed)
            for at in range(0, len(entry.keys), SHORT_KEY)
        }
        paths = [(self._space, ids) for ids in tokens]
        for entry in entries:
            space = self._requests.space(entry.space)
            if space is not None:
                paths.append((space, entry.numbers if entry.ids else self._stored_ids(entry)))
        for ids in keep:
            if any(common_prefix(ids, own) >= self._space.block_tokens for _, own in paths):
                kept.update(key[:SHORT_KEY] for key in more_keys(self._space, self._salt, ids, ()))
        doomed: dict[bytes, tuple[ModelSpace, Tokens]] = {}
        if self._store is not None and paths:
            self._store.flush()  # a partial block is found only when it is stored
        for space, ids in paths:
            size = space.block_tokens
            keys = more_keys(space, self._salt, ids, ())
            first = next((i for i, key in enumerate(keys) if key[:SHORT_KEY] not in kept), len(keys))
            head, rest = ids[: first * size], ids[first * size :]
            if first < len(keys):
                doomed[keys[first]] = space, ids[: (first + 1) * size]
            for key, block in self._parts(space, keys[:first], rest, kept):
                doomed[key] = space, np.concatenate([head, block])
        whole = [(space, ids) for space, ids in doomed.values() if len(ids) % space.block_tokens == 0]
        clouds = {
            name: b"".join(dict.fromkeys(more_keys(space, salt, ids, ())[-1] for space, ids in whole))
            for name, salt in (self.salts().items() if whole else ())
        }
        return Erasure(b"".join(doomed), tuple(dict.fromkeys(entry.request for entry in entries)), clouds)

    def _stored_ids(self, entry: LoggedEntry) -> Tokens:
        """Return the ids of a request of which only keys were logged, as far as its blocks are stored."""
        found: list[Tokens] = []
        short = [entry.keys[at : at + SHORT_KEY] for at in range(0, len(entry.keys), SHORT_KEY)]
        if self._store is not None and short:
            wanted = frozenset(short)
            known = {one.key[:SHORT_KEY]: one.key for one in self._store.walk() if one.key[:SHORT_KEY] in wanted}
            with self._store.read() as reader:
                for key in short:
                    view = reader.peek(known[key]) if key in known else None
                    if view is None:
                        break
                    found.append(np.frombuffer(view.header.tokens, "<i4").copy())
                    del view
        return np.concatenate(found) if found else np.zeros(0, "<i4")

    def _parts(
        self, space: ModelSpace, keys: Sequence[bytes], rest: Tokens, kept: set[bytes]
    ) -> list[tuple[bytes, Tokens]]:
        """Return what is stored after ``keys`` of the text ``rest`` beside its own whole blocks, and the ids.

        Partial blocks that it begins with; and if it fills no block itself, all blocks that begin with it.
        """
        if self._store is None or not len(rest):
            return []
        parent = keys[-1] if keys else ROOT
        found = [
            (entry.key, rest[: entry.tokens]) for entry in stored_partials(self._store, space, self._salt, parent, rest)
        ]
        if len(rest) >= space.block_tokens:
            return found
        below = [entry.key for entry in self._store.walk() if entry.parent == parent]
        with self._store.read() as reader:
            for key in below:
                view = None if key[:SHORT_KEY] in kept else reader.peek(key)
                if view is not None:
                    block = np.frombuffer(view.header.tokens, "<i4").copy()
                    if np.array_equal(block[: len(rest)], rest):
                        found.append((key, block))
                del view
        return found

    def carry_out(self, erasure: Erasure) -> int:
        """Delete it from memory, store and request log; returns the number of blocks."""
        self._forget_texts()
        self._paused.forget(erasure.blocks)
        return erase_stored(erasure, self._store, self._requests)


def erase_stored(erasure: Erasure, store: Store | None, requests: RequestLog) -> int:
    """Delete it from store and request log; returns the number of blocks."""
    requests.drop(erasure.requests)
    if store is None or not erasure.keys:
        return 0
    store.flush()
    before = store.stats().blocks
    for key in erasure.blocks:
        store.drop(key, "forgotten")
    store.flush()
    return max(0, before - store.stats().blocks)


def _same_chat(one: LoggedEntry, other: LoggedEntry) -> bool:
    if other.space != one.space:
        return False
    if one.ids and other.ids:
        shared = common_prefix(one.numbers, other.numbers)
        answered = len(other.ids) // 4 > other.tokens
        return bool(shared >= one.tokens or (answered and shared >= other.tokens))
    low, high = sorted((one.keys, other.keys), key=len)
    return bool(low) and high.startswith(low)
