"""Loads a stored prefix into an engine, overlapped with computing what follows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ctxreuse.block.format import block_layout
from ctxreuse.block.levels import is_raw
from ctxreuse.errors import FormatError

if TYPE_CHECKING:
    from ctxreuse.block.format import BlockView
    from ctxreuse.engines.base import Context, Engine, Logits
    from ctxreuse.runtime.request import Request
    from ctxreuse.store.base import Reader, Store

__all__ = ["OVERLAP_TOKENS", "LoadedPrefix", "SpoiledError", "decodes", "load_prefix"]

#: Loading overlaps computing only if the computing is short: the store's read transaction, which keeps old pages alive,
#: lasts as long as both. Computing 256 tokens takes several times as long as loading 2,048.
OVERLAP_TOKENS = 256


class SpoiledError(Exception):
    """A stored block was corrupt when it was copied; only the first ``usable`` blocks may be loaded next time."""

    def __init__(self, usable: int, reason: str) -> None:
        super().__init__(f"only {usable} blocks can be used: {reason}")
        self.usable, self.reason = usable, reason


class LoadedPrefix(NamedTuple):
    """Reused tokens by tier, why a stored block was not used ("" if all were), and the logits after the whole prompt if
    the rest was computed meanwhile."""

    sources: dict[str, int]
    missed: str
    logits: Logits | None


def load_prefix(
    engine: Engine,
    store: Store,
    context: Context,
    request: Request,
    blocks: int,
    meanwhile: Callable[[Context], Logits] | None = None,
) -> LoadedPrefix:
    """Fill the empty ``context`` with the first ``blocks`` blocks of a prompt, or as many as can be read.

    ``meanwhile`` computes the rest while the blocks are still copied, if the rest is short. Raises what it raises, and
    SpoiledError if a plane turned out corrupt while it was copied: then the store has dropped the block, and
    ``context`` must not be used.
    """
    logits = None
    with store.read(request.max_kl) as reader:
        views, state, sources, missed = _read(engine, store, reader, request, blocks)
        rest = len(request.ids) - len(views) * engine.space.block_tokens
        if views:
            try:
                loading = engine.load(context, views, state)
                try:
                    if meanwhile is not None and rest <= OVERLAP_TOKENS:
                        logits = meanwhile(context)
                finally:
                    # The views die with the reader, so the copying must have ended, whatever happened.
                    loading.wait()
            except FormatError:
                raise _spoiled(engine, store, views, state) from None
            finally:
                views.clear()
                del state
    return LoadedPrefix(sources, missed, logits)


def _read(
    engine: Engine, store: Store, reader: Reader, request: Request, blocks: int
) -> tuple[list[BlockView], BlockView | None, dict[str, int], str]:
    """Views of the leading blocks that can be used, the state at their end if the model needs one, the tokens by tier,
    and why there are no more."""
    space, size = engine.space, engine.space.block_tokens
    ids, keys = request.ids, request.keys[:blocks]
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
            missed = "card"  # it stays: the profile may come, and others may have it
            break
        views.append(view)
        sources.append(next(name for name, n in reader.served.items() if n != before.get(name, 0)))
    state = None
    while space.needs_state and views and state is None:
        n = store.match(keys[: len(views)], request.max_kl).state_blocks
        if n:
            state = reader.state(keys[n - 1], ids[(n - 1) * size : n * size], space.digest)
            missed = missed or reader.missed
            if state is not None and not (is_raw(state.header.level) or decodes(engine, state.header.level)):
                state, missed = None, missed or "card"
        kept = n if state is not None else max(n - 1, 0)
        del views[kept:], sources[kept:]
    return views, state, {name: sources.count(name) * size for name in dict.fromkeys(sources)}, missed


def decodes(engine: Engine, level: str) -> bool:
    """Return True if the engine's codec can read blocks of a level that is not raw."""
    try:
        return engine.codec is not None and engine.codec.knows(level)
    except FormatError:
        return False


def _spoiled(engine: Engine, store: Store, views: Sequence[BlockView], state: BlockView | None) -> SpoiledError:
    """Drop the block that the engine refused: one with a plane that is corrupt or cannot be decoded, else the state."""
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
