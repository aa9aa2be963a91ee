"""``python -m support.fuzz``: fuzz targets for a time, each in a process of its own, or run one input again.

With atheris the mutations are guided by coverage of the Python code; without it by what the parsers answer. An input
that breaks an invariant, or the process, is left in ``--findings`` with the command that runs it again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import mmap
import re
import resource
import struct
import subprocess
import sys
import time
from pathlib import Path
from random import Random

_LENGTH = struct.Struct("<Q")
_ROOM = 16 << 20
#: Address space of one target's process beyond which an allocation fails.
_MEMORY = 24 << 30


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m support.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--target", action="append", help="only this one (may be given several times)")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--engine", choices=("auto", "atheris", "plain"), default="auto")
    parser.add_argument("--findings", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--replay", type=Path, help="run this input of the one --target again")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return _child(given.child, given.engine, given.seconds, given.seed, given.findings)
    from support.fuzz.targets import TARGETS

    names = given.target or list(TARGETS)
    unknown = set(names) - set(TARGETS)
    if unknown:
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    if given.replay:
        target = TARGETS[names[0]]
        _warm(names[0])
        print(target.check(given.replay.read_bytes()))
        return 0
    engine = given.engine
    if engine == "auto":
        engine = "atheris" if importlib.util.find_spec("atheris") else "plain"
    given.findings.mkdir(parents=True, exist_ok=True)
    print(f"{given.seconds:.0f} s, engine {engine}, seed {given.seed}", flush=True)
    total, bad = 0, 0
    for name in names:
        count, found = _run(name, engine, given.seconds / len(names), given.seed, given.findings)
        print(f"{name:12} {count:>12,} inputs  {found or 'held'}", flush=True)
        total += count
        bad += bool(found)
    print(f"{'all':12} {total:>12,} inputs, {bad} of {len(names)} targets broke")
    return 1 if bad else 0


def _run(name: str, engine: str, seconds: float, seed: int, findings: Path) -> tuple[int, str]:
    """Executions of one target, and what it found."""
    words = [sys.executable, "-m", "support.fuzz", "--child", name, "--engine", engine, "--seconds", str(seconds)]
    words += ["--seed", str(seed), "--findings", str(findings)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=2 * seconds + 300)
        code, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        code, said = -1, f"{error.stderr or b''!r}\nnever ended"
    counts = re.findall(r"^(?:executed |stat::number_of_executed_units: )(\d+)", said, re.MULTILINE)
    count = int(counts[-1]) if counts else 0
    if not code:
        return count, ""
    (findings / f"{name}.log").write_text(said)
    left = _left(name, findings)
    what = re.findall(r"Finding: (.*)", said)
    again = f"PYTHONPATH=tests {sys.executable} -m support.fuzz --target {name} --replay {left}"
    return count, f"{what[-1] if what else f'the process ended with {code}'}\n    {again}"


def _left(name: str, findings: Path) -> Path:
    """Give the input under way, or the one that the engine left, a name of its own."""
    current = findings / f"{name}.current"
    data = b""
    if current.exists():
        raw = current.read_bytes()
        data = raw[_LENGTH.size : _LENGTH.size + _LENGTH.unpack_from(raw)[0]]
    path = findings / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


def _warm(name: str) -> None:
    """Import and make what the first input needs, so that no input is charged for it."""
    from support.fuzz.targets import TARGETS, seeds

    target = TARGETS[name]
    for data in seeds(target).values():
        with contextlib.suppress(*target.refusals):
            target.run(data)


def _child(name: str, engine: str, seconds: float, seed: int, findings: Path) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    if engine == "atheris":
        import atheris

        with atheris.instrument_imports(include=["ctxreuse", "ctxreuse_agents", "ctxreuse_edge"]):
            _warm(name)
    else:
        _warm(name)
    from support.fuzz.targets import TARGETS, seeds

    target = TARGETS[name]
    corpus = list(seeds(target).values())
    path = findings / f"{name}.current"
    path.write_bytes(bytes(_ROOM))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), _ROOM) as current:

        def one(data: bytes) -> str:
            size = min(len(data), _ROOM - _LENGTH.size)
            current[: _LENGTH.size + size] = _LENGTH.pack(size) + data[:size]
            return target.check(data)

        if engine == "atheris":
            return _guided(target.mutate, one, corpus, seconds, seed, findings)
        return _plain(target.mutate, one, corpus, seconds, seed)


def _plain(mutate, one, corpus: list[bytes], seconds: float, seed: int) -> int:  # type: ignore[no-untyped-def]
    chance, count, known = Random(seed), 0, set()
    most = 4 * max(map(len, corpus)) + 4096
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            for _ in range(20):
                data = mutate(chance.choice(corpus), chance.choice(corpus), chance)[:most]
                count += 1
                outcome = one(data)
                if outcome not in known and len(known) < 2000:
                    known.add(outcome)
                    corpus.append(data)
    finally:
        print(f"executed {count}", flush=True)
    return 0


def _guided(mutate, one, corpus: list[bytes], seconds: float, seed: int, findings: Path) -> int:  # type: ignore[no-untyped-def]
    import tempfile

    import atheris

    def changed(data: bytes, most: int, seed: int) -> bytes:
        chance = Random(seed)
        if chance.random() < 0.1:
            return bytes(atheris.Mutate(data, most))
        return bytes(mutate(data, chance.choice(corpus), chance)[:most])

    with tempfile.TemporaryDirectory() as folder:
        for n, data in enumerate(corpus):
            Path(folder, str(n)).write_bytes(data)
        options = [f"-max_total_time={max(1, int(seconds))}", f"-seed={seed % 2**31 or 1}", "-print_final_stats=1"]
        options += [f"-max_len={4 * max(map(len, corpus)) + 4096}", "-timeout=60", "-rss_limit_mb=0"]
        options += [f"-artifact_prefix={findings}/libfuzzer-", "-verbosity=0"]
        atheris.Setup([sys.argv[0], *options, folder], lambda data: one(data) and None, custom_mutator=changed)
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
