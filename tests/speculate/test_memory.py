"""The texts that drafts are made from: whose they are, how much they take, and how they outlive a restart."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ctxreuse.speculate import DraftFile, DraftMemory, DraftPolicy, PassCosts
from ctxreuse.speculate.policy import Confidence, DraftLedger
from support.examples import examples
from support.raw_files import found_in_files

BLOCK, SPACE, SALT = 16, bytes(32), b"tenant"
CALLERS = st.sampled_from(["", "ann", "bob", "sk-secret"])


def text(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, n).astype("<i4")


def keys(ids: np.ndarray) -> list[bytes]:
    """Keys of whole blocks, each of all tokens so far."""
    import hashlib

    return [hashlib.sha256(ids[:end].tobytes()).digest() for end in range(BLOCK, len(ids) + 1, BLOCK)]


class Learning(RuleBasedStateMachine):
    """Callers say texts, some again; what one said is drafted for that one only, and bytes stay in bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = DraftMemory(1 << 16, salt=SALT)
        self.said: dict[str, list[np.ndarray]] = {}

    @rule(caller=CALLERS, n=st.integers(1, 900), seed=st.integers(0, 30))
    def learn(self, caller: str, n: int, seed: int) -> None:
        ids = text(n, seed)
        self.memory.learn(caller, ids, keys(ids), BLOCK)
        self.said.setdefault(caller, []).append(ids)
        if n >= 24:
            index = self.memory.index(caller)
            assert index is not None
            assert index.draft(ids[: n - 4][-20:], 4).ids.tolist() == ids[n - 4 :].tolist(), "the newest text is known"

    @rule(caller=CALLERS)
    def say_again(self, caller: str) -> None:
        index = self.memory.index(caller)
        if index is not None and self.said.get(caller):
            before, ids = self.memory.changes, self.said[caller][-1]
            self.memory.learn(caller, ids, keys(ids), BLOCK)
            assert self.memory.changes - before == bool(len(ids) % BLOCK), "only what fills no block is appended again"

    @rule()
    def clear(self) -> None:
        self.memory.clear()
        self.said.clear()
        assert self.memory.nbytes == 0

    @rule()
    def restart(self) -> None:
        again = DraftMemory(1 << 16, salt=SALT)
        again.restore(self.memory.dump(), self.memory.since)
        assert again.dump() == self.memory.dump()
        assert again.since == self.memory.since
        self.memory = again

    @invariant()
    def bounded(self) -> None:
        self.memory.check()
        assert bool(self.memory.since) == bool(self.memory.dump())


TestLearning = Learning.TestCase
TestLearning.settings = examples("normal", stateful_step_count=20)


@examples("normal")
@given(mine=st.integers(0, 9), theirs=st.integers(10, 19))
def test_no_caller_is_drafted_from_anothers_text(mine: int, theirs: int) -> None:
    memory = DraftMemory(salt=SALT)
    for caller, seed in (("mine", mine), ("theirs", theirs)):
        ids = text(200, seed)
        memory.learn(caller, ids, keys(ids), BLOCK)
    for caller, own, other in (("mine", mine, theirs), ("theirs", theirs, mine)):
        index = memory.index(caller)
        assert index is not None
        assert len(index.draft(text(200, own)[:100], 8).ids) == 8
        assert len(index.draft(text(200, other)[:100], 8).ids) == 0
    # The same text of both: each has it, although its blocks have the same keys.
    shared = text(64, 99)
    for caller in ("mine", "theirs"):
        memory.learn(caller, shared, keys(shared), BLOCK)
        index = memory.index(caller)
        assert index is not None
        assert len(index.draft(shared[:32], 8).ids) == 8


def test_what_began_before_all_was_forgotten_is_not_learnt() -> None:
    memory = DraftMemory()
    began = memory.cleared
    memory.clear()
    ids = text(40, 0)
    memory.learn("", ids, keys(ids), BLOCK, cleared=began)
    assert memory.index("") is None
    memory.learn("", ids, keys(ids), BLOCK, cleared=memory.cleared)
    assert memory.index("") is not None


def opened(folder: Path, *, salt: bytes = SALT, space: bytes = SPACE) -> tuple[DraftFile, DraftMemory, DraftPolicy]:
    memory, policy = DraftMemory(salt=salt), DraftPolicy(PassCosts())
    return DraftFile(folder, space, salt, memory, policy), memory, policy


