"""Checksums of turns, token ids and sessions: no other text is ever read, and what is whole stays readable."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest

from ctxreuse.errors import StoreDamagedError
from ctxreuse.store import Ledger, NewTurn, Session, verify
from ctxreuse.store.ledger.history import turn_key
from ctxreuse.store.ledger.records import (
    DamagedTurnError,
    Links,
    decode_id,
    decode_session,
    decode_tokens,
    decode_turn,
    encode_id,
    encode_session,
    encode_tokens,
    encode_turn,
)

SPACE = bytes(range(32))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    with Ledger.open(tmp_path) as ledger:
        ledger.create("trunk", turns=[NewTurn("user", f"text {i} ", {}, bytes(8), SPACE) for i in range(4)])
        ledger.fork("trunk", "twig", at=3)
        ledger.create("apart", turns=[NewTurn("user", "elsewhere")])
    return tmp_path


def change(folder: Path, table: str, key: bytes, new: Any) -> None:
    """Put ``new(old)`` under a key, as damage that LMDB cannot see."""
    with lmdb.open(str(folder / "ledger"), max_dbs=8) as env, env.begin(write=True) as txn:
        db = env.open_db(table.encode(), txn)
        txn.put(key, new(txn.get(key, db=db)), db=db)


def flipped(raw: bytes, bit: int) -> bytes:
    return raw[: bit // 8] + bytes([raw[bit // 8] ^ 1 << bit % 8]) + raw[bit // 8 + 1 :]


def content(ledger: Ledger) -> list[Any]:
    """All that a program can read, for a comparison."""
    found: list[Any] = [(s, ledger.turns(s.head)) for s in ledger.sessions()]
    return [*found, [ledger.tokens(id, SPACE) for id in range(1, 6)], [ledger.session(s.name) for s, _ in found]]


def test_a_damaged_text_names_its_sessions_and_leaves_the_others(kept: Path) -> None:
    change(kept, "turns", turn_key(2), lambda raw: raw.replace(b"text 1", b"text 7"))
    with Ledger.open(kept) as ledger:
        head = ledger.session("trunk").head
        with pytest.raises(StoreDamagedError, match="the text of turn 2 is damaged") as caught:
            ledger.turns(head)
        assert caught.value.where.startswith("session 'trunk', 'twig' in ")
        assert "store rescue" in caught.value.fix
        assert "store restore" in caught.value.fix
        for id in (1, 3, 4):
            assert ledger.turn(id).content == f"text {id - 1} "
        assert ledger.turns(ledger.session("apart").head)[0].content == "elsewhere"
        # Only its text is lost: the history goes on above it, and below it.
        assert ledger.ancestor(1, head)
        assert ledger.append("trunk", [NewTurn("user", "more")])[0].depth == 5
    verdict = verify(kept)
    assert verdict.problems == (
        "the text of turn 2 is damaged: it differs from its checksum (session 'trunk', 'twig')",
    )


def test_every_flipped_bit_is_an_error() -> None:
    key = turn_key(2) + SPACE
    session = Session(bytes(16).hex(), "name", 2, None, 0, 1.0, 2.0)
    records = [
        (encode_turn(2, Links(1, 0, 2), NewTurn("user", "text", {"a": 1}), 1.0), lambda raw: decode_turn(2, raw)),
        (encode_tokens(key, bytes(8)), lambda raw: decode_tokens(key, raw, checked=True)),
        (encode_session(session), lambda raw: decode_session(bytes(16), raw)),
        (encode_id(b"next", 7), lambda raw: decode_id(b"next", raw)),
    ]
    for raw, decode in records:
        decode(raw)
        for bit in range(8 * len(raw)):
            with pytest.raises((StoreDamagedError, DamagedTurnError)):
                decode(flipped(raw, bit))


@pytest.mark.parametrize("cut", [0, 1, 10, 40, 51])
def test_a_cut_record_is_an_error(kept: Path, cut: int) -> None:
    change(kept, "turns", turn_key(2), lambda raw: raw[:cut])
    change(kept, "tokens", turn_key(3) + SPACE, lambda raw: raw[: min(cut, 16) & ~3])
    with Ledger.open(kept) as ledger:
        with pytest.raises(StoreDamagedError, match="turn 2"):
            ledger.turn(2)
        with pytest.raises(StoreDamagedError, match="token ids of turn 3"):
            ledger.tokens(3, SPACE)


def test_a_record_in_another_ones_place_is_an_error(kept: Path) -> None:
    with lmdb.open(str(kept / "ledger"), max_dbs=8) as env, env.begin(write=True) as txn:
        db = env.open_db(b"turns", txn)
        txn.put(turn_key(2), txn.get(turn_key(1), db=db), db=db)
    with Ledger.open(kept) as ledger, pytest.raises(StoreDamagedError, match="turn 2"):
        ledger.turn(2)


def test_a_name_that_leads_elsewhere_is_an_error(kept: Path) -> None:
    with Ledger.open(kept, readonly=True) as ledger:
        other = bytes.fromhex(ledger.session("apart").id)
    change(kept, "names", b"trunk", lambda _: other)
    with Ledger.open(kept) as ledger, pytest.raises(StoreDamagedError, match="leads to session 'apart'"):
        ledger.session("trunk")


def test_an_id_that_was_used_is_not_used_again(kept: Path) -> None:
    change(kept, "info", b"next", lambda _: msgspec.msgpack.encode(2))
    with Ledger.open(kept) as ledger:
        with pytest.raises(StoreDamagedError, match="turn 2 before"):
            ledger.append("trunk", [NewTurn("user", "would be lost")])
        assert len(ledger.turns(ledger.session("trunk").head)) == 4


def test_records_of_the_version_before_are_read_unchecked(kept: Path) -> None:
    """As version 1 wrote them: bare links, MessagePack and ids; what is written from now on is checked."""
    with Ledger.open(kept, readonly=True) as ledger:
        right, sessions = content(ledger), ledger.sessions()
    for id in range(1, 6):
        change(kept, "turns", turn_key(id), lambda raw: raw[:24] + raw[42:])
    for id in range(1, 5):
        change(kept, "tokens", turn_key(id) + SPACE, lambda raw: raw[10:])
    for session in sessions:
        change(kept, "sessions", bytes.fromhex(session.id), lambda raw: raw[10:])
    change(kept, "info", b"next", lambda raw: raw[10:])
    change(kept, "info", b"format", lambda _: msgspec.msgpack.encode(1))
    with lmdb.open(str(kept / "ledger"), max_dbs=8) as env, env.begin(write=True) as txn:
        txn.delete(b"checked", db=env.open_db(b"info", txn))
    old = shutil.copytree(kept, kept / "old")
    with Ledger.open(old, readonly=True) as ledger:
        assert content(ledger) == right
    assert (verify(old).clean, verify(old).unchecked) == (True, 5)
    with Ledger.open(old) as ledger:
        assert content(ledger) == right
        assert ledger.append("trunk", [NewTurn("user", "new", {}, bytes(8), SPACE)])[0].id == 6
        ledger.check()
    assert (verify(old).clean, verify(old).unchecked) == (True, 5)
    # A program of the version before says that it cannot read this.
    with lmdb.open(str(old / "ledger"), max_dbs=8) as env, env.begin() as txn:
        assert txn.get(b"format", db=env.open_db(b"info", txn)) == msgspec.msgpack.encode(2)
    change(old, "tokens", turn_key(6) + SPACE, lambda raw: raw[10:])
    with Ledger.open(old) as ledger, pytest.raises(StoreDamagedError, match="token ids of turn 6"):
        ledger.tokens(6, SPACE)
