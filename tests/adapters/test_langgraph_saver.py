"""LangGraph's checkpointer: the published conformance suite, real graphs, growth, retention, threads, kills."""

from __future__ import annotations

import asyncio
import operator
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from ctxreuse_agents import Memory
from ctxreuse_agents.adapters import LangGraphSaver
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

from ctxreuse.store.items import Items, item_key

WORDS = "the lighthouse keeper walks down to the harbour and reads the tide tables aloud " * 12


class State(TypedDict):
    messages: Annotated[list[Any], add_messages]
    seen: Annotated[list[str], operator.add]


def answer(state: State) -> dict[str, Any]:
    said = state["messages"][-1].content
    return {"messages": [AIMessage(f"You said: {said[:20]}")], "seen": [said[:8]]}


def chat(saver: Any) -> Any:
    graph = StateGraph(State)
    graph.add_node("answer", answer)
    graph.add_edge(START, "answer")
    graph.add_edge("answer", END)
    return graph.compile(checkpointer=saver)


def say(graph: Any, thread: str, text: str) -> Any:
    return graph.invoke({"messages": [HumanMessage(text)]}, {"configurable": {"thread_id": thread}})


def stored(memory: Memory) -> int:
    with Items(memory.ledger).read() as table:
        return sum(len(key) + len(body) for key, body in table.scan(b""))


def test_the_conformance_suite_passes(tmp_path: Path) -> None:
    opened: list[Memory] = []

    @checkpointer_test(name="ctxreuse")
    async def saver() -> AsyncIterator[LangGraphSaver]:
        with Memory.open(tmp_path / str(len(opened))) as memory:
            opened.append(memory)
            yield LangGraphSaver(memory)
            memory.check()
            assert memory.ledger.verify().problems == ()

    report = asyncio.run(validate(saver))
    assert {name: (one.detected, one.passed, one.failures) for name, one in report.results.items()} == {
        name: (True, True, []) for name in report.results
    }
    assert len(report.results) == 8
    assert sum(one.tests_passed for one in report.results.values()) >= 81