@pytest.fixture
def saved(tmp_path: Path) -> DraftFile:
    file, memory, policy = opened(tmp_path)
    ids = text(300, 1)
    memory.learn("sk-secret", ids, keys(ids), BLOCK)
    for rows in (1, 4):
        for _ in range(7):
            policy.costs.observe(rows, 1, 0.01 * rows)
    policy.observe([Confidence(8, 1.0)] * 5, 4, DraftLedger())
    file.save()
    return file


def test_texts_costs_and_rates_outlive_a_restart(tmp_path: Path, saved: DraftFile) -> None:
    assert stat.S_IMODE(saved.path.stat().st_mode) == 0o600
    assert b"sk-secret" not in saved.path.read_bytes()
    file, memory, policy = opened(tmp_path)
    assert file.load()
    index = memory.index("sk-secret")
    assert index is not None
    ids = text(300, 1)
    assert index.draft(ids[:100], 8).ids.tolist() == ids[100:108].tolist()
    before = memory.changes
    memory.learn("sk-secret", ids[:288], keys(ids)[:18], BLOCK)
    assert memory.changes == before, "it knows that it has this text"
    assert policy.costs.seconds(1) == pytest.approx(0.01)
    assert policy.costs.known(4)
    assert policy.dump() == [((3, 4, False), 5.0, 4.0)]
    written = saved.path.stat().st_mtime
    file.save()
    assert saved.path.stat().st_mtime == written, "nothing is new"


def test_no_other_tenant_or_model_reads_it(tmp_path: Path, saved: DraftFile) -> None:
    for other in ({"salt": b"another"}, {"space": bytes([1]) * 32}):
        file, memory, _ = opened(tmp_path, **other)
        assert file.path != saved.path
        file.path.write_bytes(saved.path.read_bytes())
        assert not file.load()
        assert memory.nbytes == 0


@examples("light")
@given(data=st.data())
def test_a_damaged_file_counts_as_none(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("drafts")
    file, memory, _ = opened(folder)
    ids = text(100, 2)
    memory.learn("", ids, keys(ids), BLOCK)
    file.save()
    raw = bytearray(file.path.read_bytes())
    how = data.draw(st.sampled_from(["cut", "flip", "other"]))
    if how == "cut":
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    elif how == "flip":
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        raw = bytearray(data.draw(st.binary(max_size=200)))
    file.path.write_bytes(raw)
    again, empty, _ = opened(folder)
    assert not again.load()
    assert empty.nbytes == 0
    empty.learn("", ids, keys(ids), BLOCK)
    again.save()
    assert opened(folder)[0].load(), "it is written anew"


@pytest.mark.parametrize(
    "body",
    [
        [2, b"", {}, [], 0.0, []],
        [1, b"another", {}, [], 0.0, []],
        ["own", {}, [], 1.0, [[b"name", np.array([3, -2], "<i4").tobytes(), []]]],
        ["own", {}, [], 1.0, [[b"name", b"123", []]]],
        ["own", {1: [float("nan"), -1.0]}, [[[1, 1, False], 2.0, 3.0]], 0.0, []],
    ],
)
def test_files_that_this_version_did_not_write(tmp_path: Path, body: list[object]) -> None:
    import hashlib

    file, memory, policy = opened(tmp_path)
    if body[0] == "own":
        body = [1, file._owner, *body[1:]]
    raw = msgspec.msgpack.encode(body)
    file.path.write_bytes(hashlib.blake2b(raw, digest_size=16).digest() + raw)
    file.load()
    assert memory.nbytes == 0
    assert policy.dump() == []
    assert policy.costs.seconds(1) is None


def test_what_is_forgotten_is_in_no_file(tmp_path: Path, saved: DraftFile) -> None:
    ids = text(300, 1)
    assert found_in_files(tmp_path, [], [ids.tolist()])
    other, memory, _ = opened(tmp_path, space=bytes([7]) * 32)
    memory.learn("", ids, keys(ids), BLOCK)
    other.save()
    saved.path.with_name(saved.path.name + ".new").write_bytes(ids.tobytes())  # a process was killed in mid-write
    saved.forget()
    assert found_in_files(tmp_path, [], [ids.tolist()]) == [], "nor in that of a model that is not open"
