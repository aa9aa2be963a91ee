"""Checks of this machine and the store, for ``ctxreuse doctor``."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

import msgspec

from ctxreuse.config import StoreConfig, load
from ctxreuse.errors import CtxReuseError, StoreError
from ctxreuse.units import rounded_bytes

__all__ = ["Finding", "Status", "broken", "run_checks", "satisfies"]

Status = Literal["ok", "missing", "slow", "broken"]

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*([^;]*?)\s*(?:;\s*(.*))?")
_BOUND = re.compile(r"(>=|<=|==|!=|<|>|~=)\s*([0-9][0-9.]*)")


class Finding(msgspec.Struct, frozen=True):
    """Result of one check: area, name, status, value, and what to do unless the status is ``ok``."""

    area: str
    name: str
    status: Status
    value: str
    fix: str = ""


def run_checks(config: str | None = None, store: Callable[[StoreConfig], StoreConfig] | None = None) -> list[Finding]:
    """Run all checks, which takes seconds; a failing one becomes a finding.

    Args:
        config: file of settings.
        store: returns the store to check, given the one of the settings (default: that one).
    """
    findings: list[Finding] = []
    areas: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("system", _system),
        ("packages", _packages),
        ("kernels", _kernels),
        ("cuda", _cuda),
        ("models", _models),
        ("store", lambda: _store(config, store)),
    ]
    for area, check in areas:
        try:
            findings.extend(check())
        except CtxReuseError as error:
            findings.append(broken(area, type(error).__name__, error))
        except Exception as error:  # the other areas must still be checked
            findings.append(Finding(area, type(error).__name__, "broken", str(error)))
    return findings


def broken(area: str, name: str, error: CtxReuseError) -> Finding:
    """Return the finding for an error."""
    where = f"{error.what} ({error.where})" if error.where else error.what
    return Finding(area, name, "broken", where, error.fix)


def _system() -> Iterator[Finding]:
    import psutil

    from ctxreuse.cpu import cpu_features, cpu_name

    memory = psutil.virtual_memory()
    yield Finding("system", "python", "ok", f"{platform.python_version()} {sys.executable}")
    yield Finding("system", "platform", "ok", platform.platform())
    yield Finding("system", "processor", "ok", f"{cpu_name()}, {os.cpu_count()} cores")
    yield Finding("system", "features", "ok", " ".join(cpu_features()) or "none that the kernels use")
    yield Finding(
        "system", "memory", "ok", f"{rounded_bytes(memory.total)}, {rounded_bytes(memory.available)} available"
    )


def satisfies(installed: str, bounds: str) -> bool:
    """Return True if a version satisfies comma-separated bounds (``>=2.6,<3``); only release numbers are compared."""

    def numbers(text: str) -> tuple[int, ...]:
        # 2.0 equals 2
        found = [int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", text)[0])]
        while found and not found[-1]:
            found.pop()
        return tuple(found)

    have = numbers(installed)
    for sign, text in _BOUND.findall(bounds):
        want = numbers(text)
        holds = {
            ">=": have >= want,
            "<=": have <= want,
            "==": have == want,
            "!=": have != want,
            "<": have < want,
            ">": have > want,
            "~=": have >= want and have[: text.count(".")] == want[: text.count(".")],
        }
        if not holds[sign]:
            return False
    return True


def _packages() -> Iterator[Finding]:
    yield Finding("packages", "ctxreuse", "ok", version("ctxreuse"))
    seen: set[str] = set()
    for line in requires("ctxreuse") or []:
        parts = _REQUIREMENT.fullmatch(line)
        if parts is None or parts[1] in seen or parts[1] == "ctxreuse":
            continue
        name, bounds, marker = parts[1], parts[2].strip("() "), parts[3] or ""
        seen.add(name)
        extra = re.search(r"""extra == ['"]([^'"]+)""", marker)
        install = f"pip install 'ctxreuse[{extra[1]}]'" if extra else f"pip install '{name}{bounds}'"
        try:
            have = version(name)
        except PackageNotFoundError:
            yield Finding("packages", name, "missing" if extra else "broken", f"needs {bounds}", install)
            continue
        if satisfies(have, bounds):
            yield Finding("packages", name, "ok", have)
        else:
            yield Finding("packages", name, "broken", f"{have} is outside {bounds}", install)


