"""The files of version 0.1.0 are as they were committed: they may be read, never written again."""

from __future__ import annotations

import hashlib
from pathlib import Path

DATA = Path(__file__).with_name("data")


def test_nothing_was_changed() -> None:
    lines = (DATA / "SHA256SUMS").read_text("utf-8").splitlines()
    known = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    files = {str(path.relative_to(DATA)): path for path in DATA.rglob("*") if path.is_file()}
    del files["SHA256SUMS"]
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()} == known
