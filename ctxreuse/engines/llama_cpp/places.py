"""Where llama.cpp's KV cache lies in memory, as it shows by itself while it computes."""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_size_t, c_uint32, c_void_p
from typing import Any, Final

from ctxreuse.kernels.dispatch import native as _native

__all__ = ["CachePlaces"]

_LAYERS: Final = 1024


class CachePlaces(ctypes.Structure):
    """What the callback of native/python/places.c fills: where K and V of each layer begin, by its number in the model.

    It has all of them after a pass. Then set ``done``, and the callback takes no more time.
    """

    _fields_ = (
        ("_name", c_void_p),
        ("_data", c_void_p),
        ("_layers", c_uint32),
        ("done", c_bool),
        ("_places", c_size_t * (2 * _LAYERS)),
    )

    @classmethod
    def of(cls, name: Any, data: Any) -> CachePlaces:
        """A new record; ``name`` and ``data`` are ggml's functions for a tensor's."""
        return cls(*(ctypes.cast(function, c_void_p) for function in (name, data)), _LAYERS)

    def callback(self) -> tuple[int, int]:
        """The addresses of the callback and of this record."""
        return _native.cache_places_callback(), ctypes.addressof(self)

    def of_layer(self, number: int) -> tuple[int, int]:
        """The addresses of a layer's K and V."""
        return self._places[number], self._places[_LAYERS + number]

    def seen(self) -> list[int]:
        """The numbers of layers, ascending."""
        return [number for number in range(_LAYERS) if all(self.of_layer(number))]
