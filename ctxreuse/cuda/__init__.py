"""The codec on an NVIDIA GPU: coded blocks straight into an engine's cache pages and back, bit for bit as on the CPU.

`open_device()` gives the device (CuPy compiles the kernels' text for it at first use; ConfigError says what is
missing), `DeviceCard` holds one level of a card there, `decode_to_pages`, `decode_planes` and `encode_planes` do the
work. Arrays are CuPy's, or any that speak DLPack (torch, JAX). `ctxreuse.cuda.rans` has the entropy coder by itself,
`ctxreuse.cuda.attend` attention over chunks that stay quantised, and `ctxreuse.cuda.statistics` the sums of calibration
and gates.

The kernels are plain CUDA C++ in `native/cuda`. Without a GPU their text is compiled for sm_90, and run on the CPU
with a fibre for each thread, by the tests.

Threads. Cards are immutable; calls queue on the calling thread's current stream and wait for it. `Decoding` does these
two apart.
"""

from __future__ import annotations

from ctxreuse.cuda.encoding import PagedPlane, encode_planes
from ctxreuse.cuda.launch import Launcher, missing, open_device
from ctxreuse.cuda.planes import CodedPlane, Decoding, DeviceCard, Pages, decode_planes, decode_to_pages

__all__ = [
    "CodedPlane",
    "Decoding",
    "DeviceCard",
    "Launcher",
    "PagedPlane",
    "Pages",
    "decode_planes",
    "decode_to_pages",
    "encode_planes",
    "missing",
    "open_device",
]
