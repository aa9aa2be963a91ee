"""`ctxreuse keys`: making keys, letting them in, revoking them; what it prints and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ctxreuse.bus.auth.allowlist import AllowList, keys_folder
from ctxreuse.bus.auth.curve import KeyPair


def test_new_prints_the_public_key_and_keeps_the_secret(run: Any, tmp_path: Path) -> None:
    done = run("keys", "add", "laptop", "--dir", str(tmp_path))
    assert done.code == 0
    pair = KeyPair.read(tmp_path / "laptop.key")
    assert done.out == pair.public.hex() + "\n"
    assert pair.secret.hex() not in done.err
    assert (tmp_path / "laptop.key").stat().st_mode & 0o777 == 0o600
    assert pair.secret.hex() not in (tmp_path / "laptop.pub").read_text()


def test_new_never_replaces_a_key(run: Any, tmp_path: Path) -> None:
    run("keys", "add", "laptop", "--dir", str(tmp_path))
    before = (tmp_path / "laptop.key").read_bytes()
    done = run("keys", "add", "laptop", "--dir", str(tmp_path))
    assert done.code == 2
    assert "exists already" in done.err
    assert (tmp_path / "laptop.key").read_bytes() == before


@pytest.mark.parametrize("name", ["../up", "", "a b", "-x", "x" * 65])
def test_names_are_plain(run: Any, tmp_path: Path, name: str) -> None:
    assert run("keys", "add", "--dir", str(tmp_path), "--", name).code == 2
    assert list(tmp_path.glob("*.key")) == []


def test_allow_list_revoke(run: Any, tmp_path: Path) -> None:
    folder = ("--dir", str(tmp_path))
    public = run("keys", "add", "laptop", *folder).out.strip()
    other = run("keys", "add", "phone", *folder).out.strip()
    assert run("keys", "allow", str(tmp_path / "laptop.pub"), "--tenant", "me", *folder).code == 0
    assert run("keys", "allow", other, "--tenant", "me", "--name", "telephone", *folder).code == 0
    entries = AllowList(tmp_path / "allow.toml").entries
    assert [(e.name, e.tenant, e.public.hex()) for e in entries] == [
        ("laptop", "me", public),
        ("telephone", "me", other),
    ]
    assert "can no longer connect" in run("keys", "revoke", "laptop", *folder).out
    assert run("keys", "revoke", other, *folder).code == 0
    body = json.loads(run("keys", "ls", "--json", *folder).out)
    assert [(row["name"], bool(row["revoked"])) for row in body["allowed"]] == [("laptop", True), ("telephone", True)]
    assert [row["name"] for row in body["keys"]] == ["laptop", "phone"]
    table = run("keys", "ls", *folder).out
    assert public in table
    assert "revoked 20" in table


def test_what_is_refused_says_what_to_do(run: Any, tmp_path: Path) -> None:
    folder = ("--dir", str(tmp_path))
    public = run("keys", "add", "laptop", *folder).out.strip()
    done = run("keys", "allow", public, "--tenant", "me", *folder)
    assert (done.code, "--name" in done.err) == (2, True)
    assert run("keys", "allow", public, "--name", "laptop", *folder).code == 2  # whose?
    done = run("keys", "allow", "nonsense", "--tenant", "me", "--name", "n", *folder)
    assert (done.code, "64 hexadecimal digits" in done.err) == (2, True)
    run("keys", "allow", public, "--tenant", "me", "--name", "laptop", *folder)
    done = run("keys", "allow", public, "--tenant", "me", "--name", "other", *folder)
    assert (done.code, "revoke laptop" in done.err) == (2, True)
    done = run("keys", "revoke", "labtop", *folder)
    assert (done.code, "Did you mean laptop?" in done.err) == (2, True)


def test_the_default_folder_is_the_users(run: Any) -> None:
    assert "ctxreuse keys add NAME" in run("keys", "ls").out.replace("\n", "")
    run("keys", "add", "laptop")
    assert [file.name for file in sorted(keys_folder().iterdir())] == ["laptop.key", "laptop.pub"]
    assert keys_folder().stat().st_mode & 0o777 == 0o700
