"""The codec and attention on an NVIDIA GPU: coded blocks into an engine's cache pages and back, bit for bit as on CPUs.

`open_device()` gives the device (CuPy compiles the kernels' text for it at first use; ConfigError says what is
missing), `DeviceProfile` holds one level of a codec profile there; `decode_to_pages`,
`ctxreuse.cuda.runs` and `encode_planes` do the work. `ChunkAttention` attends over chunks that stay quantised,
`exit_scores` looks at logits. Arrays are CuPy's, or any that speak DLPack (torch, JAX).

The kernels are plain CUDA C++ in `native/cuda`. Without a GPU their text is compiled for sm_90, and run on the CPU
with a fibre for each thread, by the tests.

Threads. Profiles are immutable; calls queue on the calling thread's current stream and wait for it. `Decoding` does
these two apart.
"""

from __future__ import annotations

from ctxreuse.cuda.attention import ChunkAttention, DevicePart, plane_on
from ctxreuse.cuda.encoding import PagedPlane, encode_planes
from ctxreuse.cuda.launch import Launcher, missing, open_device
from ctxreuse.cuda.planes import CodedPlane, Decoding, Pages, decode_to_pages
from ctxreuse.cuda.profile import DeviceProfile
from ctxreuse.cuda.statistics import exit_scores

__all__ = [
    "ChunkAttention",
    "CodedPlane",
    "Decoding",
    "DevicePart",
    "DeviceProfile",
    "Launcher",
    "PagedPlane",
    "Pages",
    "decode_to_pages",
    "encode_planes",
    "exit_scores",
    "missing",
    "open_device",
    "plane_on",
]
