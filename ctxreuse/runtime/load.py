"""Loading a held prefix from the store into an engine, overlapped with computing what follows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ctxreuse.errors import FormatError
from ctxreuse.keys import Tokens
from ctxreuse.runtime.usage import Logits

if TYPE_CHECKING:
    from ctxreuse.block import BlockView
    from ctxreuse.engines.base import Engine, Live
    from ctxreuse.store.base import Reader, WholeStore

__all__ = ["Loaded", "load_prefix"]

# Loading overlaps computing only if the computing is short: the store's read transaction, which keeps old pages alive,
# lasts as long as both. Computing 256 tokens takes several times as long as loading 2,048.
_OVERLAP_TOKENS = 256


class Loaded(NamedTuple):
    """Logits after the whole prompt, reused tokens by tier, why a held block was not used ('' if all were), and when
    computing had the machine to itself."""

    logits: Logits
    sources: dict[str, int]
    missed: str
    at: float


def load_prefix(
    engine: Engine, store: WholeStore, live: Live, ids: Tokens, keys: Sequence[bytes], clock: Callable[[], float]
) -> Loaded:
    """Fill the empty ``live`` with the blocks of ``keys`` and compute the rest of ``ids``.

    Uses as many leading blocks as can be read; none is fine. Raises FormatError if a plane turned out corrupt while it
    was copied: then ``live`` is spoiled, the block has been dropped from the store, and the caller starts again.
    """
    at, logits = clock(), None
    with store.read() as reader:
        views, state, sources = _read(engine, reader, ids, keys)
        missed = reader.missed
        rest = ids[len(views) * engine.space.block_tokens :]
        if views:
            loading = engine.load(live, views, state)
            try:
                try:
                    if len(rest) <= _OVERLAP_TOKENS:
                        logits = engine.prefill(live, rest)
                finally:
                    # The views die with the reader, so the copying must have ended, whatever happened.
                    loading.wait()
                at = clock() if logits is None else at
            except FormatError:
                _discard_corrupt(store, views if state is None else [*views, state])
                raise
            finally:
                views.clear()
                del state
    if logits is None:
        logits = engine.prefill(live, rest)
    return Loaded(logits, sources, missed, at)


def _read(
    engine: Engine, reader: Reader, ids: Tokens, keys: Sequence[bytes]
) -> tuple[list[BlockView], BlockView | None, dict[str, int]]:
    """Views of the leading blocks that can really be used, and the state at their end if the model needs one."""
    space, size = engine.space, engine.space.block_tokens
    views: list[BlockView] = []
    sources: list[str] = []
    for i, key in enumerate(keys):
        before = dict(reader.served)
        view = reader.block(key, ids[i * size : (i + 1) * size], space.digest)
        if view is None:
            break
        views.append(view)
        sources.append(next(name for name, n in reader.served.items() if n != before.get(name, 0)))
    state = None
    while space.needs_state and views and state is None:
        i = len(views) - 1
        state = reader.state(keys[i], ids[i * size : (i + 1) * size], space.digest)
        if state is None:
            views.pop()
            sources.pop()
    return views, state, {name: sources.count(name) * size for name in dict.fromkeys(sources)}


def _discard_corrupt(store: WholeStore, views: Sequence[BlockView]) -> None:
    for view in views:
        try:
            view.verify()
        except FormatError:
            store.drop(view.header.key, "corrupt")
