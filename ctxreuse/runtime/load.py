"""Loading a held prefix from the store into an engine, overlapped with computing what follows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ctxreuse.block import block_layout
from ctxreuse.errors import FormatError
from ctxreuse.keys import Tokens
from ctxreuse.levels import is_raw

if TYPE_CHECKING:
    from ctxreuse.block import BlockView
    from ctxreuse.engines.base import Engine, Live, Logits
    from ctxreuse.store.base import Reader, WholeStore

__all__ = ["OVERLAP_TOKENS", "Loaded", "SpoiledError", "decodes", "load_prefix"]

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
    lossy: str | None = None,
) -> Loaded:
    """Fill the empty ``live`` with the blocks of ``keys``; ``finish`` computes (or fetches) the rest of ``ids``.

    ``overlap``: it may do so while the blocks are still being copied, if the rest is short. ``lossy``: the worst level
    of blocks that may be used (None: exact ones only); what is held at a worse one is computed.
    Uses as many leading blocks as can be read; none is fine. Raises what ``finish`` raises, and SpoiledError if a plane
    turned out corrupt while it was copied: then ``live`` must not be used, the store is told to drop the block, and the
    caller starts again.
    """
    at, logits = clock(), None
    with store.read(lossy) as reader:
        views, state, sources, missed = _read(engine, store, reader, ids, keys, lossy)
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
                raise _spoiled(engine, store, views, state) from None
            finally:
                views.clear()
                del state
    if logits is None:
        logits = finish(live)
    return Loaded(logits, sources, missed, at)


def _read(
    engine: Engine, store: WholeStore, reader: Reader, ids: Tokens, keys: Sequence[bytes], lossy: str | None
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
        level = view.header.level
        if is_raw(level) and view.header.planes != planes:
            # A writer that names our space but lays its planes out otherwise: nothing of it may reach the engine.
            store.drop(key, missed := "foreign")
            break
        if not (is_raw(level) or decodes(engine, level)):
            missed = "card"  # it stays: the card may come, and others may have it
            break
        views.append(view)
        sources.append(next(name for name, n in reader.served.items() if n != before.get(name, 0)))
    state = None
    while space.needs_state and views and state is None:
        n = store.match(keys[: len(views)], lossy).state_blocks
        if n:
            state = reader.state(keys[n - 1], ids[(n - 1) * size : n * size], space.digest)
            missed = missed or reader.missed
            if state is not None and not (is_raw(state.header.level) or decodes(engine, state.header.level)):
                state, missed = None, missed or "card"
        kept = n if state is not None else max(n - 1, 0)
        del views[kept:], sources[kept:]
    return views, state, {name: sources.count(name) * size for name in dict.fromkeys(sources)}, missed


def decodes(engine: Engine, level: str) -> bool:
    """True if the engine's codec can read blocks of a level that is not raw."""
    try:
        return engine.codec is not None and engine.codec.knows(level)
    except FormatError:
        return False


def _spoiled(engine: Engine, store: WholeStore, views: Sequence[BlockView], state: BlockView | None) -> SpoiledError:
    """Find what the engine choked on and have it dropped: a plane whose checksum differs or that decodes to nothing,
    else the state."""
    for i, view in enumerate(views):
        if _corrupt(engine, view):
            store.drop(view.header.key, "corrupt")
            return SpoiledError(i, "corrupt")
    reason = "corrupt" if state is not None and _corrupt(engine, state) else "foreign"
    store.drop(views[-1].header.key, reason)
    return SpoiledError(len(views) - 1, reason)


def _corrupt(engine: Engine, view: BlockView) -> bool:
    try:
        view.verify()
        if engine.codec is not None and not is_raw(view.header.level):
            engine.codec.decode(view)
    except FormatError:
        return True
    return False
