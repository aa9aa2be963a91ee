"""What nvcc makes of the kernels' text for a Hopper GPU: registers and spills, without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from ctxreuse.cuda.launch import FILES
from ctxreuse.errors import ConfigError

__all__ = ["Usage", "compile_text", "find_nvcc"]

_OPTIONS: Final = ("-cubin", "-arch=sm_90", "-std=c++17", "-Werror", "all-warnings", "-Xptxas", "-v")
_USED: Final = re.compile(
    r"entry function '(\w+)' for 'sm_90'.*?(\d+) bytes spill stores.*?Used (\d+) registers", re.DOTALL
)


class Usage(NamedTuple):
    """Registers of a thread, and bytes of them that did not fit and go through memory."""

    registers: int
    spilled: int


def find_nvcc() -> str | None:
    """The path of nvcc, or None."""
    return shutil.which("nvcc")


@cache
def compile_text(nvcc: str, folder: Path) -> Mapping[str, Usage]:
    """Compile every file of ``folder`` for sm_90, all at once; seconds, but once a process.

    ConfigError if one is refused.
    """
    found: dict[str, Usage] = {}
    with tempfile.TemporaryDirectory() as out:
        running = {
            name: subprocess.Popen(
                [nvcc, *_OPTIONS, "-o", str(Path(out) / f"{name}.cubin"), str(folder / name)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name in FILES
        }
        errors = {name: process.communicate()[1] for name, process in running.items()}
    for name, process in running.items():
        if process.returncode:
            raise ConfigError(f"nvcc refuses {name}: {errors[name][-2000:]}", where=nvcc)
        found |= {kernel: Usage(int(used), int(spilled)) for kernel, spilled, used in _USED.findall(errors[name])}
    return found
