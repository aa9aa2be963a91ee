"""Asking a tiny real model: durable turns, exact ids, KV found again, forks that share, answers that end early."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ctxreuse_agents import Memory, NewTurn, Session

from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.errors import ConfigError, ContextTooLongError, SessionError
from ctxreuse.runtime import Runtime
from support.waiting import patient

LONG = "It was a bright cold day in April, and the clocks were striking thirteen. " * 4
EXACT = {"max_tokens": 12, "ignore_eos": True}


def roles(session: Session) -> list[str]:
    return [turn.role for turn in session.turns()]


def bare(engine: Any, ids: Any, n: int) -> list[int]:
    """Greedy ids after ``ids`` from the engine alone: no store, nothing reused."""
    completion = Runtime(engine, None).complete(ids, SamplingParams(max_tokens=n, ignore_eos=True))
    completion.drain()
    return completion.tokens


def test_question_and_answer_are_turns_and_pieces_spell_the_text(asked: Memory) -> None:
    session = asked.create()
    session.system("Be odd.")
    answer = session.ask("Why?", **EXACT)
    assert roles(session) == ["system", "user"], "the question is durable before generation starts"
    pieces = list(answer)
    assert "".join(pieces) == answer.text
    assert list(answer) == pieces, "iterating again repeats"
    turn = session.turns()[-1]
    assert answer.turn == turn
    assert (turn.role, turn.content, turn.meta) == ("assistant", answer.text, {"finish": "length"})
    assert answer.usage.completion_tokens == 12
    assert answer.finish == "length"


def test_ids_are_kept_as_sampled_and_begin_the_next_prompt(asked: Memory, engine: Any) -> None:
    session = asked.create()
    session.user(LONG)
    before = session.tokens()
    first = session.ask("Go on", **EXACT)
    prompt = first.usage.prompt_tokens
    sampled = bare(engine, session_prompt(asked, session, before), 12)
    assert first.text
    after = session.tokens()
    assert after[: len(before)].tolist() == before.tolist()
    assert after[prompt : prompt + 12].tolist() == sampled, "the very ids, not the text tokenised again"
    assert engine.text.decode(after[prompt + 12 :], markers=True) == "<|im_end|>\n"
    second = session.ask("And?", **EXACT)
    size = engine.space.block_tokens
    assert second.usage.cached_tokens >= len(after) // size * size
    assert second.usage.prompt_tokens - second.usage.cached_tokens < size + 40


def session_prompt(memory: Memory, session: Session, before: Any) -> Any:
    """The prompt of the last answer: context before it, question, generation prompt."""
    text = memory._state.engine()[0].text
    assert text is not None
    question = session.turns()[-2].content if session.turns()[-1].role == "assistant" else session.turns()[-1].content
    added = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return np.concatenate([before, text.encode(added)])


def test_the_context_is_the_templates_text(asked: Memory, engine: Any) -> None:
    session = asked.create()
    session.user("h\u00e9llo \U0001f9ed")
    session.assistant("w\u00f6rld")
    session.tool("{}")
    text = engine.text.render(session.messages(), generate=False)
    assert engine.text.decode(session.tokens(), markers=True) == text
    assert text.startswith("<|im_start|>system\nBe brief."), "a prompt that the template adds belongs to the first turn"


def test_a_sampled_end_of_turn_is_not_doubled(asked: Memory, engine: Any) -> None:
    stopped = 0
    for seed in range(6):
        session = asked.create()
        answer = session.ask("Why?", max_tokens=300, temperature=2.0, seed=seed)
        answer.text  # noqa: B018
        stopped += answer.finish == "stop"
        assert (answer.tokens[-1] == 257) is (answer.finish == "stop")
        ids = session.tokens().tolist()
        assert ids.count(257) == 3, "system, user and assistant, each ended once"
        closing = [257, *engine.text.encode("\n").tolist()]
        assert ids[-2:] == closing
        end = -1 if answer.finish == "stop" else -2
        assert ids[end - len(answer.tokens) : end] == answer.tokens
    assert stopped >= 2


def test_everything_is_the_same_after_reopening(tmp_path: Path, tiny: Callable[..., Any]) -> None:
    with Memory.open(tmp_path / "m", tiny()) as memory:
        session = memory.create("s")
        session.user(LONG)
        session.ask("One", **EXACT).text  # noqa: B018
        tokens = session.tokens()
        expected = session.fork().ask("Two", **EXACT).text
    engine = tiny()
    with Memory.open(tmp_path / "m", engine) as memory:
        session = memory.session("s", create=False)
        assert session.tokens().tolist() == tokens.tolist()
        answer = session.ask("Two", **EXACT)
        assert answer.text == expected
        assert answer.usage.tokens.by_source.get("disk", 0) >= 256
        memory.check()


def test_kv_may_go_ids_and_answers_stay(asked: Memory, engine: Any) -> None:
    session = asked.create()
    session.user(LONG)
    session.ask("One", **EXACT).text  # noqa: B018
    tokens = session.tokens()
    expected = session.fork().ask("Two", **EXACT)
    assert expected.text
    assert expected.usage.cached_tokens > 0
    for each in asked.sessions():
        each.evict()
    assert session.tokens().tolist() == tokens.tolist()
    again = session.ask("Two", **EXACT)
    assert again.usage.cached_tokens == 0
    assert again.usage.miss_reason
    assert again.text == expected.text


def test_forks_share_blocks(asked: Memory, engine: Any) -> None:
    trunk = asked.create()
    trunk.user(LONG)
    trunk.warm()
    store = asked._state.engine()[0].store
    assert store is not None
    blocks = len(trunk.tokens()) // engine.space.block_tokens
    stats = asked.stats().blocks
    assert stats is not None
    assert stats.blocks == blocks
    for i in range(8):
        answer = trunk.fork().ask(f"{i}", max_tokens=2, ignore_eos=True)
        assert answer.text is not None
        assert answer.usage.cached_tokens >= blocks * engine.space.block_tokens - 64
    store.flush()
    stats = asked.stats().blocks
    assert stats is not None
    own = 8 * 2  # each fork's few tokens reach at most into two blocks of its own
    assert stats.blocks <= blocks + own


def test_evicting_a_fork_leaves_what_others_share(asked: Memory, engine: Any) -> None:
    trunk = asked.create()
    trunk.user(LONG)
    fork = trunk.fork()
    fork.user(LONG)
    other = trunk.fork()
    other.user(LONG.upper())
    fork.warm()
    other.warm()
    assert fork.evict() > 0
    fork_usage, other_usage = fork.warm(), other.warm()
    assert fork_usage.cached_tokens >= 256
    assert other_usage.cached_tokens > fork_usage.cached_tokens


def test_turns_written_without_an_engine_are_tokenised_when_needed(tmp_path: Path, tiny: Callable[..., Any]) -> None:
    with Memory.open(tmp_path / "m") as memory:
        memory.create("s").extend([NewTurn("user", "a"), NewTurn("assistant", "b"), NewTurn("user", "c")])
    engine = tiny()
    with Memory.open(tmp_path / "m", engine) as memory:
        session = memory.session("s")
        ledger, space = memory.ledger, engine.space.digest
        assert all(ledger.tokens(turn.id, space) is None for turn in session.turns())
        tokens = session.tokens()
        assert all(ledger.tokens(turn.id, space) is not None for turn in session.turns())
        assert engine.text.decode(tokens, markers=True) == engine.text.render(session.messages(), generate=False)
    with Memory.open(tmp_path / "m", engine, readonly=True) as memory:
        assert memory.session("s").tokens().tolist() == tokens.tolist()


def test_another_model_has_ids_of_its_own(tmp_path: Path, tiny: Callable[..., Any]) -> None:
    with Memory.open(tmp_path / "m", tiny()) as memory:
        session = memory.create("s")
        session.ask("One", **EXACT).text  # noqa: B018
        first = session.tokens()
    other = tiny(seed=8)
    with Memory.open(tmp_path / "m", other) as memory:
        session = memory.session("s")
        assert session.ask("Two", **EXACT).usage.cached_tokens == 0
        session.rollback(-1)
    with Memory.open(tmp_path / "m", tiny()) as memory:
        session = memory.session("s")
        assert session.tokens()[: len(first)].tolist() == first.tolist()


def test_complete_answers_the_history_and_refuses_nothing(asked: Memory) -> None:
    session = asked.create()
    with pytest.raises(SessionError, match="nothing to complete"):
        session.complete()
    with pytest.raises(SessionError, match="nothing to warm"):
        session.warm()
    assert session.evict() == 0
    assert len(session.tokens()) == 0
    session.user("x")
    answer = session.complete(max_tokens=1, ignore_eos=True)
    assert answer.text is not None
    assert answer.usage.completion_tokens == 1
    assert roles(session) == ["user", "assistant"]


def test_a_context_that_cannot_fit_is_refused_before_anything_is_stored(
    tmp_path: Path, tiny: Callable[..., Any]
) -> None:
    engine = tiny(positions=256)
    with Memory.open(tmp_path / "m", engine) as memory:
        session = memory.create("tight")
        session.user("a" * 100)
        used = len(session.tokens())
        with pytest.raises(ContextTooLongError, match=r"256.*Nothing was added.*roll back"):
            session.ask("b" * 200)
        assert roles(session) == ["user"]
        frame = len(engine.text.encode("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"))
        answer = session.ask("b" * (255 - used - frame), max_tokens=50, ignore_eos=True)
        assert answer.text is not None
        assert answer.usage.completion_tokens == 1, "the answer is limited to what the model has room for"
        with pytest.raises(ContextTooLongError):
            session.complete()
        session.rollback(-2)
        assert session.ask("short", **EXACT).text


def test_an_answer_left_early_is_kept_as_far_as_it_came(asked: Memory, engine: Any) -> None:
    session = asked.create()
    answer = session.ask("Why?", max_tokens=200, ignore_eos=True)
    heard = ""
    for piece in answer:
        heard += piece
        if len(heard) >= 5:
            break
    with pytest.raises(SessionError, match="has not ended"):
        session.user("me again")
    answer.close()
    answer.close()
    turn = session.turns()[-1]
    assert (turn.role, turn.content, turn.meta["finish"]) == ("assistant", heard, "cancelled")
    assert answer.text == heard
    assert answer.turn == turn
    text = engine.text.decode(session.tokens(), markers=True)
    assert text == engine.text.render(session.messages(), generate=False)
    session.user("me again")


def test_an_answer_that_nobody_read_leaves_no_turn(asked: Memory) -> None:
    session = asked.create()
    with session.ask("Why?"):
        pass
    assert roles(session) == ["user"]
    session.ask("Nobody listens")  # dropped at once
    assert roles(session) == ["user", "user"]
    session.complete(**EXACT).text  # noqa: B018
    assert roles(session) == ["user", "user", "assistant"]


def test_a_forgotten_answer_is_stored_and_lets_others_in(asked: Memory) -> None:
    session = asked.create()
    for _ in session.ask("Why?", max_tokens=200, ignore_eos=True):
        break
    assert roles(session) == ["user", "assistant"]
    assert session.turns()[-1].meta == {"finish": "cancelled"}
    session.user("next")


def test_an_engine_that_fails_midway_leaves_what_it_said(asked: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    session = asked.create()
    session.user("x")
    engine = asked._state.engine()[0].engine
    genuine, calls = type(engine).step, [0]

    def failing(self: Any, batch: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 8:
            raise MemoryError("out of memory")
        return genuine(self, batch, **options)

    monkeypatch.setattr(type(engine), "step", failing)
    answer = session.ask("Why?", max_tokens=100, ignore_eos=True)
    with pytest.raises(MemoryError):
        answer.text  # noqa: B018
    assert answer.finish == "error"
    if answer.text:
        assert session.turns()[-1].meta == {"finish": "error"}
        assert session.turns()[-1].content == answer.text
    assert session.ask("Again", **EXACT).text


def test_stop_strings_end_the_turn_and_ids_spell_what_is_kept(asked: Memory, engine: Any) -> None:
    session = asked.create()
    whole = session.fork().ask("Why?", max_tokens=60, ignore_eos=True).text
    stop = next(char for char in whole[10:] if char != "\ufffd" and char not in whole[:10])
    answer = session.ask("Why?", max_tokens=60, ignore_eos=True, stop=stop)
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish == "stop_string"
    text = engine.text.decode(session.tokens(), markers=True)
    assert text == engine.text.render(session.messages(), generate=False)


def test_settings_that_do_not_exist_or_make_no_sense_change_nothing(asked: Memory) -> None:
    session = asked.create()
    with pytest.raises(TypeError):
        session.ask("x", temprature=1)
    with pytest.raises(ConfigError):
        session.ask("x", temperature=-1)
    with pytest.raises(SessionError, match="decode"):
        session.ask(b"x")  # type: ignore[arg-type]
    assert roles(session) == []
    assert (
        session.ask("x", sampling=SamplingParams(max_tokens=5, ignore_eos=True), max_tokens=2).usage.prompt_tokens > 0
    )


def test_eight_threads_ask_forks_and_one_session(asked: Memory, engine: Any) -> None:
    trunk = asked.create("trunk")
    trunk.user(LONG)
    trunk.warm()
    answers: dict[int, str] = {}
    errors: list[BaseException] = []

    def work(k: int) -> None:
        try:
            answers[k] = trunk.fork(f"fork{k}").ask(f"number {k}?", **EXACT).text
            asked.session("shared").ask(f"{k}", **EXACT).text  # noqa: B018
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    shared = asked.session("shared").turns()
    assert [turn.role for turn in shared] == ["user", "assistant"] * 8, "turns of one session never interleave"
    assert sorted(turn.content for turn in shared[::2]) == [str(k) for k in range(8)]
    base = trunk.tokens()
    for k, text in answers.items():
        prompt = session_prompt(asked, asked.session(f"fork{k}"), base)
        assert engine.text.decode(bare(engine, prompt, 12)) == text


def test_closing_another_threads_answer_takes_effect_after_one_token(asked: Memory) -> None:
    session = asked.create()
    answer = session.ask("Why?", max_tokens=1500, ignore_eos=True)
    begun = threading.Event()
    heard: list[str] = []

    def read() -> None:
        for piece in answer:
            heard.append(piece)
            begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    begun.wait()
    answer.close()
    reader.join()
    assert session.turns()[-1].content.startswith("".join(heard)[:5])
    assert session.turns()[-1].meta == {"finish": "cancelled"}


def test_closing_the_memory_stores_unfinished_answers(tmp_path: Path, engine: Any) -> None:
    memory = Memory.open(tmp_path / "m", engine)
    session = memory.create("s")
    answer = session.ask("Why?", max_tokens=200, ignore_eos=True)
    next(iter(answer))
    memory.close()
    with Memory.open(tmp_path / "m") as memory:
        assert memory.session("s").turns()[-1].meta == {"finish": "cancelled"}


def test_a_runtime_of_ones_own_stays_open_and_a_broken_store_fails_no_ask(
    tmp_path: Path, tiny: Callable[..., Any]
) -> None:
    runtime = Runtime(tiny(), None)
    with Memory.open(tmp_path / "m", runtime) as memory:
        session = memory.create()
        first = session.ask("Why?", **EXACT).text
        assert first
        assert memory.stats().blocks is None
    assert runtime.complete([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True)).drain() is not None
    (tmp_path / "m" / "blocks").write_bytes(b"not a folder")
    with Memory.open(tmp_path / "m", tiny()) as memory:
        assert memory.create().ask("Why?", **EXACT).text == first


FORGETFUL = """
import sys
from ctxreuse_agents import Memory
from support.tiny_text import tiny_engine

memory = Memory.open(sys.argv[1], tiny_engine())
answer = memory.create("s").ask("Why?", max_tokens=200, ignore_eos=True)
pieces = iter(answer)
print(len(next(pieces)) + len(next(pieces)))
"""


@pytest.mark.slow
def test_a_script_that_ends_without_closing_ends_and_keeps_what_was_said(
    tmp_path: Path, child_env: dict[str, str]
) -> None:
    command = [sys.executable, "-c", FORGETFUL, str(tmp_path / "m")]
    done = subprocess.run(command, env=child_env, capture_output=True, text=True, timeout=patient(120))
    assert (done.returncode, done.stderr) == (0, "")
    with Memory.open(tmp_path / "m") as memory:
        turn = memory.session("s").turns()[-1]
        assert (turn.role, turn.meta) == ("assistant", {"finish": "cancelled"})
        assert len(turn.content) == int(done.stdout)
