"""The chats of LangGraph's threads as sessions: they follow the graph, are found, forked and forgotten."""

from __future__ import annotations

import operator
import threading
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from ctxreuse_agents import Memory
from ctxreuse_agents.adapters import LangGraphSaver
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, SystemMessage, ToolMessage
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages

from ctxreuse.errors import SessionError


class State(TypedDict):
    messages: Annotated[list[Any], add_messages]


def chat(saver: Any, *answers: Any) -> Any:
    """A graph that answers with these messages, or with what was said."""
    graph = StateGraph(State)
    said = lambda state: [AIMessage(f"You said: {state['messages'][-1].content}")]  # noqa: E731
    graph.add_node("answer", lambda state: {"messages": list(answers) or said(state)})
    graph.add_edge(START, "answer")
    return graph.compile(checkpointer=saver)


def config(thread: str) -> dict[str, Any]:
    return {"configurable": {"thread_id": thread}}


def say(graph: Any, thread: str, text: str) -> Any:
    return graph.invoke({"messages": [HumanMessage(text)]}, config(thread))


def texts(saver: LangGraphSaver, thread: str) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in saver.session(thread).turns()]


def test_a_chat_is_a_session_that_is_found_and_forked(memory: Memory) -> None:
    saver = LangGraphSaver(memory)
    graph = chat(saver)
    say(graph, "ann", "my dogs are called Rex and Mia")
    say(graph, "bob", "I sail")
    assert texts(saver, "ann") == [
        ("user", "my dogs are called Rex and Mia"),
        ("assistant", "You said: my dogs are called Rex and Mia"),
    ]
    turns = saver.session("ann").turns()
    say(graph, "ann", "and I ski")
    assert saver.session("ann").turns()[:2] == turns, "what was there stays the same turns, with their KV"
    hits = memory.search("dog", namespace="langgraph")
    assert {hit.session.id for hit in hits} == {saver.session("ann").id}
    fork = saver.session("ann").fork("what if", at=turns[0].id)
    assert [turn.content for turn in fork.turns()] == ["my dogs are called Rex and Mia"]
    with pytest.raises(SessionError, match="there is no session"):
        saver.session("nobody")


def test_it_follows_a_graph_that_goes_back_and_messages_that_are_removed(memory: Memory) -> None:
    saver = LangGraphSaver(memory)
    graph = chat(saver)
    for text in ("one", "two", "three"):
        say(graph, "t", text)
    first = saver.session("t").turns()[0]
    past = next(
        one for one in graph.get_state_history(config("t")) if len(one.values["messages"]) == 4 and not one.next
    )
    graph.update_state(past.config, {"messages": [HumanMessage("instead")]})
    assert [text for _, text in texts(saver, "t")] == ["one", "You said: one", "two", "You said: two", "instead"]
    gone = graph.get_state(config("t")).values["messages"][1]
    graph.update_state(config("t"), {"messages": [RemoveMessage(gone.id)]})
    assert [text for _, text in texts(saver, "t")] == ["one", "two", "You said: two", "instead"]
    assert saver.session("t").turns()[0] == first


def test_tools_blocks_and_other_values_are_what_they_can_be(memory: Memory) -> None:
    saver = LangGraphSaver(memory)
    call = {"name": "look", "args": {"at": "ä"}, "id": "c1", "type": "tool_call"}
    answers = [AIMessage("", tool_calls=[call]), ToolMessage("blue", tool_call_id="c1"), SystemMessage("Be brief.")]
    answers += [AIMessage([{"type": "text", "text": "It is"}, {"type": "image_url", "image_url": "x"}, "blue."])]
    say(chat(saver, *answers), "t", "what colour?")
    turns = saver.session("t").turns()
    assert [(turn.role, turn.content) for turn in turns[2:]] == [
        ("tool", "blue"), ("system", "Be brief."), ("assistant", "It is\nblue."),
    ]  # fmt: skip
    assert turns[1].meta["tool_calls"] == [{"name": "look", "arguments": '{"at": "ä"}', "id": "c1"}]
    assert turns[2].meta["tool_call_id"] == "c1"

    class Other(TypedDict):
        messages: Annotated[list[Any], operator.add]

    graph = StateGraph(Other)
    graph.add_node("answer", lambda state: {"messages": [17]})
    graph.add_edge(START, "answer")
    graph.compile(checkpointer=saver).invoke({"messages": [b"x"]}, config("other"))
    with pytest.raises(SessionError):
        saver.session("other")


