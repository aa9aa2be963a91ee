"""An engine's process is started when it is wanted, ended when not, and reported when it cannot live."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from ctxreuse.config import EngineConfig
from ctxreuse.engines import open_engine
from ctxreuse.engines.process.connection import Result
from ctxreuse.engines.process.engine import ChildEngine, EngineStart
from ctxreuse.engines.process.text import ChildText
from ctxreuse.engines.prompt import encode_prompt
from ctxreuse.engines.text import Message
from ctxreuse.errors import ConfigError, EngineDiedError, EngineError
from ctxreuse.identity.keys import ROOT
from ctxreuse.runtime import Runtime
from ctxreuse.testing.sealed import random_tokens, seal, views
from support.tiny_gguf import write_tiny_gguf
from support.waiting import patient, until

IDS = np.arange(1, 40, dtype="<i4")


def crashing(folder: str) -> Any:
    """An engine that opens once, and whose process dies at every later start."""
    opened = Path(folder) / "opened"
    if opened.exists():
        os.write(2, b"GGML_ASSERT(n > 0) failed\n")
        os.abort()
    opened.touch()
    return open_engine(str(Path(folder) / "tiny.gguf"), block_tokens=16, threads=1)


def children_of(pid: int) -> list[psutil.Process]:
    found = []
    for one in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):  # it ends just now
            found += [one] if "ctxreuse.engines.process" in one.cmdline() else []
    return found


def of_version(folder: str) -> Any:
    """An engine of the library's version that stands in a file."""
    from ctxreuse.engines.llama_cpp.library import LlamaLibrary

    LlamaLibrary.open("").version = (Path(folder) / "version").read_text()
    return open_engine(str(Path(folder) / "tiny.gguf"), block_tokens=16, threads=1)


