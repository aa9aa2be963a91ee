"""Loading a held prefix from the store into an engine, overlapped with computing what follows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ctxreuse.block import block_layout
from ctxreuse.errors import FormatError
from ctxreuse.keys import Tokens

if TYPE_CHECKING:
    from ctxreuse.block import BlockView
    from ctxreuse.engines.base import Engine, Live, Logits
    from ctxreuse.store.base import Reader, WholeStore

__all__ = ["OVERLAP_TOKENS", "Loaded", "SpoiledError", "load_prefix"]

#: Loading overlaps computing only if the computing is short: the store's read transaction, which keeps old pages alive,
#: lasts as long as both. Computing 256 tokens takes several times as long as loading 2,048.
OVERLAP_TOKENS = 256


class SpoiledError(Exception):
    """A held block turned out unusable while it was copied; only the first ``usable`` blocks may be asked for again."""

    def __init__(self, usable: int, reason: str) -> None:
        super().__init__(f"only {usable} blocks can be used: {reason}")
        self.usable, self.reason = usable, reason


class Loaded(NamedTuple):
    """Logits after the whole prompt, reused tokens by tier, why a held block was not used ('' if all were), and when
    computing had the machine to itself."""

    logits: Logits
    sources: dict[str, int]
    missed: str
    at: float


def load_prefix(
    engine: Engine,
    store: WholeStore,
    live: Live,
    ids: Tokens,
    keys: Sequence[bytes],
    finish: Callable[[Live], Logits],
    clock: Callable[[], float],
    *,
    overlap: bool = True,
) -> Loaded:
    """Fill the empty ``live`` with the blocks of ``keys``; ``finish`` computes (or fetches) the rest of ``ids``.

    ``overlap``: it may do so while the blocks are still being copied, if the rest is short.
    Uses as many leading blocks as can be read; none is fine. Raises what ``finish`` raises, and SpoiledError if a plane
    turned out corrupt while it was copied: then ``live`` must not be used, the store is told to drop the block, and the
    caller starts again.
    """
    at, logits = clock(), None
    with store.read() as reader:
        views, state, sources, missed = _read(engine, store, reader, ids, keys)
        rest = len(ids) - len(views) * engine.space.block_tokens
        if views:
            try:
                loading = engine.load(live, views, state)
                try:
                    if overlap and rest <= OVERLAP_TOKENS:
                        logits = finish(live)
                finally:
                    # The views die with the reader, so the copying must have ended, whatever happened.
                    loading.wait()
                at = clock() if logits is None else at
            except FormatError:
                raise _spoiled(store, views, state) from None
            finally:
                views.clear()
                del state
    if logits is None:
        logits = finish(live)
    return Loaded(logits, sources, missed, at)


def _read(
    engine: Engine, store: WholeStore, reader: Reader, ids: Tokens, keys: Sequence[bytes]
) -> tuple[list[BlockView], BlockView | None, dict[str, int], str]:
    """Views of the leading blocks that can really be used, the state at their end if the model needs one, the tokens
    by tier, and why there are no more."""
    space, size = engine.space, engine.space.block_tokens
    planes = block_layout(space).encoded
    views: list[BlockView] = []
    sources: list[str] = []
    missed = ""
    for i, key in enumerate(keys):
        before = dict(reader.served)
        view = reader.block(key, ids[i * size : (i + 1) * size], space.digest)
        if view is None:
            missed = reader.missed
            break
        if view.header.planes != planes or view.header.level != "exact":
            # A writer that names our space but lays its planes out otherwise: nothing of it may reach the engine.
            store.drop(key, missed := "foreign")
            break
        views.append(view)
        sources.append(next(name for name, n in reader.served.items() if n != before.get(name, 0)))
    state = None
    while space.needs_state and views and state is None:
        n = store.match(keys[: len(views)]).state_blocks
        if n:
            state = reader.state(keys[n - 1], ids[(n - 1) * size : n * size], space.digest)
            missed = missed or reader.missed
        kept = n if state is not None else max(n - 1, 0)
        del views[kept:], sources[kept:]
    return views, state, {name: sources.count(name) * size for name in dict.fromkeys(sources)}, missed


def _spoiled(store: WholeStore, views: Sequence[BlockView], state: BlockView | None) -> SpoiledError:
    """Find what the engine choked on and have it dropped: a plane whose checksum differs, else the state."""
    for i, view in enumerate(views):
        if _corrupt(view):
            store.drop(view.header.key, "corrupt")
            return SpoiledError(i, "corrupt")
    reason = "corrupt" if state is not None and _corrupt(state) else "foreign"
    store.drop(views[-1].header.key, reason)
    return SpoiledError(len(views) - 1, reason)


def _corrupt(view: BlockView) -> bool:
    try:
        view.verify()
    except FormatError:
        return True
    return False
