"""LlamaIndex: the chat store as its own one, and a memory block in its memory."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_agents import Memory
from ctxreuse_agents.adapters import LlamaIndexChatStore, LlamaIndexMemoryBlock
from llama_index.core.llms import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.memory import Memory as LlamaMemory
from llama_index.core.storage.chat_store import SimpleChatStore

MESSAGES = [
    ChatMessage(role="user", content="What is 2 + 2?"),
    ChatMessage(role="assistant", content=None, additional_kwargs={"tool_calls": [{"id": "c1", "name": "add"}]}),
    ChatMessage(role="tool", content="4", additional_kwargs={"tool_call_id": "c1"}),
    ChatMessage(role="user", blocks=[TextBlock(text="And"), ImageBlock(url="http://x/y.png")]),
    ChatMessage(role=MessageRole.DEVELOPER, content="Be brief."),
    ChatMessage(role="assistant", content="4"),
]


def plain(found: Any) -> Any:
    if isinstance(found, list):
        return [plain(one) for one in found]
    return found.model_dump() if isinstance(found, ChatMessage) else found


def test_the_chat_store_answers_as_llamaindexs_own_does(memory: Memory) -> None:
    ours, theirs, dice = LlamaIndexChatStore(memory), SimpleChatStore(), random.Random(3)
    keys = ["a", "b/ü \n", "c" * 40]
    for _ in range(150):
        key, kind = dice.choice(keys), dice.randrange(6)
        for store in (ours, theirs):
            store.add_message(key, MESSAGES[kind])
        if kind == 1:
            chosen = dice.choices(MESSAGES, k=dice.randint(1, 4))
            ours.set_messages(key, chosen)
            theirs.set_messages(key, list(chosen))
        elif kind == 2:
            at = dice.randint(0, 5)
            if at < len(theirs.get_messages(key)):
                assert plain(ours.delete_message(key, at)) == plain(theirs.delete_message(key, at))
        elif kind == 3:
            assert plain(ours.delete_last_message(key)) == plain(theirs.delete_last_message(key))
        elif kind == 4 and dice.random() < 0.3:
            assert plain(ours.delete_messages(key)) == plain(theirs.delete_messages(key))
        assert plain(ours.get_messages(key)) == plain(theirs.get_messages(key))
        assert {one for one in ours.get_keys() if ours.get_messages(one)} == {
            one for one in theirs.get_keys() if theirs.get_messages(one)
        }
    assert ours.get_messages("no") == []
    assert ours.delete_messages("no") is ours.delete_message("no", 0) is ours.delete_last_message("no") is None


def test_a_chat_buffer_survives_and_its_chat_is_a_session(tmp_path: Path) -> None:
    with Memory.open(tmp_path / "m") as memory:
        buffer = ChatMemoryBuffer.from_defaults(chat_store=LlamaIndexChatStore(memory), chat_store_key="anna")
        for message in MESSAGES:
            buffer.put(message)
    with Memory.open(tmp_path / "m") as memory:
        store = LlamaIndexChatStore(memory)
        buffer = ChatMemoryBuffer.from_defaults(chat_store=store, chat_store_key="anna")
        assert plain(buffer.get_all()) == plain(MESSAGES)
        fork = store.session("anna").fork(at=store.session("anna").turns()[0])
        assert fork.turns()[0].content == memory.search("2 + 2")[0].turn.content == MESSAGES[0].content


@pytest.mark.parametrize("limit", [400])
def test_what_leaves_the_short_term_memory_is_recalled(memory: Memory, limit: int) -> None:
    block = LlamaIndexMemoryBlock(memory, tokens=60, namespace="anna", priority=1)
    talk = LlamaMemory.from_defaults(
        session_id="t", token_limit=limit, chat_history_token_ratio=0.5, token_flush_size=50, memory_blocks=[block]
    )

    async def run() -> list[ChatMessage]:
        await talk.aput(ChatMessage(role="user", content="The boiler in the cellar was replaced in 1987."))
        for number in range(40):
            await talk.aput(ChatMessage(role="user", content=f"Note {number}: the sea is calm, the weather is fine."))
            await talk.aput(ChatMessage(role="assistant", content="Noted."))
        await talk.aput(ChatMessage(role="user", content="When was the boiler replaced?"))
        return await talk.aget()

    said = "\n".join(message.content or "" for message in asyncio.run(run()))
    assert "replaced in 1987" in said
    assert memory.search("boiler", namespace="anna")
    assert asyncio.run(block.atruncate("x" * 100, 5)) == "x" * 80
    assert asyncio.run(block.atruncate("x" * 100, 50)) is None


def test_threads_and_tasks_use_two_stores_on_one_memory(memory: Memory) -> None:
    both = [LlamaIndexChatStore(memory), LlamaIndexChatStore(memory)]

    async def tasks() -> None:
        adds = (both[n % 2].async_add_message("chat", ChatMessage(role="user", content=f"a{n}")) for n in range(20))
        await asyncio.gather(*adds)

    asyncio.run(tasks())
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda n: both[n % 2].add_message("chat", ChatMessage(role="user", content=f"t{n}")), range(20)))
    assert len({message.content for message in both[0].get_messages("chat")}) == 40
