"""Sessions that end at a time, limits of namespaces by age and size, pins, and summaries of what goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import AsyncMemory, KeepLimits, Memory, NewTurn, Turn
from ctxreuse_agents.retention import SessionKeeper

from ctxreuse.clock import SteadyClock
from ctxreuse.errors import ConfigError, SessionError
from ctxreuse.store import Ledger
from ctxreuse.store.recall import Recall


class SetClock:
    """Both clocks of a machine, set by the test."""

    def __init__(self) -> None:
        self.wall, self.ticks = 1_000_000.0, 50.0

    def now(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.ticks

    def sleep(self, seconds: float) -> None:
        self.wall += seconds
        self.ticks += seconds


class Kept:
    """A ledger, its index and what keeps it within limits, at a time that the test sets."""

    def __init__(self, path: Path, clock: SetClock, limits: dict[str, KeepLimits] | None = None, **how: Any) -> None:
        self.ledger = Ledger.open(path, clock=clock.now)
        self.recall = Recall(self.ledger, embedder="none")
        self.keeper = SessionKeeper(self.ledger, self.recall, limits or {}, self.ledger.delete, clock=clock, **how)

    @property
    def names(self) -> list[str]:
        return sorted(session.name for session in self.ledger.sessions())

    def close(self) -> None:
        self.recall.close()
        self.ledger.close()


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


def test_a_session_is_found_until_its_time_is_over(tmp_path: Path) -> None:
    with Memory.open(tmp_path, embedder="none") as memory:
        short = memory.create("short", ttl=60, turns=[NewTurn("user", "blue bird")])
        memory.create("long", ttl=timedelta(days=1), turns=[NewTurn("user", "red bird")])
        kept = memory.create("kept", ttl=60, pin=True, turns=[NewTurn("user", "a bird that is pinned")])
        assert len(memory.search("bird")) == 3
        for session in (kept, short):
            session.set_ttl(0.01)
        end = short.record.expires
        assert end is not None
        while memory._state.keeper.clock.now() <= end:
            pass
        assert {hit.session.name for hit in memory.search("bird")} == {"long", "kept"}
        with pytest.raises(SessionError, match="there is no session"):
            memory.session("short", create=False)


def test_times_and_pins_survive_a_restart_and_go_to_forks(tmp_path: Path) -> None:
    with Memory.open(tmp_path, embedder="none") as memory:
        session = memory.create("a", turns=[NewTurn("user", "bird")])
        session.set_ttl(1000)
        session.pin()
        fork = session.fork("fork")
    with Memory.open(tmp_path, embedder="none") as memory:
        one, two = memory.session("a").record, memory.session("fork").record
        assert one.pinned
        assert not two.pinned
        assert one.expires == two.expires == memory.session(fork.id).record.expires is not None
        memory.session("a").pin(False)
        memory.session("a").set_ttl(None)
        assert (memory.session("a").record.pinned, memory.session("a").record.expires) == (False, None)


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), "1d", True, timedelta(0)])
def test_a_time_that_cannot_be_is_refused(memory: Memory, ttl: Any) -> None:
    with pytest.raises(ConfigError, match="ttl is"):
        memory.create("a", ttl=ttl)
    assert memory.sessions() == []


def test_a_clock_that_is_set_deletes_nothing(tmp_path: Path, clock: SetClock) -> None:
    kept = Kept(tmp_path, clock, {"": KeepLimits(age=1000.0)})
    kept.ledger.create("a", expires=clock.now() + 500)
    kept.ledger.create("b")
    clock.wall += 1e7  # someone sets the year
    assert (kept.keeper.expire(), kept.keeper.keep_limits()) == (0, 0)
    clock.wall -= 2e7
    clock.sleep(400)
    assert (kept.keeper.expire(), kept.keeper.keep_limits()) == (0, 0)
    clock.sleep(200)
    assert (kept.keeper.expire(), kept.names) == (1, ["b"])
    clock.sleep(500)
    assert (kept.keeper.keep_limits(), kept.names) == (1, [])
    kept.close()


def test_a_clock_behind_the_last_change_is_not_believed() -> None:
    clock = SetClock()
    steady = SteadyClock(newest=clock.now() + 100, clock=clock)
    assert steady.now() == clock.now() + 100
    clock.sleep(5)
    assert steady.now() == clock.now() + 100


def test_limits_of_age_and_size_by_namespace(tmp_path: Path, clock: SetClock) -> None:
    limits = {
        "ann": KeepLimits(age=timedelta(seconds=100)),
        "bob": KeepLimits(turns=3),
        "eve": KeepLimits(characters=10),
    }
    kept = Kept(tmp_path, clock, limits)
    for n in range(4):
        kept.ledger.create(f"ann{n}", namespace="ann/x")
        kept.ledger.create(f"bob{n}", namespace="bob", turns=[NewTurn("user", "x")], pinned=n == 0)
        kept.ledger.create(f"eve{n}", namespace="eve", turns=[NewTurn("user", "1234")])
        kept.ledger.create(f"annother{n}", namespace="annother")
        clock.sleep(40)
    assert kept.keeper.keep_limits() == 2 + 0 + 2
    assert [name for name in kept.names if not name.startswith("annother")] == [
        "ann2", "ann3", "bob0", "bob1", "bob2", "bob3", "eve2", "eve3",
    ]  # fmt: skip
    kept.ledger.append("bob1", [NewTurn("user", "y")])
    assert kept.keeper.keep_limits() == 1
    assert "bob2" not in kept.names, "the longest unchanged"
    kept.close()


def test_what_goes_is_summed_up_by_the_caller(
    tmp_path: Path, clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    def summarise(turns: Sequence[Turn]) -> str | None:
        if turns[0].content == "bad":
            raise ValueError("no")
        return f"said {turns[0].content}" if turns[0].content != "nothing" else None

    kept = Kept(tmp_path, clock, {"ann": KeepLimits(age=100.0)}, summarise=summarise)
    for name in ("rice", "bad", "nothing", "beans"):
        kept.ledger.create(name, namespace="ann", turns=[NewTurn("user", name)])
        clock.sleep(1)
    clock.sleep(200)
    with caplog.at_level(logging.WARNING):
        assert kept.keeper.keep_limits() == 3
    assert "summary failed" in caplog.text
    assert kept.names == ["ann/summary", "bad"]
    summary = kept.ledger.session("ann/summary")
    assert [turn.content for turn in kept.ledger.turns(summary.head)] == ["said rice", "said beans"]
    clock.sleep(1000)
    kept.keeper.keep_limits()
    assert "ann/summary" in kept.names, "it is pinned"
    kept.close()


def test_limits_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for limits in (KeepLimits(turns=-1), KeepLimits(age=0), KeepLimits(characters="1 MB")):  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            Memory.open(tmp_path, keep={"ann": limits})
    with pytest.raises(SessionError, match="namespace"):
        Memory.open(tmp_path, keep={"/": KeepLimits()})
    with Memory.open(tmp_path):
        pass


def test_a_memory_within_its_limits_in_coroutines(tmp_path: Path) -> None:
    async def story() -> None:
        async with await AsyncMemory.open(tmp_path, embedder="none", keep={"": KeepLimits(turns=1)}) as memory:
            for name in ("a", "b"):
                await memory.create(name, turns=[NewTurn("user", f"bird {name}")])
            session = await memory.session("a")
            await session.pin()
            await session.set_ttl(1000)
            await (await memory.create("c")).user("bird c")
            assert await memory.tidy() == 1
            await memory.index()
            assert len(await memory.sessions()) == 2

    asyncio.run(story())