def of_one_thread(folder: str) -> Any:
    """An engine that notes each thread that opens it or computes."""
    engine = open_engine(str(Path(folder) / "tiny.gguf"), block_tokens=16, threads=1)
    opener = threading.get_ident()

    def noted(name: str) -> None:
        plain = getattr(engine, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with open(Path(folder) / "threads", "a", encoding="utf-8") as file:
                file.write(f"{name} {threading.get_ident() == opener}\n")
            return plain(*args, **kwargs)

        setattr(engine, name, call)

    for name in ("prefill", "step"):
        noted(name)
    return engine


def slowly_refused(folder: str) -> Any:
    """Opened in a child: says that it began, and refuses when it is told to."""
    (Path(folder) / "began").touch()
    until((Path(folder) / "go").exists)
    raise ConfigError("no such model")


def test_a_caller_who_comes_while_it_is_opened_hears_that_it_is_refused(python_path: None, tmp_path: Path) -> None:
    start = EngineStart(f"{__name__}:slowly_refused", {"folder": str(tmp_path)})
    until((tmp_path / "began").exists)
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(start.opened)
        try:
            with pytest.raises(TimeoutError):
                opened.result(0.2)
            (tmp_path / "go").touch()
            with pytest.raises(ConfigError, match="no such model"):
                opened.result(patient(3))
        finally:
            start.close()  # a call that still waits ends


def test_the_thread_that_opened_an_engine_computes(python_path: None, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    engine = EngineStart(f"{__name__}:of_one_thread", {"folder": str(tmp_path)}).opened()
    contexts = [engine.new_context() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda context: engine.prefill(context, IDS), contexts))
        list(pool.map(lambda context: engine.step([(context, IDS[:1])]), contexts))
    engine.close()
    lines = (tmp_path / "threads").read_text("utf-8").splitlines()
    assert Counter(lines) == {"prefill True": 4, "step True": 4}


def test_a_model_that_is_not_there_is_for_the_caller(python_path: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file") as raised:
        EngineStart("ctxreuse.engines.registry:open_engine", {"model": str(tmp_path / "missing.gguf")}).opened()
    assert "missing.gguf" in str(raised.value)


def test_it_starts_beside_its_caller_and_a_second_wish_tells_why_it_was_refused(
    python_path: None, tmp_path: Path
) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    unwanted = EngineStart.of(EngineConfig(str(file)))
    unwanted.close()
    assert children_of(os.getpid()) == []
    start = EngineStart.of(EngineConfig(str(file)), block_tokens=16)
    until(lambda: children_of(os.getpid()) != [])
    engine = start.opened()
    assert engine.prefill(engine.new_context(), IDS).shape == (engine.space.vocab_size,)
    engine.close()
    refused = EngineStart.of(EngineConfig(str(tmp_path / "missing.gguf")))
    until(lambda: children_of(os.getpid()) != [])
    until(lambda: children_of(os.getpid()) == [])
    with pytest.raises(ConfigError, match="no such file"):
        refused.opened()
    assert children_of(os.getpid()) == []


def test_unloaded_it_comes_back_when_it_is_wanted(python_path: None, tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    engine = open_engine(str(file), block_tokens=16, threads=1, isolate=True)
    assert isinstance(engine, ChildEngine)
    context = engine.new_context()
    logits = engine.prefill(context, IDS)
    pid = engine.pid
    assert engine.memory > 1 << 20
    engine.unload()
    assert (engine.state, engine.pid, engine.memory, engine.restarts) == ("unloaded", 0, 0, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert context.lost
    with pytest.raises(EngineDiedError):
        engine.prefill(context, IDS[:1])
    assert engine.text is not None
    assert engine.text.decode(engine.text.encode("as before")) == "as before"
    assert np.array_equal(engine.prefill(engine.new_context(), IDS), logits)

    write_tiny_gguf(file, seed=8)  # swapped under the same name
    engine.unload()
    with pytest.raises(EngineError, match="another model"):
        engine.new_context()
    engine.close()
    assert engine.state == "closed"


def test_one_that_dies_again_and_again_is_reported(python_path: None, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    engine = EngineStart(f"{__name__}:crashing", {"folder": str(tmp_path)}).opened()
    context = engine.new_context()
    engine.prefill(context, IDS)
    os.kill(engine.pid, signal.SIGKILL)
    until(lambda: engine.failing, 30)
    with pytest.raises(EngineDiedError) as raised:
        engine.new_context()  # does not wait
    assert "SIGABRT" in str(raised.value)
    assert "GGML_ASSERT(n > 0) failed" in str(raised.value)
    (tmp_path / "opened").unlink()
    until(lambda: engine.state == "up", 30)
    assert not engine.failing
    engine.prefill(engine.new_context(), IDS)
    engine.close()


def test_a_library_of_another_version_behind_the_same_file_is_noticed(python_path: None, tmp_path: Path) -> None:
    """After it was unloaded, or has died: its KV would not be that of the contexts that are stored."""
    write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "version").write_text("1")
    engine = EngineStart(f"{__name__}:of_version", {"folder": str(tmp_path)}).opened()
    kept = engine.space
    assert kept.attention == "llama.cpp-1"
    engine.unload()
    assert engine.new_context().n == 0
    (tmp_path / "version").write_text("2")
    engine.unload()
    with pytest.raises(EngineError, match=r"another model or library.*restart this program"):
        engine.new_context()
    assert engine.space == kept
    engine.close()
    again = EngineStart(f"{__name__}:of_version", {"folder": str(tmp_path)}).opened()
    assert again.space.digest != kept.digest  # so that no key of the one is one of the other
    again.close()


@pytest.fixture
def text(python_path: None, tmp_path: Path) -> Iterator[ChildText]:
    """The text of an engine in a process of its own, of which nothing was asked yet."""
    child = open_engine(str(write_tiny_gguf(tmp_path / "tiny.gguf")), threads=1, isolate=True)
    assert isinstance(child, ChildEngine)
    assert child.text is not None
    yield ChildText(child.text._facts, child._call)
    child.close()


def counted(text: ChildText, monkeypatch: pytest.MonkeyPatch, *refused: str) -> list[str]:
    """Return the verbs of a text's calls from now on; those that are refused find nothing."""
    verbs, call = list[str](), text._call

    def made(verb: str, *args: Any, **more: Any) -> Any:
        verbs.append(verb)
        return Result(None, [], ()) if verb in refused else call(verb, *args, **more)

    monkeypatch.setattr(text, "_call", made)
    return verbs


def test_texts_of_few_tokens_are_asked_for_once(text: ChildText, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer needs two for each of its tokens. It is so where the tokens' pieces cannot be joined."""
    verbs = counted(text, monkeypatch, "pieces")
    found = [text.decode(ids) for ids in ([5], [5, 6], np.array([5], "<i4"), [5, 6], [*range(9)], [*range(9)])]
    assert [verb for verb in verbs if verb != "pieces"] == ["decode"] * 4
    assert found[:2] == found[2:4]
    assert found[4] == found[5]


def test_texts_are_joined_from_pieces_once_these_have_come(text: ChildText, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [*map(int, text.encode("so it is \u00e9 joined")), *range(200)]
    asked = text.decode(given)
    until(lambda: text._pieces is not None)
    verbs = counted(text, monkeypatch)
    assert text.decode(given) == asked
    assert verbs == []
    with pytest.raises(EngineError):
        text.decode([1 << 20])  # the tokenizer says what is wrong
    assert verbs == ["decode"]


def test_pieces_are_asked_for_again_after_the_process_that_was_asked_has_ended(
    text: ChildText, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, asked = text._call, list[bool]()

    def dying(verb: str, *args: Any, **more: Any) -> Any:
        if verb == "pieces" and not asked:
            asked.append(more["again"])
            raise EngineDiedError("it was unloaded")
        return call(verb, *args, **more)

    monkeypatch.setattr(text, "_call", dying)
    text.decode([5])
    until(lambda: bool(asked) and not text._once.locked())
    assert asked == [False], "or a process that was unloaded would be started by nobody's wish"
    text.decode([5])
    until(lambda: text._pieces is not None)


@pytest.mark.parametrize("clock", [False, True])
def test_the_turns_of_a_chat_are_encoded_once(
    python_path: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: bool
) -> None:
    child = open_engine(str(write_tiny_gguf(tmp_path / "tiny.gguf")), threads=1, isolate=True)
    assert isinstance(child, ChildEngine)
    assert child.text is not None
    if clock:
        facts = msgspec.structs.replace(child.text._facts, template="{{ strftime_now('%H') }}")
        monkeypatch.setattr(child.text, "_facts", facts)
    verbs, call = Counter[str](), child.text._call

    def counted(verb: str, *args: Any, **more: Any) -> Any:
        verbs[verb] += 1
        return call(verb, *args, **more)

    monkeypatch.setattr(child.text, "_call", counted)
    chat, asked = list[Message](), list[tuple[int, int]]()
    for turn in range(4):
        chat += [Message("user", f"number {turn}"), Message("assistant", f"it is {turn}")]
        verbs.clear()
        encode_prompt(child.text, chat)
        asked.append((verbs["render"], verbs["encode"]))
    # What came before is known, but for a template that writes the time.
    assert [encodes for _, encodes in asked] == [3, 2, 2, 2]
    assert [renders for renders, _ in asked] == ([3, 5, 7, 9] if clock else [3] * 4)
    runtime = Runtime(child, None)
    runtime.forget_texts()  # what was deleted stands nowhere any more
    verbs.clear()
    encode_prompt(child.text, chat)
    assert (verbs["render"], verbs["encode"]) == (9, 9)
    runtime.close()
    child.close()


def test_loads_that_outgrow_the_shared_memory_arrive_whole(child: ChildEngine) -> None:
    """Whatever part of it either side has mapped before."""
    size = child.space.block_tokens
    for blocks in (1, 3, 12, 40, 100):
        ids = random_tokens(child, blocks * size, seed=blocks)
        context, sealed = child.new_context(), seal(child, ids)
        child.load(context, views(child, sealed, len(ids))[0], None, lambda _: None).wait()
        again = child.export(context, sealed.keys, ROOT, 0)
        assert all(np.array_equal(a, b) for a, b in zip(again, sealed.blocks, strict=True))
