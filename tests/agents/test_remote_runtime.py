"""Memory attached to a running edge daemon: texts stay here, computing and KV are the daemon's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import Memory
from ctxreuse_agents.remote_runtime import RemoteRuntime, attach

from ctxreuse.errors import ConfigError, ContextTooLongError, LinkDownError
from ctxreuse.runtime import RuntimeProtocol
from support.edge_daemon import Daemon
from support.tiny_text import save_model
from support.waiting import until

pytestmark = pytest.mark.daemon


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def daemon(model: Path, tmp_path_factory: pytest.TempPathFactory, child_env: dict[str, str]) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("edge"), model, child_env)
    yield daemon
    daemon.kill()


@pytest.fixture(scope="module")
def url(daemon: Daemon) -> str:
    return daemon.start()


def test_it_answers_as_an_engine_of_its_own_would(url: str, model: Path, tmp_path: Path) -> None:
    texts = []
    for name, engine in (("far", url), ("near", str(model))):
        with Memory.open(tmp_path / name, engine=engine) as memory:
            session = memory.create("s")
            session.system("Be brief.")
            first = session.ask("What is the time? " * 8, max_tokens=16)
            pieces = list(first)
            assert "".join(pieces) == first.text
            second = session.ask("And the date?", max_tokens=16)
            texts.append((first.text, first.tokens, second.text, second.finish))
            # The first turn's KV is found again, wherever it is.
            assert second.usage.cached_tokens >= first.usage.prompt_tokens
            memory.check()
    assert texts[0] == texts[1]


def test_further_answers_come_of_one_request_to_the_daemon(url: str, model: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"n": 3, "max_tokens": 6, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    texts = []
    for name, engine in (("far", url), ("near", str(model))):
        with Memory.open(tmp_path / name, engine=engine) as memory:
            first = memory.create("s").ask("Which way? " * 8, **how)
            # The last one first: whoever reads one lets all advance.
            texts.append([one.text for one in reversed((first, *first.others))])
            assert [one.usage.prompt_tokens > 0 for one in (first, *first.others)] == [True, False, False]
            assert [one.usage.tokens.completion for one in first.others] == [6, 6]
            assert len({one.usage.request for one in (first, *first.others)}) == 1
            memory.check()
    assert texts[0] == texts[1]


def test_nothing_of_torch_is_loaded_and_no_kv_is_kept_here(url: str, tmp_path: Path, child_env: dict[str, str]) -> None:
    code = (
        "import sys; from ctxreuse_agents import Memory\n"
        "with Memory.open(sys.argv[1], engine=sys.argv[2]) as memory:\n"
        "    assert memory.session('s').ask('Who?', max_tokens=3).usage.prompt_tokens > 0\n"
        "assert not {'torch', 'transformers', 'zmq'} & set(sys.modules), 'heavy'\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "m"), url], check=True, env=child_env)
    assert not (tmp_path / "m" / "blocks").exists()


def test_warm_evict_and_fork(url: str, tmp_path: Path) -> None:
    with Memory.open(tmp_path / "m", engine=url) as memory:
        session = memory.create("doc")
        session.user("A document of no great length. " * 12)
        assert session.warm().cached_tokens < 64
        fork = session.fork("other")
        answer = fork.ask("What does it say?", max_tokens=4)
        assert answer.usage.cached_tokens >= len(session.tokens()) // 64 * 64
        answer.close()
        assert fork.evict() > 0  # with a fork's KV gone, what it shared goes too
        memory.delete("other")
        assert session.warm().cached_tokens < 64


def test_letting_go_of_an_answer_ends_it_in_the_daemon(url: str, tmp_path: Path) -> None:
    with Memory.open(tmp_path / "m", engine=url) as memory:
        session = memory.create("s")
        with session.ask("Tell me a long story.", max_tokens=1500, ignore_eos=True) as answer:
            next(iter(answer))
        assert answer.finish == "cancelled"
        assert session.turns()[-1].role == "assistant"
        runtime = memory.runtime
        assert isinstance(runtime, RemoteRuntime)
        # The question itself is one of the requests that are held.
        until(lambda: runtime.client.call("GET", "/api/status")["requests"]["held"] <= 1, 30)
        assert session.ask("Shorter.", max_tokens=2).text is not None


def test_what_cannot_be_done_says_so(url: str, tmp_path: Path) -> None:
    with Memory.open(tmp_path / "m", engine=url) as memory:
        session = memory.create("s")
        with pytest.raises(ContextTooLongError):
            session.ask("x" * 5000)
        assert session.turns() == []
        assert isinstance(memory.runtime, RuntimeProtocol)
        assert memory.engine is None


def test_addresses_that_are_none(tmp_path: Path) -> None:
    for wrong in ("http://", "http://127.0.0.1:x"):
        with pytest.raises(ConfigError):
            attach(wrong)
    with pytest.raises(LinkDownError, match="no daemon answers"):
        Memory.open(tmp_path / "m", engine="http://127.0.0.1:1")
    # The ledger was given back.
    with Memory.open(tmp_path / "m"):
        pass


def test_a_daemon_that_dies_costs_the_answer_and_no_text(daemon: Daemon, url: str, tmp_path: Path) -> None:
    with Memory.open(tmp_path / "m", engine=url) as memory:
        session = memory.create("s")
        answer = session.ask("Tell me a long story.", max_tokens=1800, ignore_eos=True)
        pieces = iter(answer)
        next(pieces)
        daemon.kill()
        with pytest.raises(LinkDownError):
            list(pieces)
        assert answer.finish == "error"
        assert [turn.role for turn in session.turns()][:1] == ["user"]
        with pytest.raises(LinkDownError):
            list(session.ask("Again?", max_tokens=2))
        memory.check()
    again = daemon.start()
    with Memory.open(tmp_path / "m", engine=again) as memory:
        assert memory.session("s", create=False).ask("Again?", max_tokens=2).usage.prompt_tokens > 0