def test_a_graph_has_the_states_that_it_has_in_memory_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    plain = InMemorySaver()
    for turn in range(6):
        with Memory.open(tmp_path / "m") as memory:
            here = say(chat(LangGraphSaver(memory)), "t", f"turn {turn} {WORDS}")
            there = say(chat(plain), "t", f"turn {turn} {WORDS}")
            assert [m.content for m in here["messages"]] == [m.content for m in there["messages"]]
            assert here["seen"] == there["seen"]
    with Memory.open(tmp_path / "m") as memory:
        config = {"configurable": {"thread_id": "t"}}
        ours, theirs = list(LangGraphSaver(memory).list(config)), list(plain.list(config))
        assert [one.metadata for one in ours] == [one.metadata for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            values, others = one.checkpoint["channel_values"], other.checkpoint["channel_values"]
            assert values.keys() == others.keys()
            assert [m.content for m in values.get("messages", [])] == [m.content for m in others.get("messages", [])]


def test_history_can_be_gone_back_in_and_changed(memory: Memory) -> None:
    graph = chat(LangGraphSaver(memory))
    for text in ("one", "two", "three"):
        say(graph, "t", text)
    config = {"configurable": {"thread_id": "t"}}
    past = next(one for one in graph.get_state_history(config) if len(one.values["messages"]) == 4 and not one.next)
    graph.update_state(past.config, {"messages": [HumanMessage("instead")]})
    assert [m.content for m in graph.get_state(config).values["messages"]][-1] == "instead"
    assert len(graph.get_state(config).values["messages"]) == 5


def test_a_long_history_costs_what_its_messages_do(memory: Memory) -> None:
    graph, sizes = chat(LangGraphSaver(memory)), []
    whole = 0
    for turn in range(120):
        state = say(graph, "t", f"{turn} {WORDS}")
        whole += 3 * sum(len(m.content) for m in state["messages"])
        if turn in (39, 79, 119):
            sizes.append(stored(memory))
    first, second = sizes[1] - sizes[0], sizes[2] - sizes[1]
    assert second < 1.15 * first  # linear, not quadratic
    assert sizes[-1] < whole / 10


def test_old_checkpoints_go_and_so_do_values_that_no_other_has(memory: Memory) -> None:
    saver = LangGraphSaver(memory, keep=4)
    graph, sizes = chat(saver), []
    config = {"configurable": {"thread_id": "t"}}
    for turn in range(80):
        say(graph, "t", f"{turn} {WORDS}")
        graph.update_state(config, {"messages": [("user", f"note {turn}")]})
        assert len(list(saver.list(config))) <= 4
        sizes.append(stored(memory))
    assert len(graph.get_state(config).values["messages"]) == 240
    saver.prune(["t"])
    assert len(list(saver.list(config))) == 1
    assert len(graph.get_state(config).values["messages"]) == 240
    with Items(memory.ledger).read() as table:
        values = len(table.keys(item_key("langgraph", "value", "t")))
    assert 240 <= values <= 260 + 80


class Steps(TypedDict):
    messages: Annotated[list[Any], add_messages]


def test_checkpoints_of_subgraphs_go_with_the_steps_that_they_were_of(memory: Memory) -> None:
    inner = StateGraph(Steps)
    inner.add_node("answer", lambda state: {"messages": [AIMessage("yes")]})
    inner.add_edge(START, "answer")
    outer = StateGraph(Steps)
    outer.add_node("inner", inner.compile(checkpointer=True))
    outer.add_node("other", inner.compile())
    outer.add_edge(START, "inner")
    outer.add_edge("inner", "other")
    saver = LangGraphSaver(memory, keep=3)
    graph = outer.compile(checkpointer=saver)
    counts = []
    for turn in range(30):
        say(graph, "t", f"{turn}")
        counts.append(len(list(saver.list({"configurable": {"thread_id": "t"}}))))
    assert max(counts[5:]) <= 12


class Deltas(TypedDict):
    words: Annotated[list[str], DeltaChannel(lambda have, new: [*have, *(one for part in new for one in part)])]
    last: str


def test_what_a_delta_channel_is_made_from_stays(memory: Memory) -> None:
    graph = StateGraph(Deltas)
    graph.add_node("say", lambda state: {"words": [f"w{len(state.get('words') or [])}"], "last": "x"})
    graph.add_edge(START, "say")
    saver = LangGraphSaver(memory, keep=2)
    app = graph.compile(checkpointer=saver)
    config = {"configurable": {"thread_id": "t"}}
    for turn in range(25):
        assert len(app.invoke({"last": str(turn)}, config)["words"]) == turn + 1
    saver.prune(["t"])
    assert app.get_state(config).values["words"] == [f"w{n}" for n in range(25)]
    saver.copy_thread("t", "u")
    assert app.get_state({"configurable": {"thread_id": "u"}}).values["words"] == [f"w{n}" for n in range(25)]


def test_threads_and_tasks_use_two_savers_on_one_memory(memory: Memory) -> None:
    graphs = [chat(LangGraphSaver(memory)), chat(LangGraphSaver(memory))]

    def work(thread: int) -> int:
        for turn in range(4):
            state = say(graphs[turn % 2], f"thread {thread}", f"{thread} says {turn}")
        return len(state["messages"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [8] * 8

    async def talk(task: int) -> int:
        config = {"configurable": {"thread_id": f"task {task}"}}
        for turn in range(4):
            said = {"messages": [HumanMessage(f"{task} says {turn}")]}
            state = await graphs[turn % 2].ainvoke(said, config)
        return len(state["messages"]) + len([one async for one in graphs[0].aget_state_history(config)])

    async def all_of() -> list[int]:
        return await asyncio.gather(*(talk(task) for task in range(8)))

    assert asyncio.run(all_of()) == [8 + 12] * 8
    assert {one.config["configurable"]["thread_id"] for one in LangGraphSaver(memory).list(None)} == {
        *(f"thread {n}" for n in range(8)),
        *(f"task {n}" for n in range(8)),
    }


@pytest.mark.parametrize("thread", ["a" * 3000, "ü/\0\n../x", "t\0", "a" * 100 + "b"])
def test_names_of_threads_may_be_anything(memory: Memory, thread: str) -> None:
    graph = chat(LangGraphSaver(memory))
    say(graph, thread, "hello")
    say(graph, thread[:-1], "another")
    assert len(graph.get_state({"configurable": {"thread_id": thread}}).values["messages"]) == 2
    LangGraphSaver(memory).delete_thread(thread)
    assert [one.config["configurable"]["thread_id"] for one in LangGraphSaver(memory).list(None)] == [thread[:-1]] * 3


KILLED = """
import sys
from ctxreuse_agents import Memory
sys.path.insert(0, sys.argv[2])
from test_langgraph_saver import chat, say
from ctxreuse_agents.adapters import LangGraphSaver
with Memory.open(sys.argv[1]) as memory:
    graph = chat(LangGraphSaver(memory, keep=5))
    for turn in range(10_000):
        say(graph, "t", f"{turn} " + "word " * 200)
        print(turn, flush=True)
"""


def test_what_was_acknowledged_is_there_after_a_kill(tmp_path: Path) -> None:
    for round in range(2):
        before = 0
        with Memory.open(tmp_path / "m") as memory:
            state = LangGraphSaver(memory).get_tuple({"configurable": {"thread_id": "t"}})
            before = len(state.checkpoint["channel_values"]["messages"]) if state else 0
        words = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path / "m"), str(Path(__file__).parent)]
        child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) == 12 + round:
                break
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        with Memory.open(tmp_path / "m") as memory:
            memory.check()
            assert memory.ledger.verify().problems == ()
            saved = LangGraphSaver(memory).get_tuple({"configurable": {"thread_id": "t"}})
            assert len(saved.checkpoint["channel_values"]["messages"]) >= before + 2 * (13 + round)


def test_a_deleted_thread_is_in_no_page_after_compact(tmp_path: Path) -> None:
    secret = "SECRET-123-45-6789"
    with Memory.open(tmp_path / "m") as memory:
        graph = chat(LangGraphSaver(memory))
        say(graph, "t", f"{secret} {WORDS}")
        say(graph, "u", "stays")
        assert secret.encode() in (tmp_path / "m" / "ledger" / "data.mdb").read_bytes()
        LangGraphSaver(memory).delete_thread("t")
        assert memory.ledger.deleted_since() is not None
        memory.compact()
        assert secret.encode() not in (tmp_path / "m" / "ledger" / "data.mdb").read_bytes()
        assert len(graph.get_state({"configurable": {"thread_id": "u"}}).values["messages"]) == 2
