"""Sessions that allow loss and those that do not: who says so, who inherits it, and what each is served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ctxreuse_agents import AsyncMemory, Memory

from ctxreuse.block.format import parse
from ctxreuse.codec import Codec, ProfileStore
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.errors import ConfigError
from ctxreuse.runtime import Runtime
from ctxreuse.store import Ledger, open_store
from ctxreuse.testing.profiles import plain_codec
from ctxreuse.testing.sealed import random_tokens, seal

LONG = "It was a bright cold day in April, and the clocks were striking thirteen. " * 4
SHORT = {"max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def coded(tiny: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny engine with a card on a shelf of its own."""
    engine = tiny(block_tokens=32)
    views = [parse(data) for data in seal(engine, random_tokens(engine, 6 * 32, seed=5)).blocks]
    engine.codec = plain_codec(engine.space, views, tmp_path_factory.mktemp("cards"))
    return engine


@pytest.fixture
def bare(tiny: Callable[..., Any], tmp_path: Path) -> Any:
    """A tiny engine without any card."""
    engine = tiny()
    engine.codec = Codec(engine.space, profiles=ProfileStore(tmp_path / "none"))
    return engine


@pytest.fixture
def opened(coded: Any, tmp_path: Path) -> Iterator[Callable[..., Memory]]:
    """opened(max_kl=…) -> the memory in one folder, whose store keeps blocks at kl-0.05 where it may."""
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
    loose, strict = memory.session("loose", max_kl=0.05), memory.session("strict")
    assert (loose.max_kl, strict.max_kl) == (0.05, None)
    for session, first in ((loose, "One. "), (strict, "Two. ")):
        session.user(first + LONG)
        assert session.ask("Go on", **SHORT).text
    memory.flush()

    memory = opened()
    loose, strict = memory.session("loose"), memory.session("strict")
    assert (loose.max_kl, strict.max_kl) == (0.05, None)
    one, two = loose.ask("And now?", **SHORT), strict.ask("And now?", **SHORT)
    assert one.text
    assert two.text
    assert one.usage.approximate
    assert one.usage.tokens.by_level["kl-0.05"] >= 200
    assert not two.usage.approximate
    assert (
        two.usage.tokens.by_level == {"exact+rans": two.usage.cached_tokens}
        or "kl-0.05" not in two.usage.tokens.by_level
    )
    assert two.usage.cached_tokens >= 200
    memory.flush()
    memory.check()
    levels = memory.stats().blocks
    assert levels is not None
    assert levels.levels["approx"] > 0


def test_an_exact_session_answers_as_if_lossy_ones_did_not_exist(opened: Callable[..., Memory], coded: Any) -> None:
    text = Memory.__doc__ or LONG
    memory = opened()
    memory.session("loose", max_kl=0.05).user(LONG + text)
    memory.session("loose").warm()
    memory.flush()
    memory = opened()
    strict = memory.session("strict")
    strict.user(LONG + text)  # the same keys
    answer = strict.ask("Well?", max_tokens=12, ignore_eos=True)
    assert answer.text
    assert answer.usage.miss_reason == "level"
    assert not answer.usage.approximate
    fresh = Runtime(coded).complete(
        strict.tokens()[: answer.usage.prompt_tokens], SamplingParams(max_tokens=12, ignore_eos=True)
    )
    fresh.drain()
    assert fresh.tokens == answer.tokens


def test_forks_inherit_and_may_change_their_mind(opened: Callable[..., Memory]) -> None:
    memory = opened()
    session = memory.create("one", max_kl=0.05)
    session.user(LONG)
    fork = session.fork("two")
    assert fork.max_kl == 0.05
    assert memory.session("two", max_kl=0.0).max_kl is None
    assert memory.session("two").fork().max_kl is None
    assert session.max_kl == 0.05


def test_a_memory_says_it_for_sessions_that_do_not(opened: Callable[..., Memory]) -> None:
    memory = opened(max_kl=0.01)
    memory.create("silent")
    memory.create("strict", max_kl=0.0)
    memory.create("loose", max_kl=0.05)
    found = {name: memory.session(name).max_kl for name in ("silent", "strict", "loose")}
    assert found == {"silent": 0.01, "strict": None, "loose": 0.05}
    assert memory.session("silent").fork("child").max_kl == 0.01
    memory = opened()
    found = {name: memory.session(name).max_kl for name in ("silent", "strict", "loose", "child")}
    assert found == {"silent": None, "strict": None, "loose": 0.05, "child": None}


def test_without_a_card_it_is_refused_and_says_what_to_do(bare: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ctxreuse calibrate"):
        Memory.open(tmp_path / "m", bare, max_kl=0.01)
    with Memory.open(tmp_path / "m", bare) as memory:
        for attempt in (memory.create, memory.session):
            with pytest.raises(ConfigError, match="ctxreuse calibrate"):
                attempt("new", max_kl=0.01)
        with pytest.raises(ConfigError, match="no such lossy level"), pytest.warns(DeprecationWarning, match="max_kl"):
            memory.create("new", lossy="q4")
        assert not memory.sessions()
    with Memory.open(tmp_path / "m") as text_only:  # who computes later decides then
        assert text_only.create("later", max_kl=0.01).max_kl == 0.01
    with Memory.open(tmp_path / "m", bare) as memory, pytest.raises(ConfigError, match="ctxreuse calibrate"):
        memory.session("later").ask("Why?")
    with Memory.open(tmp_path / "m", bare) as memory:
        assert not memory.session("later").turns()


def test_without_an_engine_a_level_that_does_not_exist_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such lossy level"), pytest.warns(DeprecationWarning, match="max_kl"):
        Memory.open(tmp_path / "m", lossy="tiny")
    assert not (tmp_path / "m").exists()


async def _async_sessions(path: Path) -> tuple[float | None, float | None]:
    async with await AsyncMemory.open(path, max_kl=0.05) as memory:
        one = await memory.create("one", max_kl=0.01)
        two = await memory.session("two")
        return one.max_kl, two.max_kl


def test_the_async_face_says_it_too(tmp_path: Path) -> None:
    import asyncio

    assert asyncio.run(_async_sessions(tmp_path / "m")) == (0.01, 0.05)


def test_ledgers_of_before_are_read_and_read_as_before(tmp_path: Path) -> None:
    from ctxreuse.store.ledger.records import decode_session, encode_session

    with Ledger.open(tmp_path) as ledger:
        plain, loose = ledger.create("plain"), ledger.create("loose", max_kl=0.05)
    # Six fields, as programs before levels wrote them, without a checksum.
    raw = msgspec.msgpack.encode(msgspec.structs.astuple(plain)[1:-1])
    assert decode_session(bytes.fromhex(plain.id), raw) == plain
    assert decode_session(bytes.fromhex(plain.id), encode_session(plain)) == plain
    assert decode_session(bytes.fromhex(loose.id), encode_session(loose)) == loose


def test_the_old_names_of_levels_still_work_for_one_version(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="max_kl"):
        memory = Memory.open(tmp_path / "m", lossy="kl-0.05")
    with memory:
        with pytest.warns(DeprecationWarning, match="max_kl"):
            session = memory.create("one", max_kl="exact")
        with pytest.warns(DeprecationWarning, match="max_kl"):
            other = memory.session("two", lossy="kl-0.01")
        assert (session.max_kl, other.max_kl, memory.create("three").max_kl) == (None, 0.01, 0.05)
        with pytest.warns(DeprecationWarning, match="max_kl"):
            assert other.lossy == "kl-0.01"
