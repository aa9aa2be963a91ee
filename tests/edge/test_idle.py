"""The daemon infers what its contexts wait for, and uses its idle time for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import Memory

from ctxreuse.constrain import Grammar, GrammarCompiler
from ctxreuse.engines.prompt import encode_prompt
from ctxreuse.engines.text import Message
from ctxreuse.errors import ConfigError
from ctxreuse.pauses import Estimator, Pause
from support.freed_memory import freed_memory
from support.waiting import until

WORDS = "The committee met again in the autumn to look at the plan for the new library. " * 10

Said = list[tuple[str, str]]


def figure(edge: Any, name: str) -> float:
    lines = [line for line in edge.http.get("/metrics").text.splitlines() if line.startswith(name + " ")]
    return float(lines[0].split()[1])


def chat(edge: Any, said: Said) -> str:
    messages = [{"role": role, "content": text} for role, text in said]
    answer = edge.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4, "temperature": 0})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def context(edge: Any, said: Said) -> list[int]:
    found = encode_prompt(edge.node.runtime.text, [Message(role, text, None) for role, text in said])
    return [int(token) for token in found.ids]


def tell(edge: Any, what: str, said: Said, **more: Any) -> Any:
    return edge.http.post(f"/api/tokens/{what}", json={"tokens": context(edge, said), **more})


def test_the_vocabulary_is_read_before_the_first_tool(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    plain = GrammarCompiler.warm

    def warm(self: GrammarCompiler) -> None:
        plain(self)
        read.append(self)

    monkeypatch.setattr(GrammarCompiler, "warm", warm)
    edge = serve()
    until(lambda: read == [edge.node.runtime.grammars], 60)
    assert edge.node.runtime.constrain(Grammar.json_object())


@pytest.mark.parametrize("busy", [False, True])
def test_freed_memory_is_given_back(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    monkeypatch.setattr("ctxreuse_edge.idle._TRIM", 0.0)
    monkeypatch.setattr("ctxreuse_edge.node.EdgeNode._busy", lambda node: busy)
    serve()
    with freed_memory() as returned:
        until(lambda: returned() > 60 << 20)


def test_a_conversation_with_tools_is_one_session_and_is_learnt_from(serve: Callable[..., Any], tmp_path: Path) -> None:
    edge = serve()
    said: Said = [("system", WORDS), ("user", "What is in the file?")]
    for step in range(3):
        said = [*said, ("assistant", chat(edge, said)), ("tool", f"Line {step} of the file. " * 8)]
    chat(edge, said)
    assert figure(edge, "ctxreuse_paused_contexts") == 1
    edge.close()
    # The answers did not say that they call a tool; the messages after them did.
    estimator = Estimator()
    assert estimator.load((tmp_path / "store" / "pauses.bin").read_bytes())
    assert estimator.survival(Pause("tool"), 0.0, 60.0) < Estimator().survival(Pause("tool"), 0.0, 60.0)
    again = serve()
    assert again.node.runtime.paused.dump() == (tmp_path / "store" / "pauses.bin").read_bytes()


def test_what_was_closed_leaves_memory_and_what_is_awaited_is_read_ahead(edge: Any) -> None:
    one: Said = [("system", WORDS), ("user", "First")]
    two: Said = [("system", WORDS.upper()), ("user", "Second")]
    for said in (one, two):
        chat(edge, said)
    edge.node.store.flush()
    held = edge.node.runtime.context_cache.nbytes
    assert tell(edge, "pause", one, kind="closed").status_code == 200
    until(lambda: figure(edge, "ctxreuse_demoted_bytes_total") > 0)
    assert 0 < edge.node.runtime.context_cache.nbytes < held
    # Nothing of the other is in memory any more, and it is expected at once.
    edge.node.runtime.context_cache.clear()
    assert tell(edge, "pause", two, kind="tool:bash", expect=1.0).status_code == 200
    until(lambda: figure(edge, "ctxreuse_prefetched_bytes_total") > 0)
    answer = edge.http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": role, "content": text} for role, text in two], "max_tokens": 4, "temperature": 0},
    )
    details = answer.json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] > 64
    assert figure(edge, "ctxreuse_prefetched_returns_total") == 1


def test_hints_over_http(edge: Any) -> None:
    said: Said = [("system", WORDS), ("user", "First")]
    assert tell(edge, "hint", said, name="pin").json() == {"known": False}
    chat(edge, said)
    assert tell(edge, "hint", said, name="pin", until=60).json() == {"known": True}
    assert tell(edge, "resume", said).json() == {}
    edge.node.store.flush()
    assert tell(edge, "supersede", said, keep=64).json()["blocks"] > 0
    held = edge.node.store.match(edge.node.runtime.keys(context(edge, said)))
    assert held.tokens == 64


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("pause", {"kind": "nap"}),
        ("pause", {"kind": "tool", "expect": -1}),
        ("pause", {"kind": "x" * 201}),
        ("pause", {}),
        ("hint", {"name": "forever"}),
        ("hint", {"name": "pin", "until": 1e300}),
        ("supersede", {"keep": -1}),
        ("resume", {"tokens": []}),
        ("resume", {"tokens": [1 << 40]}),
    ],
)
def test_what_makes_no_sense_is_refused(edge: Any, what: str, body: dict[str, Any]) -> None:
    answer = edge.http.post(f"/api/tokens/{what}", json={"tokens": [1, 2, 3], **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_attached_sessions_say_it_to_the_daemon(edge: Any, tmp_path: Path) -> None:
    with Memory.open(tmp_path / "memory", edge.url) as memory:
        session = memory.create("agent")
        session.system(WORDS)
        assert session.ask("What now?", max_tokens=4, temperature=0.0, ignore_eos=True).text
        session.pause("tool:web_search", expect=30.0)
        state = edge.node.runtime.paused.state(edge.node.runtime.keys(session.tokens()))
        assert state is not None
        assert state.pause.tool.startswith("web")
        assert session.hint("retain", until=60.0)
        session.resume()
        assert session.superseded(session.turns()[0]) > 0
        with pytest.raises(ConfigError):
            session.hint("forever")
        session.close()
