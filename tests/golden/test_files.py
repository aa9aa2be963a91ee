"""Keys, lists, journals and recordings of version 0.1.0 are read, from files of the same names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ctxreuse_cloud.proxy.request_log import FILE, ProxyRequestLog
from ctxreuse_cloud.proxy.tenants import Tenants

from ctxreuse.bus.auth.allowlist import ALLOW_FILE, AllowList
from ctxreuse.bus.auth.curve import KeyPair, ServerAuth, public_key
from ctxreuse.daemon.key_file import KeyFile, read_keys
from ctxreuse.identity.keys import tenant_salt
from ctxreuse.lab.opening import open_trace
from ctxreuse.peer.quarantine import Quarantine
from ctxreuse.peer.serve.owners import node_secret
from ctxreuse.testing.clock import FakeClock

DATA = Path(__file__).with_name("data")
FILES = json.loads((DATA / "files/expected.json").read_text("utf-8"))
TRACES = json.loads((DATA / "traces/expected.json").read_text("utf-8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files with the modes that they were made with."""
    copy = tmp_path / "files"
    shutil.copytree(DATA / "files", copy)
    for path in copy.iterdir():
        path.chmod(0o644 if path.suffix == ".pub" else 0o600)
    return copy


def test_key_pairs(folder: Path) -> None:
    for name, known in FILES["keys"].items():
        assert public_key(str(folder / f"{name}.pub")).hex() == known["public"]
        if name != "lost":
            pair = KeyPair.read(folder / f"{name}.key")
            assert (pair.public.hex(), pair.secret.hex()) == (known["public"], known["secret"])
            pair.write(folder / "again.key")
            assert (folder / "again.key").read_bytes() == (folder / f"{name}.key").read_bytes()
            (folder / "again.key").unlink()


def test_allow_list(folder: Path) -> None:
    auth = ServerAuth.open(folder / "cloud.key", folder / ALLOW_FILE)
    assert [
        [one.name, one.public.hex(), one.tenant, one.added.isoformat(), one.revoked and one.revoked.isoformat()]
        for one in AllowList(folder / ALLOW_FILE).entries
    ] == FILES["allowed"]
    assert auth.tenant("laptop") == "me"
    assert auth.admit(bytes.fromhex(FILES["keys"]["lost"]["public"])) is None


def test_secret_of_a_node(folder: Path) -> None:
    secret = node_secret(folder / "node.secret")
    assert secret.hex() == FILES["node"]["secret"]
    assert tenant_salt("me", secret).hex() == FILES["node"]["salt of me"]


def test_quarantine(folder: Path) -> None:
    kept = Quarantine(folder / "quarantine.json", seconds=86400.0, clock=FakeClock(1_700_000_001.0))
    assert {name: [*msgspec.structs.astuple(one)] for name, one in kept.names().items()} == FILES["quarantine"]


def test_tenants_of_a_cloud(folder: Path) -> None:
    table = Tenants(KeyFile(folder / "tenants.json"))
    for name, (tenant, key, salt) in FILES["tenants"].items():
        found = table.find([(b"authorization", f"Bearer {key}".encode())])
        known = (found.tenant, found.scopes, found.expires) if found is not None else None
        assert known == ((tenant, ("answers",), 0.0) if tenant is not None else None)
        assert table.salt(name) == salt


def test_keys_of_an_edge(folder: Path) -> None:
    assert [*read_keys(str(folder / "api-keys"))] == FILES["api-keys"]


def test_requests_of_a_proxy(folder: Path) -> None:
    """Explained by the same reasons; the words for people may be others."""
    book = ProxyRequestLog(folder / FILE)
    for known in FILES["asked"]:
        why = book.explain(known["request"], None)
        assert why is not None
        found: dict[str, Any] = json.loads(msgspec.json.encode(why))
        words = {"text", "advice"}
        assert {n: v for n, v in found.items() if n not in words} == {n: v for n, v in known.items() if n not in words}
    assert book.explain("req-4", "me") is None
    book.close()


@pytest.mark.parametrize("name", TRACES)
def test_recordings(name: str) -> None:
    trace, known = open_trace(DATA / "traces" / name), TRACES[name]
    assert (trace.block_tokens, trace.format) == (known["block_tokens"], known["format"])
    found = [[t, path.tolist(), *rest] for t, path, *rest in trace]
    assert found == known["requests"]
