"""The memory of one llama.cpp context: several sequences of tokens, each in cells of its own, computed together."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.engines.base import Logits
from ctxreuse.engines.llama_cpp.library import FIX, Batch, LlamaModel
from ctxreuse.errors import EngineError
from ctxreuse.identity.keys import Tokens

__all__ = ["LlamaCells", "SlotRun", "rounded"]

#: llama.cpp rounds the room of a sequence up to this many tokens.
_CELLS = 256


def rounded(tokens: int) -> int:
    """The cells that hold so many tokens, as llama.cpp rounds them; at least some."""
    return max(-(-tokens // _CELLS), 1) * _CELLS


class SlotRun(NamedTuple):
    """Tokens of one sequence, from position ``at`` on; the logits after the last ``rows`` of them are wanted."""

    slot: int
    at: int
    ids: Tokens
    rows: int = 1


class LlamaCells:
    """Sequences 0 to ``streams``, each with room for ``cells`` tokens. Not thread-safe.

    Each sequence is a stream of its own. Where they share cells instead, attention goes through the cells of all for
    each, and what one computes has other bits when others are there.
    """

    def __init__(
        self, model: LlamaModel, cells: int, streams: int, batch: int, threads: int, *, watched: bool = True
    ) -> None:
        """``watched``: see `places`. Raises EngineError if there is no memory, or the library took the parameters for
        something else."""
        library = self._library = model.library
        calls = self._calls = library.calls
        self._model, self.cells, self.streams = model, rounded(cells), streams
        #: Where the cache lies, after the first pass, if that is watched; kept as long as the library may write there.
        self.places = library.places() if watched else None
        params = library.params(self.cells, streams, batch, self.places)
        self.handle = calls.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise EngineError(f"no {streams} contexts of {self.cells} tokens: {library.last_error()}")
        self.close = weakref.finalize(self, _free, calls, self.handle, model, self.places)
        numbers = ("n_ctx", "n_ctx_seq", "n_batch", "n_ubatch", "n_seq_max")
        found = tuple(getattr(calls, f"llama_{name}")(self.handle) for name in numbers)
        #: Most tokens at once.
        self.batch = min(batch, streams * self.cells)  # as the library limits it
        if found != (streams * self.cells, self.cells, self.batch, self.batch, streams):
            raise EngineError(
                f"the library takes its parameters in another form: {dict(zip(numbers, found))}",
                where=str(library.path),
                fix=FIX,
            )
        calls.llama_set_n_threads(self.handle, threads, threads)
        self._memory = calls.llama_get_memory(self.handle)
        self._ids, self._at, self._slots = np.zeros((3, batch), np.int32)
        self._one, self._wanted = np.ones(batch, np.int32), np.zeros(batch, np.int8)
        self._places = (self._slots.ctypes.data + self._slots.itemsize * np.arange(batch)).astype(np.uint64)

    def decode(self, runs: Sequence[SlotRun]) -> list[Logits]:
        """Compute at most ``batch`` tokens; the logits after the last tokens of each run: [vocab], or [rows, vocab].

        Raises EngineError; the sequences may have some of the tokens then. The weights are read once if the slots are
        neighbours in ascending order, else once for each row of neighbours.
        """
        ends, n = list[int](), 0
        for run in runs:
            end = n + len(run.ids)
            self._ids[n:end], self._at[n:end] = run.ids, range(run.at, run.at + len(run.ids))
            self._slots[n:end], self._wanted[n:end] = run.slot, 0
            self._wanted[end - run.rows : end] = 1
            ends.append(end)
            n = end
        arrays = (self._ids, None, self._at, self._one, self._places, self._wanted)
        addresses = [None if array is None else array.ctypes.data for array in arrays]
        code = self._calls.llama_decode(self.handle, Batch(n, *addresses))
        if code:
            raise EngineError(f"llama.cpp could not compute {n} tokens: code {code}, {self._library.last_error()}")
        if self.places is not None:
            self.places.done = True
        shape, row = (self._model.vocab_size,), self._calls.llama_get_logits_ith
        found = list[Logits]()
        for run, end in zip(runs, ends):
            places = [np.ctypeslib.as_array(row(self.handle, at), shape) for at in range(end - run.rows, end)]
            found.append(np.stack(places) if run.rows > 1 else places[0].astype(np.float32))
        return found

    def state(
        self, slot: int, *, windows: bool = False, into: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[np.uint8]:
        """The state of a sequence, or of its sliding windows only, as the library writes it; see `LlamaState`."""
        size = self._calls.llama_state_seq_get_size_ext(self.handle, slot, windows)
        data = into if into is not None and into.nbytes == size else np.empty(size, np.uint8)
        written = self._calls.llama_state_seq_get_data_ext(self.handle, data.ctypes.data, size, slot, windows)
        if written != size:
            raise EngineError(f"llama.cpp wrote {written} bytes of a state of {size}")
        return data

    def restore(self, slot: int, data: npt.NDArray[np.uint8], *, windows: bool = False) -> None:
        """Replace what a sequence, or its windows, hold by a state; raises EngineError if the library refuses it."""
        size = data.nbytes
        if self._calls.llama_state_seq_set_data_ext(self.handle, data.ctypes.data, size, slot, windows) != size:
            raise EngineError(f"llama.cpp refuses a state of {size} bytes: {self._library.last_error()}")

    def crop(self, slot: int, n: int) -> bool:
        """Forget what follows position ``n``; False if the memory cannot."""
        return bool(self._calls.llama_memory_seq_rm(self._memory, slot, n, -1))


def _free(calls: Any, handle: int, *kept: object) -> None:
    calls.llama_free(handle)  # the model and the places are kept until here
