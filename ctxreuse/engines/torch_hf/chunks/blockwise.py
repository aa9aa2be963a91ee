"""Attention of tokens that stand far apart: block by block, each on no more keys than one of its tokens sees."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

__all__ = ["Blockwise"]

#: Queries that go together; of 16 to 64 the quickest for 9/3 heads of 64 and 4/1 of 256 (2 cores with AVX-512).
_BLOCK: Final = 32


class _Block(NamedTuple):
    """Tokens ``start`` to ``stop`` see no key from ``end`` on, and each of them sees all before ``low``."""

    start: int
    stop: int
    low: int
    end: int


class Blockwise:
    """Attention of one forward whose mask lets different tokens see very different numbers of keys; one thread.

    torch's own kernel computes all scores and takes the masked ones away: of tokens that are spread over a context
    that is half of them. For 340 tokens on 2,100 keys (9/3 heads of 64, float32, 2 cores) it took 20 ms, this takes
    12.5. The native kernels do it where they compute the products too. Beside torch's products they are slower: their
    threads wait for torch's, which go on turning for a while after each of them (recomputing 151 rows of SmolLM2 took
    1.15 s with them, 1.03 with this).
    """

    def __init__(self) -> None:
        self._mask: torch.Tensor | None = None
        self._blocks: list[_Block] = []
        # Fresh memory for the scores of each block and layer would cost as much as computing them.
        self._room: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0), torch.empty(0))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention [1, S, H, Dv] of q [1, H, S, D] on k, v [1, Hkv, N, D or Dv], all float32; ``mask`` [1, 1, S, N]
        is added to the scores. Each token must see a key. Layers that share a mask should give the same tensor."""
        if mask is not self._mask:
            self._mask, self._blocks = mask, _blocks(mask[0, 0])
        heads, kinds, (tokens, dim) = query.shape[1], key.shape[1], query.shape[2:]
        group = heads // kinds
        queries = (query[0] * scale).view(kinds, group, tokens, dim)
        columns, values = key[0].transpose(1, 2), value[0]
        out = query.new_empty(tokens, kinds, group, value.shape[3])
        for start, stop, low, end in self._blocks:
            some = queries[:, :, start:stop].reshape(kinds, -1, dim)
            scores, weights = self._scratch(kinds, some.shape[1], end)
            torch.bmm(some, columns[:, :, :end], out=scores)
            if low < end:
                scores.view(kinds, group, stop - start, end)[..., low:] += mask[0, 0, start:stop, low:end]
            torch.softmax(scores, -1, out=weights)
            result = torch.bmm(weights, values[:, :end])
            out[start:stop] = result.view(kinds, group, stop - start, -1).permute(2, 0, 1, 3)
        return out.view(1, tokens, heads, -1)

    def _scratch(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two float32 tensors of that shape, which hold anything."""
        needed = shape[0] * shape[1] * shape[2]
        if self._room[0].numel() < needed:
            self._room = torch.empty(needed), torch.empty(needed)
        first, second = (room[:needed].view(shape) for room in self._room)
        return first, second


def _blocks(mask: torch.Tensor) -> list[_Block]:
    """The blocks of the tokens of an additive mask [S, N]."""
    found = []
    for start in range(0, len(mask), _BLOCK):
        part = mask[start : start + _BLOCK]
        seen, plain = (part > -torch.inf).any(0), (part == 0).all(0)
        end = int(seen.nonzero()[-1]) + 1 if bool(seen.any()) else len(seen)
        partly = (~plain[:end]).nonzero()
        found.append(_Block(start, start + len(part), int(partly[0]) if len(partly) else end, end))
    return found
