"""Which states a context keeps, and which of them go first: at most a few a request, where a later one will resume.

A state (recurrent, or K and V of sliding windows) has a fixed size and is of use at one position only. Stored at every
block, states crowd out the blocks; stored at the last token only, every fork starts from zero. A state is stored
- at a *split*: where a new path leaves a cached one. The prefix is used for the second time, so it recurs;
- at the last block boundary, where the conversation goes on;
- at *checkpoints* inside a long run of new tokens, at doubling distances from its end. A context that forks there
  later, or that eviction cuts back, resumes at the checkpoint below and recomputes the tokens up to the fork.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from ctxreuse.store.policy.base import RecomputeCost, prefill_line
from ctxreuse.tree import Match

__all__ = ["SHARE", "Path", "PrefixIndex", "StateNode", "StatePolicy", "spare"]

K_contra = TypeVar("K_contra", contravariant=True)
K = TypeVar("K")

#: A checkpoint may cost one part in so many of the K and V that it insures. On 130 agent sessions that is as good as
#: any fixed distance, at states of 409 tokens' worth of K and V (a 7B hybrid) and of 2,560 (Gemma 3 270M).
_PREMIUM = 8
#: States that are not at the end of a context may take one part in so many of a store. On the first half of those
#: sessions, with Gemma's states in 2/4/8/16 GB: 29.6/61.5/85.6/92.5 % of blocks hit; 1/16 of the store 30.3/60.9/85.5/
#: 92.7 %, 1/64 27.5/60.7/85.2/91.9 %.
SHARE = 32


class PrefixIndex(Protocol[K_contra]):
    """Anything that matches prefixes: a context tree, a store."""

    def match(self, keys: Sequence[K_contra], /) -> Match:
        """See `ctxreuse.tree.ContextTree.match`."""


class Path(NamedTuple, Generic[K]):
    """A context: the keys of its whole blocks, of ``block_tokens`` each."""

    keys: Sequence[K]
    block_tokens: int


class StatePolicy(msgspec.Struct, frozen=True):
    """Where states are stored. Pure: the same context over the same index gives the same positions.

    ``replay``: tokens that are recomputed rather than storing one more state. ``worth``: how many tokens' K and V a
    state weighs (0: unknown, or K and V weigh nothing); checkpoints are set where they cost little beside these.
    """

    replay: int = 0
    worth: int = 0

    def points(self, path: Path[K], index: PrefixIndex[K], *, branches: Iterable[int] = ()) -> tuple[int, ...]:
        """Return positions, ascending, at which the states of ``path`` should be stored; multiples of a block's tokens.

        ``branches``: positions at which other contexts are known to fork from this one. No position is closer than
        ``replay`` to a stored state before it, or to the position before it.
        """
        size, last = path.block_tokens, len(path.keys) * path.block_tokens
        match = index.match(path.keys)
        wanted = {at // size * size for at in branches} | {last}
        if match.split:
            wanted.add(match.tokens)
        found: list[int] = []
        below = match.state_tokens
        for at in sorted(at for at in wanted if at <= last):
            if at - below > self.replay:
                found.append(at)
                below = at
        # A checkpoint insures nothing that a state near it does not insure as well.
        step = self._step(size)
        for at in self._checkpoints(step, match.tokens, last):
            if all(abs(at - other) >= max(step // 2, self.replay) for other in (match.state_tokens, *found)):
                found.append(at)
        return tuple(sorted(found))

    def _step(self, size: int) -> int:
        return -(-self.worth * _PREMIUM // size) * size

    def _checkpoints(self, step: int, start: int, end: int) -> Iterator[int]:
        """One ``step`` before the end, two steps, four, down to the start of the new tokens."""
        while step and end - step > start:
            yield end - step
            step *= 2


class StateNode(Protocol):
    """A node of a tree, with or without a state at its end: see `ctxreuse.tree.Node`."""

    @property
    def key(self) -> Any: ...
    @property
    def parent(self) -> StateNode | None: ...
    @property
    def children(self) -> int: ...
    @property
    def pins(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def state_nbytes(self) -> int: ...


N = TypeVar("N", bound=StateNode)


def spare(
    stated: Iterable[N],
    need: int,
    most: int,
    keep: Container[Any] = frozenset(),
    cost: RecomputeCost | None = None,
) -> list[N]:
    """Choose states to delete, while their blocks stay, so that ``need`` bytes become free; fewer if no more should.

    States inside contexts, not at their ends, may take ``most`` bytes together; beyond that the least worth goes first.
    Worth is seconds saved per byte: those of replaying from the state before it, once for each context that goes on
    from there. States at ends leave with their blocks. Pure; O(states · blocks between them).

    Args:
        stated: nodes with states.
        need: bytes.
        most: bytes.
        keep: keys whose states stay, as pinned ones do.
        cost: seconds of prefill; default: `prefill_line`.
    """
    seconds = prefill_line() if cost is None else cost
    inner = [node for node in stated if node.children]
    over = sum(node.state_nbytes for node in inner) - most
    if over <= 0:
        return []

    def worth(node: N) -> tuple[float, int, Any]:
        return _replay_seconds(node, seconds) * node.children / node.state_nbytes, node.depth, node.key

    victims: list[N] = []
    for node in sorted((node for node in inner if not node.pins and node.key not in keep), key=worth):
        if over <= 0 or need <= 0:
            break
        victims.append(node)
        over -= node.state_nbytes
        need -= node.state_nbytes
    return victims


def _replay_seconds(node: StateNode, cost: RecomputeCost) -> float:
    above = node.parent
    while above is not None and not above.state_nbytes:
        above = above.parent
    start = above.depth if above is not None else 0
    return cost(start, node.depth - start)