def test_a_session_that_is_taken_and_text_that_none_can_have_stop_no_graph(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    saver = LangGraphSaver(memory)
    graph = chat(saver)
    say(graph, "t", "hello")
    with saver.session("t")._core.lock.hold():  # as an answer does that is still being read
        assert len(say(graph, "t", "meanwhile")["messages"]) == 4
    assert "is behind its checkpoints" in caplog.text
    assert len(texts(saver, "t")) == 2
    say(graph, "t", "then")
    assert [text for role, text in texts(saver, "t") if role == "user"] == ["hello", "meanwhile", "then"]
    before = texts(saver, "t")
    put = saver.get_tuple(config("t"))
    put.checkpoint["channel_values"]["messages"].append(HumanMessage("a lone \ud800"))
    saver._chats.follow("t", put.checkpoint["channel_values"]["messages"], lambda: True)
    assert texts(saver, "t") == before


def test_a_thread_that_is_deleted_copied_or_switched_off(memory: Memory, tmp_path: Path) -> None:
    saver = LangGraphSaver(memory)
    graph = chat(saver)
    for thread in ("a", "b" * 3000, "c\0/ü"):
        say(graph, thread, f"hello {thread[0]}")
    saver.copy_thread("a", "copy")
    assert texts(saver, "copy") == texts(saver, "a")
    assert saver.session("copy").turns() == saver.session("a").turns(), "shared, not copied"
    say(graph, "copy", "on its own")
    assert len(texts(saver, "copy")) == 4
    assert len(texts(saver, "a")) == 2
    saver.delete_thread("a")
    saver.prune(["b" * 3000], strategy="delete")
    saver.prune(["copy"])
    assert [session.name for session in memory.sessions(namespace="langgraph", prefix="langgraph:copy")]
    for gone in ("a", "b" * 3000):
        with pytest.raises(SessionError):
            saver.session(gone)
    assert {hit.turn.content for hit in memory.search("hello")}.isdisjoint({"hello b", "You said: hello b"})
    assert len(texts(saver, "c\0/ü")) == 2
    off = LangGraphSaver(memory, chats=None)
    say(chat(off), "off", "quiet")
    with pytest.raises(SessionError):
        off.session("off")


def test_runs_that_are_deleted_leave_what_was_said_before(memory: Memory) -> None:
    saver = LangGraphSaver(memory)
    graph = chat(saver)
    for number, text in enumerate(("one", "two")):
        graph.invoke({"messages": [HumanMessage(text)]}, {**config("t"), "metadata": {"run_id": f"run{number}"}})
    assert len(texts(saver, "t")) == 4
    saver.delete_for_runs(["run1"])
    assert [text for _, text in texts(saver, "t")] == ["one", "You said: one"]
    saver.delete_for_runs(["run0"])
    with pytest.raises(SessionError):
        saver.session("t")


def test_one_thread_of_many_writers_ends_as_its_newest_checkpoint(memory: Memory) -> None:
    saver = LangGraphSaver(memory)
    graph = chat(saver)
    writers = [threading.Thread(target=say, args=(graph, "t", f"from {number}")) for number in range(6)]
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    newest = graph.get_state(config("t")).values["messages"]
    assert [text for _, text in texts(saver, "t")] == [one.content for one in newest]


def test_its_session_is_asked_on_in_a_fork_and_its_prompt_is_reused(smollm2_memory: Memory) -> None:
    saver = LangGraphSaver(smollm2_memory)
    graph = chat(saver)
    say(graph, "harbour", "The lighthouse keeper reads the tide tables aloud. " * 30)
    fork = saver.session("harbour").fork()
    assert fork.ask("Who reads?", max_tokens=4).text is not None
    second = saver.session("harbour").fork()
    answer = second.ask("What is read?", max_tokens=4)
    assert answer.text is not None
    usage = answer.usage
    assert usage.tokens.cached > 0.8 * usage.tokens.prompt
    assert second.why() is not None
    assert len(texts(saver, "harbour")) == 2