def _kernels() -> Iterator[Finding]:
    from ctxreuse import kernels

    active = kernels.active()
    if active == "generic" and len(kernels.available()) > 1:
        yield Finding("kernels", "in use", "slow", "generic", "Unset CTXREUSE_KERNELS for the faster ones")
    else:
        yield Finding("kernels", "in use", "ok", active)
    yield Finding("kernels", "runnable", "ok", " ".join(kernels.available()))


def _cuda() -> Iterator[Finding]:
    from ctxreuse.cuda import compiled, launch

    nvcc = compiled.find_nvcc()
    if nvcc is None:
        count = sum(map(len, launch.FILES.values()))
        yield Finding("cuda", "text", "ok", f"{count} kernels, not compiled here: nvcc is not installed")
    else:
        used = compiled.compile_text(nvcc, launch.text_folder())
        registers = sorted(usage.registers for usage in used.values())
        spilled = sum(usage.spilled for usage in used.values())
        yield Finding(
            "cuda",
            "text",
            "slow" if spilled else "ok",
            f"{len(used)} kernels compiled for sm_90, {registers[0]} to {registers[-1]} registers, "
            + (f"{spilled} bytes spilled" if spilled else "no spills"),
        )
    why = launch.missing()
    if why:
        yield Finding("cuda", "device", "missing", f"none: {why}", launch.INSTALL)
    else:
        yield Finding("cuda", "device", "ok", launch.open_device().name)


def _models() -> Iterator[Finding]:
    from ctxreuse import models

    for line in models.ls():
        if line.record is None and line.gguf is None:
            yield Finding("models", line.entry.name, "missing", "not fetched", f"ctxreuse model get {line.entry.name}")
        else:
            yield Finding("models", line.entry.name, "ok", f"{rounded_bytes(line.bytes)} in {line.path}")


def _store(config: str | None, choose: Callable[[StoreConfig], StoreConfig] | None) -> Iterator[Finding]:
    settings = load(config).settings.store
    settings = settings if choose is None else choose(settings)
    folder = settings.folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        yield Finding("store", "folder", "broken", f"{existing} is not writable", "Set CTXREUSE_STORE__PATH")
        return
    if folder.exists():
        yield Finding("store", "folder", "ok", str(folder))
    else:
        yield Finding("store", "folder", "missing", f"{folder} is created at first use")
    yield from _health(folder)
    free, used = shutil.disk_usage(existing).free, _used(folder)
    if free + used < settings.capacity:
        fix = "Lower store.capacity or free some disk"
        text = f"{rounded_bytes(free)} free, capacity is {rounded_bytes(settings.capacity)}"
        yield Finding("store", "disk", "slow", text, fix)
    else:
        yield Finding("store", "disk", "ok", f"{rounded_bytes(free)} free")


def _health(folder: Path) -> Iterator[Finding]:
    from ctxreuse.inspection import summarize_cache
    from ctxreuse.store import verify
    from ctxreuse.store.lmdb.recovery import examine

    if (folder / "ledger" / "data.mdb").exists():
        texts = verify(folder, parts=("ledger",))
        for problem in texts.problems:
            yield Finding("store", "ledger", "broken", problem, "Keep a copy; `ctxreuse store verify` says more")
        if texts.not_begun:
            yield Finding("store", "ledger", "ok", "not begun")
        elif texts.clean:
            yield Finding("store", "ledger", "ok", f"{texts.sessions:,} sessions, {texts.turns:,} turns")
    if (folder / "blocks" / "data.mdb").exists():
        try:
            wrong = examine(folder / "blocks")
            if wrong:
                raise StoreError(f"the cache is damaged: {wrong}")
            cache = summarize_cache(folder)
            yield Finding("store", "cache", "ok", f"{cache.blocks:,} blocks, {rounded_bytes(cache.nbytes)}")
        except StoreError as error:
            yield Finding("store", "cache", "broken", str(error), error.fix or "It is rebuilt when it is next opened")


def _used(folder: Path) -> int:
    # Allocated blocks, not lengths: the files are sparse.
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())
