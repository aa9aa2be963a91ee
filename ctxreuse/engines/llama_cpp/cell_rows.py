"""Single rows of llama.cpp's KV cache, read where they lie.

The library's own functions write all rows of a sequence: for each turn of an agent as many megabytes as its context
has. While it computes, it shows every tensor to a callback. Those of the cache have names, such as ``cache_k_l0``, and
ggml says where their memory is. As the library promises none of this, it is proved when a model is opened
(`CellRows.learn` and `match`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ctxreuse.engines.llama_cpp.cells import LlamaCells
from ctxreuse.engines.llama_cpp.state import LlamaState, StateLayout

__all__ = ["CellRows", "Rows"]

#: Bits of K or V by layer and role, [tokens, heads * dim].
Rows: TypeAlias = dict[tuple[int, str], npt.NDArray[np.unsignedinteger[Any]]]


class CellRows:
    """Reads rows of the layers without sliding windows from the cells of one model."""

    def __init__(self, layout: StateLayout, layers: Sequence[int]) -> None:
        """``layers``: the numbers in the model of those that ``layout`` has first."""
        self._bits, self._layers, cache = layout.bits, layers, layout.caches[0]
        self._widths = {"k": cache.k, "v": cache.v}

    @classmethod
    def learn(cls, layout: StateLayout, cells: LlamaCells, state: LlamaState) -> CellRows | None:
        """Find the layers of sequence 0, whose ``state`` is given, by their rows; None if it cannot be done here.

        Memory of a device, or another order of rows, shows by this: nothing is read where that could fail.
        """
        places, layers, wanted = cells.places, list[int](), range(len(layout.caches[0].k))
        if places is None:
            return None
        with suppress(OSError):
            memory = os.open("/proc/self/mem", os.O_RDONLY)
            try:
                for number in places.seen():
                    if (layer := len(layers)) in wanted:
                        rows = [state.by_position(layer, role).tobytes() for role in ("k", "v")]
                        if rows == [os.pread(memory, len(row), at) for row, at in zip(rows, places.of_layer(number))]:
                            layers.append(number)
            finally:
                os.close(memory)
        return cls(layout, layers) if len(layers) == len(wanted) else None

    def match(self, cells: LlamaCells, slot: int, state: LlamaState) -> bool:
        """True if all rows of a sequence are those of its ``state``."""
        found = self.read(cells, slot, 0, state.cells)
        return bool(found) and all(np.array_equal(rows, state.by_position(*at)) for at, rows in found.items())

    def read(self, cells: LlamaCells, slot: int, start: int, end: int) -> Rows:
        """Copies of the rows of a sequence in the cells between two positions; none before the cells' first pass.

        Nothing may be computed meanwhile.

        A sequence alone in its stream is in the cells with its positions' numbers: they are filled from the first on,
        and the library goes on behind the last one that was not removed.
        """
        found, places = Rows(), cells.places
        if places is None or not places.done:
            return found
        for layer, number in enumerate(self._layers):
            for (role, widths), place in zip(self._widths.items(), places.of_layer(number)):
                width = widths[layer]
                at = place + (slot * cells.cells + start) * width
                raw = np.ctypeslib.as_array((ctypes.c_uint8 * ((end - start) * width)).from_address(at))
                found[layer, role] = raw.reshape(end - start, width).view(self._bits).copy()
        return found
