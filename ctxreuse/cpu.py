"""The processor of this machine: its name, and the features that kernels and engines use."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["cpu_features", "cpu_name", "multiplies_bfloat16"]

_INFO = Path("/proc/cpuinfo")
_FEATURES = (
    "avx2",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_bf16",
    "amx_bf16",
    "asimd",
    "asimdhp",
    "bf16",
    "sve",
)


def cpu_name() -> str:
    """Return the processor's model name as the system reports it."""
    names = [value for name, value in _lines(_INFO) if name == "model name"]
    return names[0] if names else platform.processor() or platform.machine()


def cpu_features(info: Path = _INFO) -> tuple[str, ...]:
    """Return the processor's features that kernels or engines use; empty where the system does not list them."""
    flags = next((value.split() for name, value in _lines(info) if name in ("flags", "Features")), [])
    return tuple(feature for feature in _FEATURES if feature in flags)


def multiplies_bfloat16(info: Path = _INFO) -> bool:
    """Return whether the processor has instructions that multiply bfloat16; true where the system lists none."""
    found = cpu_features(info)
    return not found or any(name in found for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _lines(info: Path) -> list[tuple[str, str]]:
    try:
        lines = info.read_text("utf-8").splitlines()
    except OSError:
        return []
    pairs = (line.partition(":") for line in lines)
    return [(name.strip(), value.strip()) for name, _, value in pairs]
