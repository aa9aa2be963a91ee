"""Folders of version 0.1.0 open: its ledger, cache, chunk index, requests and what it had learnt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ctxreuse_agents import Memory
from ctxreuse_edge.contexts import NamedContexts

from ctxreuse.config import StoreConfig
from ctxreuse.cost import CostModel
from ctxreuse.daemon.lifecycle import read_address
from ctxreuse.runtime import Runtime
from ctxreuse.runtime.compaction import migrate_folder
from ctxreuse.store import Ledger, TieredStore, open_store, verify
from ctxreuse.store.lmdb.owner import boot_id
from ctxreuse.store.recall import Filters, Recall
from ctxreuse.why import FILE, RequestLog, read_requests

DATA = Path(__file__).with_name("data") / "stores"
CACHE = json.loads((DATA / "cache.json").read_text("utf-8"))
EDGE = json.loads((DATA / "edge.json").read_text("utf-8"))
#: Worse than any level that is kept.
ANY = 1000.0

Unpacked = Callable[[str], Path]


def plain(value: Any) -> Any:
    """As JSON has it: lists for tuples, base64 for bytes."""
    return json.loads(msgspec.json.encode(value))


def held(store: TieredStore) -> dict[str, Any]:
    """All blocks and states of a store by key, with digests of their bytes."""
    found: dict[str, Any] = {}
    entries = [tuple(entry) for entry in store.walk()]
    with store.read(ANY) as reader:
        for key, parent, tokens, end, nbytes, has_state, level, state_level in entries:
            block, state = reader.peek(key), reader.peek(key, "state")
            found[key.hex()] = {
                "parent": parent.hex(),
                "tokens": tokens,
                "end": end,
                "nbytes": nbytes,
                "level": level,
                "state": state_level if has_state else None,
                "block_sha256": hashlib.sha256(block.buffer).hexdigest() if block is not None else None,
                "state_sha256": hashlib.sha256(state.buffer).hexdigest() if state is not None else None,
            }
    return found


def assert_as_before(store: TieredStore, expected: dict[str, Any]) -> None:
    assert held(store) == expected.get("entries")
    assert [key.hex() for key in store.recent()] == expected["recent"]
    stats = store.stats()
    assert stats.blocks == expected["blocks"]
    assert stats.states == expected["states"]
    assert stats.levels == expected["levels"]
    # What the policies learnt: who leads, changes of the leader, tokens asked for, served, and by contender.
    assert stats.policy is not None
    *standing, served = list(msgspec.structs.astuple(stats.policy))[:5]
    *before, served_before = expected["standing"].values()
    assert standing == before
    assert served == dict.fromkeys(served, 0) | served_before  # experts that came since have served nothing
    given = stats.fields()
    assert [given["standing"][name] for name in expected["standing"]] == [*standing, served]
    assert (given["demoted"], given["standing"]["weights"]) == (stats.recompressed, stats.policy.weights)
    store.check()


def assert_removals(store: TieredStore, expected: dict[str, list[Any]]) -> None:
    for key, known in expected.items():
        removal = store.removal(bytes.fromhex(key))
        assert removal is not None
        at, how, why, by = msgspec.structs.astuple(removal)
        assert [at, how, why, by.hex()] == known


def assert_chunks(store: TieredStore, expected: dict[str, Any]) -> None:
    assert len(store.chunks) == len(expected)
    for key, homes in zip(expected, store.chunks.locations_many([bytes.fromhex(key) for key in expected])):
        assert [[[k.hex() for k in keys], *rest] for keys, *rest in homes] == expected[key]
    store.chunks.check()


def reopened(folder: Path) -> TieredStore:
    return open_store(folder, capacity=CACHE["capacity"], host_bytes=1 << 20)


def test_cache(unpacked: Unpacked) -> None:
    with reopened(unpacked("stores/cache")) as store:
        assert store.disk is not None
        assert store.disk.stats().recovered == ""
        assert_as_before(store, CACHE)
        assert_removals(store, CACHE["gone"])
        assert_chunks(store, CACHE["chunks"])


@pytest.mark.parametrize(("boot", "recovered"), [(None, "verified"), (boot_id(), "kept")])
def test_cache_after_a_crash(unpacked: Unpacked, boot: str | None, recovered: str) -> None:
    """Its owner died: with the machine, then everything is compared; or alone, then LMDB's word is taken."""
    folder = unpacked("stores/cache")
    owner = json.loads((DATA / "owner-of-a-crash.json").read_text("utf-8"))
    owner["parts"]["blocks"]["boot"] = boot if boot is not None else owner["boot"]
    (folder / "owner.json").write_text(json.dumps(owner), "utf-8")
    with reopened(folder) as store:
        assert store.disk is not None
        assert store.disk.stats().recovered == recovered
        assert_as_before(store, CACHE)
        assert_chunks(store, CACHE["chunks"])


def test_cache_opened_for_reading(unpacked: Unpacked) -> None:
    folder = unpacked("stores/cache")
    with open_store(folder, readonly=True) as beside:
        assert held(beside) == CACHE["entries"]


#: Fields of a session that version had not.
NEW = {"namespace": "", "expires": None, "pinned": False}


