"""Sessions that allow loss and those that do not: who says so, who inherits it, and what each is served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import AsyncMemory, Memory

from ctxreuse.block import parse
from ctxreuse.codec import Codec, Shelf
from ctxreuse.errors import ConfigError
from ctxreuse.runtime import Runtime
from ctxreuse.store import Ledger, open_store
from ctxreuse.testing.plain_card import shelved
from ctxreuse.testing.sealed import random_tokens, seal

LONG = "It was a bright cold day in April, and the clocks were striking thirteen. " * 4
SHORT = {"max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def coded(tiny: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny engine with a card on a shelf of its own."""
    engine = tiny(block_tokens=32)
    views = [parse(data) for data in seal(engine, random_tokens(engine, 6 * 32, seed=5)).blocks]
    engine.codec = shelved(engine.space, views, tmp_path_factory.mktemp("cards"))
    return engine


@pytest.fixture
def bare(tiny: Callable[..., Any], tmp_path: Path) -> Any:
    """A tiny engine without any card."""
    engine = tiny()
    engine.codec = Codec(engine.space, shelf=Shelf(tmp_path / "none"))
    return engine


@pytest.fixture
def opened(coded: Any, tmp_path: Path) -> Iterator[Callable[..., Memory]]:
    """opened(lossy=…) -> the memory in one folder, whose store keeps blocks at kl-0.05 where it may."""
    closing: list[Callable[[], None]] = []

    def end() -> None:
        while closing:
            closing.pop()()

    def start(**options: Any) -> Memory:
        end()
        ledger = Ledger.open(tmp_path / "m")
        closing.append(ledger.close)
        store = open_store(tmp_path / "m", level="kl-0.05")
        closing.append(store.close)
        memory = Memory(ledger, Runtime(coded, store), **options)
        closing.append(memory.close)
        return memory

    yield start
    end()


def test_a_session_comes_back_to_lossy_kv_only_if_it_allows_that(opened: Callable[..., Memory]) -> None:
    memory = opened()
    loose, strict = memory.session("loose", lossy="kl-0.05"), memory.session("strict")
    assert (loose.lossy, strict.lossy) == ("kl-0.05", None)
    for session, first in ((loose, "One. "), (strict, "Two. ")):
        session.user(first + LONG)
        assert session.ask("Go on", **SHORT).text
    memory.flush()

    memory = opened()
    loose, strict = memory.session("loose"), memory.session("strict")
    assert (loose.lossy, strict.lossy) == ("kl-0.05", None)
    one, two = loose.ask("And now?", **SHORT), strict.ask("And now?", **SHORT)
    assert one.text
    assert two.text
    assert one.usage.approx
    assert one.usage.by_level["kl-0.05"] >= 200
    assert not two.usage.approx
    assert two.usage.by_level == {"exact+rans": two.usage.cached_tokens} or "kl-0.05" not in two.usage.by_level
    assert two.usage.cached_tokens >= 200
    memory.flush()
    memory.check()
    levels = memory.stats().blocks
    assert levels is not None
    assert levels.levels["approx"] > 0


def test_an_exact_session_answers_as_if_lossy_ones_did_not_exist(opened: Callable[..., Memory], coded: Any) -> None:
    text = Memory.__doc__ or LONG
    memory = opened()
    memory.session("loose", lossy="kl-0.05").user(LONG + text)
    memory.session("loose").warm()
    memory.flush()
    memory = opened()
    strict = memory.session("strict")
    strict.user(LONG + text)  # the same keys
    answer = strict.ask("Well?", max_tokens=12, ignore_eos=True)
    assert answer.text
    assert answer.usage.missed == "level"
    assert not answer.usage.approx
    fresh = Runtime(coded).complete(strict.tokens()[: answer.usage.prompt_tokens], answer._completion._sampling)
    fresh.drain()
    assert fresh.tokens == answer.tokens


def test_forks_inherit_and_may_change_their_mind(opened: Callable[..., Memory]) -> None:
    memory = opened()
    session = memory.create("one", lossy="kl-0.05")
    session.user(LONG)
    fork = session.fork("two")
    assert fork.lossy == "kl-0.05"
    assert memory.session("two", lossy="exact").lossy is None
    assert memory.session("two").fork().lossy is None
    assert session.lossy == "kl-0.05"


def test_a_memory_says_it_for_sessions_that_do_not(opened: Callable[..., Memory]) -> None:
    memory = opened(lossy="kl-0.01")
    memory.create("silent")
    memory.create("strict", lossy="exact")
    memory.create("loose", lossy="kl-0.05")
    found = {name: memory.session(name).lossy for name in ("silent", "strict", "loose")}
    assert found == {"silent": "kl-0.01", "strict": None, "loose": "kl-0.05"}
    assert memory.session("silent").fork("child").lossy == "kl-0.01"
    memory = opened()
    found = {name: memory.session(name).lossy for name in ("silent", "strict", "loose", "child")}
    assert found == {"silent": None, "strict": None, "loose": "kl-0.05", "child": None}


def test_without_a_card_it_is_refused_and_says_what_to_do(bare: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ctxreuse calibrate"):
        Memory.open(tmp_path / "m", bare, lossy="kl-0.01")
    with Memory.open(tmp_path / "m", bare) as memory:
        for attempt in (memory.create, memory.session):
            with pytest.raises(ConfigError, match="ctxreuse calibrate"):
                attempt("new", lossy="kl-0.01")
        with pytest.raises(ConfigError, match="no such lossy level"):
            memory.create("new", lossy="q4")
        assert not memory.sessions()
    with Memory.open(tmp_path / "m") as text_only:  # who computes later decides then
        assert text_only.create("later", lossy="kl-0.01").lossy == "kl-0.01"
    with Memory.open(tmp_path / "m", bare) as memory, pytest.raises(ConfigError, match="ctxreuse calibrate"):
        memory.session("later").ask("Why?")
    with Memory.open(tmp_path / "m", bare) as memory:
        assert not memory.session("later").turns()


async def _async_sessions(path: Path) -> tuple[str | None, str | None]:
    async with await AsyncMemory.open(path, lossy="kl-0.05") as memory:
        one = await memory.create("one", lossy="kl-0.01")
        two = await memory.session("two")
        return one.lossy, two.lossy


def test_the_async_face_says_it_too(tmp_path: Path) -> None:
    import asyncio

    assert asyncio.run(_async_sessions(tmp_path / "m")) == ("kl-0.01", "kl-0.05")


def test_ledgers_of_before_are_read_and_read_as_before(tmp_path: Path) -> None:
    from ctxreuse.store.ledger_records import decode_session, encode_session

    with Ledger.open(tmp_path) as ledger:
        plain, loose = ledger.create("plain"), ledger.create("loose", lossy="kl-0.05")
    raw = encode_session(plain)
    assert raw[0] == 0x96, "six fields, as programs before levels wrote and want them"
    assert decode_session(bytes.fromhex(plain.id), raw) == plain
    assert decode_session(bytes.fromhex(loose.id), encode_session(loose)) == loose
