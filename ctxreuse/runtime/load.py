"""Loads a stored prefix into an engine, overlapped with computing what follows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ctxreuse.block.format import block_layout
from ctxreuse.block.levels import is_raw
from ctxreuse.errors import FormatError

if TYPE_CHECKING:
    from ctxreuse.block.format import BlockView
    from ctxreuse.engines.base import Context, Engine, Logits
    from ctxreuse.identity.keys import Tokens
    from ctxreuse.runtime.partial_blocks import PartialBlocks
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
    """Reused tokens by tier, why a stored block was not used ("" if all were), the logits after the whole prompt if the
    rest was computed meanwhile, and the key of the partial block that was loaded (b"" if none was)."""

    sources: dict[str, int]
    missed: str
    logits: Logits | None
    partial: bytes = b""


def load_prefix(
    engine: Engine,
    store: Store,
    context: Context,
    request: Request,
    blocks: int,
    partials: PartialBlocks | None = None,
    meanwhile: Callable[[Context], Logits] | None = None,
) -> LoadedPrefix:
    """Fill the empty ``context`` with the first ``blocks`` blocks of a prompt, or as many as can be read.

    A partial block that follows all of them is loaded too, if ``partials`` finds one.

    ``meanwhile`` computes the rest while the blocks are still copied, if the rest is short. Raises what it raises, and
    SpoiledError if a plane turned out corrupt while it was copied: then the store has dropped the block, and
    ``context`` must not be used.
    """
    logits, partial = None, b""
    with store.read(request.max_kl) as reader:
        found, state, missed = _read(engine, store, reader, request, blocks)
        if partials is not None and len(found) == blocks > 0:
            found += _read_partial(engine, store, reader, request, partials, blocks)
            partial = found[-1].view.header.key if len(found) > blocks else b""
        sources = Counter[str]()
        for one in found:
            sources[one.tier] += len(one.view.tokens)
        views = [one.view for one in found]
        found.clear()
        if views:
            try:
                loading = engine.load(context, views, state)
                try:
                    if meanwhile is not None and len(request.ids) - sources.total() <= OVERLAP_TOKENS:
                        logits = meanwhile(context)
                finally:
                    # The views die with the reader, so the copying must have ended, whatever happened.
                    loading.wait()
            except FormatError:
                raise _spoiled(engine, store, views, state) from None
            finally:
                views.clear()
                del state
    return LoadedPrefix(dict(sources), missed, logits, partial)


class _Found(NamedTuple):
    """A block that can be used, and the tier that it is from."""

    view: BlockView
    tier: str


def _read(
    engine: Engine, store: Store, reader: Reader, request: Request, blocks: int
) -> tuple[list[_Found], BlockView | None, str]:
    """The leading blocks that can be used, the state at their end if the model needs one, and why there are no more."""
    space, size = engine.space, engine.space.block_tokens
    ids, keys = request.ids, request.keys[:blocks]
    found: list[_Found] = []
    missed = ""
    for i, key in enumerate(keys):
        one, missed = _block(engine, store, reader, key, ids[i * size : (i + 1) * size])
        if one is None:
            break
        found.append(one)
    state = None
    while space.needs_state and found and state is None:
        n = store.match(keys[: len(found)], request.max_kl).state_blocks
        if n:
            state = reader.state(keys[n - 1], ids[(n - 1) * size : n * size], space.digest)
            missed = missed or reader.missed
            if state is not None and not (is_raw(state.header.level) or decodes(engine, state.header.level)):
                state, missed = None, missed or "card"
        kept = n if state is not None else max(n - 1, 0)
        del found[kept:]
    return found, state, missed


def _read_partial(
    engine: Engine, store: Store, reader: Reader, request: Request, partials: PartialBlocks, blocks: int
) -> list[_Found]:
    """The partial block after so many whole ones, if one is stored; the prompt's last token is left to compute."""
    rest = request.ids[blocks * engine.space.block_tokens : -1]
    partial = partials.find(store, request.keys[blocks - 1], rest, request.max_kl)
    one = _block(engine, store, reader, partial[0], rest[: partial[1]])[0] if partial is not None else None
    return [one] if one is not None else []


def _block(engine: Engine, store: Store, reader: Reader, key: bytes, ids: Tokens) -> tuple[_Found | None, str]:
    """The block of these ids, if it can be used, or why it cannot."""
    before = dict(reader.served)
    view = reader.block(key, ids, engine.space.digest)
    if view is None:
        return None, reader.missed
    level = view.header.level
    if is_raw(level) and view.header.planes != block_layout(engine.space, len(ids)).encoded:
        # A writer that names our space but lays its planes out otherwise: nothing of it may reach the engine.
        store.drop(key, "foreign")
        return None, "foreign"
    if not (is_raw(level) or decodes(engine, level)):
        return None, "card"  # it stays: the profile may come, and others may have it
    return _Found(view, next(name for name, n in reader.served.items() if n != before.get(name, 0))), ""


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