def test_ledger(unpacked: Unpacked) -> None:
    folder = unpacked("stores/edge") / "store"
    with Ledger.open(folder) as ledger:
        assert plain(ledger.sessions()) == [session | NEW for session in EDGE["sessions"]]
        for session in EDGE["sessions"]:
            turns = ledger.turns(ledger.session(session["name"]).head)
            for turn, known in zip(turns, EDGE["turns"][session["name"]], strict=True):
                kept = {at.hex(): ledger.tokens(turn.id, at) for at in ledger.spaces(turn.id)}
                tokens = {at: hashlib.sha256(ids or b"").hexdigest() for at, ids in kept.items()}
                assert plain(turn) | {"token_sha256": tokens} == known
        with closing(Recall(ledger)) as recall:
            for words, hits in EDGE["search"].items():
                found = recall.search(words, Filters(), len(hits))
                assert {(hit.session.name, hit.turn.id) for hit in found} == {(name, id) for name, id, _ in hits}
        assert plain(ledger.stats()).items() >= EDGE["ledger"].items()
        ledger.check()
        assert ledger.gc() == 0  # nothing was left to remove
        fork = ledger.fork("planning", "mine")
        assert ledger.turns(fork.head)[-1].id == EDGE["turns"]["planning"][-1]["id"]
        ledger.check()


def test_requests(unpacked: Unpacked) -> None:
    """Each as it was written, array for array; and they are explained by the same reasons."""
    folder = unpacked("stores/edge") / "store"
    book = read_requests(folder)
    # Nothing was reordered, drafted, verified or let out early.
    requests = [[*known, None, None, None, None] for known in EDGE["requests"]]
    assert plain(book.entries()) == requests
    assert {e.space.hex() for e in book.entries()} == {EDGE["digest"], EDGE["windows_digest"]}
    for digest in (EDGE["digest"], EDGE["windows_digest"]):
        space = book.space(bytes.fromhex(digest))
        assert space is not None
        assert space.digest.hex() == digest
    again = RequestLog(folder / FILE).open()
    assert plain(again.entries()) == requests
    again.check()
    again.close()


def test_state_of_an_edge(unpacked: Unpacked, models: dict[str, Any]) -> None:
    """What lies beside the store: costs, pauses, pins, the address of a daemon."""
    folder = unpacked("stores/edge") / "store"
    cost = CostModel()
    assert cost.restore((folder / "cost.bin").read_bytes())
    assert cost.prefill.coefficients == pytest.approx(EDGE["cost_coefficients"])
    address = read_address(folder / "edge.json")
    assert address is not None
    assert msgspec.structs.astuple(address) == ("http://127.0.0.1:7351", 4242, "edge", 1_700_000_000.5, "")
    with Ledger.open(folder) as ledger, open_store(folder, capacity=64 << 20) as store:
        runtime = Runtime(models["llama"], store)
        assert runtime.paused.recall(folder / "pauses.bin")
        contexts = NamedContexts(ledger, runtime, store, folder / "pins.json")
        contexts.check()
        assert [plain(msgspec.structs.astuple(one)) for one in contexts.newest(100)] == [
            [*known.values()] for known in EDGE["contexts"]
        ]
        runtime.close()


def test_spaces_of_models(models: dict[str, Any]) -> None:
    assert plain(models["llama"].space) == EDGE["space"]
    assert models["llama"].space.digest.hex() == EDGE["digest"]
    assert plain(models["gemma"].space) == EDGE["windows"]
    assert models["gemma"].space.digest.hex() == EDGE["windows_digest"]


def test_a_store_goes_on(unpacked: Unpacked, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """New questions in old conversations are not computed anew, at any level, moved documents included."""
    folder = unpacked("stores/edge")
    monkeypatch.setenv("CTXREUSE_CARDS", str(folder / "cards"))
    with open_store(folder / "store", capacity=64 << 20) as store:
        assert_as_before(store, EDGE["store"])
        assert_removals(store, EDGE["gone"])
        assert_chunks(store, EDGE["chunks"])
    with Memory.open(folder / "store", models["llama"]) as memory:
        memory.check()
        for name, known in EDGE["again"].items():
            answer = memory.session(name, create=False).fork().ask("Something new?", max_tokens=1)
            assert answer.text is not None
            usage = answer.usage
            assert (usage.prompt_tokens, usage.cached_tokens, usage.why) == (
                known["prompt"],
                known["cached"],
                known["why"],
            )
            assert (usage.tokens.by_source, usage.tokens.by_level) == (known["by_source"], known["by_level"])
        assert memory.runtime is not None
        for known in EDGE["why"]:
            why = memory.runtime.why(known["request"])
            assert (why.reason, why.prompt_tokens, why.cached_tokens) == (
                known["reason"],
                known["prompt_tokens"],
                known["cached_tokens"],
            )
            assert [(s.start, s.end, s.reason) for s in why.spans] == [
                (s["start"], s["end"], s["reason"]) for s in known["spans"]
            ]
        memory.check()


def test_exported_sessions(tmp_path: Path) -> None:
    exported = json.loads((DATA / "export.json").read_text("utf-8"))
    with Memory.open(tmp_path / "memory") as memory:
        for name, session in exported.items():
            copy = memory.import_json(session)
            assert copy.name == session["name"] == name
            assert plain(memory.export_json(copy)) == session
        memory.check()


def test_a_store_is_migrated(unpacked: Unpacked) -> None:
    """``ctxreuse store migrate``: all is there as before, and every record has its checksum."""
    folder = unpacked("stores/edge") / "store"
    with Ledger.open(folder, readonly=True) as ledger:
        before = {one.id: ledger.turns(one.head) for one in ledger.sessions()}
        names = plain(ledger.sessions())
    assert verify(folder).unchecked > 0
    made = migrate_folder(StoreConfig(path=str(folder), capacity=64 << 20))
    assert made.turns > 0
    assert (verify(folder).clean, verify(folder).unchecked) == (True, 0)
    with Ledger.open(folder) as ledger:
        assert plain(ledger.sessions()) == names
        assert {one.id: ledger.turns(one.head) for one in ledger.sessions()} == before
        ledger.check()
    assert migrate_folder(StoreConfig(path=str(folder), capacity=64 << 20)).turns == 0
