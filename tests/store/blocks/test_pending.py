"""A pause that is reported before its blocks are stored takes effect when they are."""

from __future__ import annotations

from pathlib import Path

from ctxreuse.pauses.kinds import CLOSED, TOOL_CALL
from ctxreuse.store import BlockStore
from ctxreuse.store.blocks.pending import PendingPauseLabels
from ctxreuse.testing.store import Context
from oracle.policy.lru import LRU


class Heard(LRU[bytes]):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[tuple[bytes, int]] = []

    def on_pause(self, tip: bytes, label: int, now: float) -> None:
        self.marks.append((tip, label))


def test_marks_wait_for_their_blocks(tmp_path: Path) -> None:
    policy = Heard()
    with BlockStore.open(tmp_path, policy=policy) as store:
        context = Context(4)
        keys = context.keys
        store.on_pause(keys, TOOL_CALL)
        assert policy.marks == []
        assert context.fill(store) == 4
        assert policy.marks == [(keys[-1], TOOL_CALL)]
        store.on_pause(keys, CLOSED)
        assert policy.marks[1:] == [(keys[-1], CLOSED)]


def test_what_is_needed_again_has_not_paused() -> None:
    early = PendingPauseLabels()
    early.add(b"a", 1)
    early.add(b"b", 2)
    early.discard([b"a", b"x"])
    assert list(early.pop([b"a", b"b"])) == [(b"b", 2)]
    assert list(early.pop([b"b"])) == []
    for n in range(5000):
        early.add(b"%d" % n, 1)
    assert len(early) <= 1024
