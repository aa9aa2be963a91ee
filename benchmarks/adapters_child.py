"""Agents of the bench `adapters`, each on its framework: ``python adapters_child.py SETTINGS`` where all of them are.

``SETTINGS`` is JSON: ``name`` of the agent, ``url`` of a daemon, ``model`` (a file) for the agent that needs no daemon,
``folder``, ``system`` and ``questions``, ``tokens`` of an answer. Printed is for each request the number of its turn,
and the tokens reused, of the prompt and of the answer. The memory is closed and opened again between turns, as by an
agent that is started anew.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

import httpx
from ctxreuse_agents import Memory


class Setup(NamedTuple):
    """What the bench gives; see above."""

    name: str
    url: str
    model: str
    folder: str
    system: str
    questions: list[str]
    tokens: int

    def turns(self) -> Iterator[tuple[int, str, Memory]]:
        """Yield each turn's number and question, and the memory, opened for it."""
        for number, question in enumerate(self.questions, 1):
            with Memory.open(Path(self.folder) / "memory") as memory:
                yield number, question, memory


class Requests:
    """Asks the daemon, and keeps what it says of each prompt."""

    def __init__(self, setup: Setup) -> None:
        self._http, self._tokens = httpx.Client(base_url=setup.url, timeout=600.0), setup.tokens
        self.turn, self.rows = 0, list[tuple[int, int, int, int]]()

    def answer(self, messages: list[dict[str, Any]]) -> str:
        """Return the text of an answer to a chat."""
        body = {"messages": messages, "max_tokens": self._tokens, "temperature": 0}
        made = self._post("/v1/chat/completions", body)
        usage = made["usage"]
        self.add(usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"], usage["completion_tokens"])
        return str(made["choices"][0]["message"]["content"])

    def message(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the blocks of an answer in Anthropic's format."""
        made = self._post("/v1/messages", {"model": "", "temperature": 0, "max_tokens": self._tokens, **body})
        usage = made["usage"]
        cached = usage["cache_read_input_tokens"]
        self.add(cached, cached + usage["cache_creation_input_tokens"] + usage["input_tokens"], usage["output_tokens"])
        return list(made["content"])

    def add(self, cached: int, prompt: int, made: int) -> None:
        """Note a request of this turn."""
        self.rows.append((self.turn, cached, prompt, made))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._http.post(path, json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.text[:300]}")
        return answer.json()


def openai_agents(setup: Setup, requests: Requests) -> str:
    """The OpenAI Agents SDK, its sessions and its model; the engine is in this process."""
    from ctxreuse_agents.adapters import OpenAIAgentsProvider, OpenAISession

    from agents import Agent, ModelSettings, RunConfig, Runner, set_tracing_disabled

    set_tracing_disabled(True)
    settings = ModelSettings(temperature=0.0, max_tokens=setup.tokens)
    agent = Agent(name="keeper", instructions=setup.system, model_settings=settings)
    with Memory.open(Path(setup.folder) / "memory", setup.model) as memory:
        here = RunConfig(model_provider=OpenAIAgentsProvider(memory))
        session = OpenAISession(memory, "keeper")
        for requests.turn, question in enumerate(setup.questions, 1):
            usage = Runner.run_sync(agent, question, session=session, run_config=here).context_wrapper.usage
            requests.add(usage.input_tokens_details.cached_tokens, usage.input_tokens, usage.output_tokens)
    return "openai-agents"


def langgraph(setup: Setup, requests: Requests) -> str:
    """A graph of LangGraph whose messages are in its checkpoints."""
    from ctxreuse_agents.adapters import LangGraphSaver
    from langgraph.graph import START, StateGraph
    from langgraph.graph.message import add_messages

    roles = {"human": "user", "ai": "assistant"}

    class State(TypedDict):
        messages: Annotated[list[Any], add_messages]

    def answer(state: State) -> dict[str, Any]:
        chat = [{"role": roles[one.type], "content": one.content} for one in state["messages"]]
        return {"messages": [("ai", requests.answer([{"role": "system", "content": setup.system}, *chat]))]}

    State.__annotations__["messages"] = Annotated[list[Any], add_messages]  # a string, which names what is local here
    graph = StateGraph(State)
    graph.add_node("answer", answer)
    graph.add_edge(START, "answer")
    for requests.turn, question, memory in setup.turns():
        app = graph.compile(checkpointer=LangGraphSaver(memory, keep=4))
        app.invoke({"messages": [("user", question)]}, {"configurable": {"thread_id": "keeper"}})
    return "langgraph"


def llama_index(setup: Setup, requests: Requests) -> str:
    """A chat engine of LlamaIndex over a buffer whose chat store is ours."""
    from ctxreuse_agents.adapters import LlamaIndexChatStore
    from llama_index.core.chat_engine import SimpleChatEngine
    from llama_index.core.llms import ChatMessage, ChatResponse, CompletionResponse, CustomLLM, LLMMetadata
    from llama_index.core.memory import ChatMemoryBuffer

    class Model(CustomLLM):  # type: ignore[misc]
        @property
        def metadata(self) -> Any:
            return LLMMetadata(model_name="daemon", is_chat_model=True)

        def chat(self, messages: Any, **given: Any) -> Any:
            text = requests.answer([{"role": one.role.value, "content": one.content} for one in messages])
            return ChatResponse(message=ChatMessage(role="assistant", content=text))

        def complete(self, prompt: str, formatted: bool = False, **given: Any) -> Any:
            return CompletionResponse(text=requests.answer([{"role": "user", "content": prompt}]))

        def stream_complete(self, prompt: str, formatted: bool = False, **given: Any) -> Any:
            yield self.complete(prompt)

    for requests.turn, question, memory in setup.turns():
        store = LlamaIndexChatStore(memory)
        buffer = ChatMemoryBuffer.from_defaults(chat_store=store, chat_store_key="keeper", token_limit=100_000)
        SimpleChatEngine.from_defaults(llm=Model(), memory=buffer, system_prompt=setup.system).chat(question)
    return "llama-index-core"


def google_adk(setup: Setup, requests: Requests) -> str:
    """A runner of Google's ADK whose sessions are ours."""
    from ctxreuse_agents.adapters import AdkSessionService
    from google.adk.agents import LlmAgent
    from google.adk.models import BaseLlm, LlmResponse
    from google.adk.runners import Runner
    from google.genai.types import Content, Part

    roles = {"user": "user", "model": "assistant"}

    class Model(BaseLlm):  # type: ignore[misc]
        async def generate_content_async(self, request: Any, stream: bool = False) -> AsyncIterator[Any]:
            said = [(roles[one.role], "".join(part.text or "" for part in one.parts)) for one in request.contents]
            chat = [("system", str(request.config.system_instruction)), *said]
            text = requests.answer([{"role": role, "content": content} for role, content in chat])
            yield LlmResponse(content=Content(role="model", parts=[Part(text=text)]))

    agent = LlmAgent(name="keeper", model=Model(model="daemon"), instruction=setup.system)
    who: dict[str, Any] = {"user_id": "ann", "session_id": "s"}

    async def turn(memory: Memory, question: str, *, first: bool) -> None:
        sessions = AdkSessionService(memory)
        if first:
            await sessions.create_session(app_name="harbour", **who)
        runner = Runner(agent=agent, app_name="harbour", session_service=sessions)
        message = Content(role="user", parts=[Part(text=question)])
        async for _ in runner.run_async(**who, new_message=message):
            pass

    for requests.turn, question, memory in setup.turns():
        asyncio.run(turn(memory, question, first=requests.turn == 1))
    return "google-adk"


def mem0(setup: Setup, requests: Requests) -> str:
    """An agent that keeps its chat, and puts what mem0 finds on our vectors before each question."""
    from ctxreuse_agents.adapters import Mem0Embedder, Mem0VectorStore
    from mem0 import Memory as Mem0
    from mem0.configs.base import MemoryConfig

    chat: list[dict[str, Any]] = [{"role": "system", "content": setup.system}]
    for requests.turn, question, memory in setup.turns():
        daemon = {"openai_base_url": setup.url + "/v1", "api_key": "none"}
        config = MemoryConfig(
            llm={"provider": "openai", "config": daemon}, history_db_path=setup.folder + "/history.db"
        )
        config.vector_store, config.embedder = Mem0VectorStore.config(memory), Mem0Embedder.config()
        facts = Mem0(config)
        found = facts.search(question, filters={"user_id": "ann"}, top_k=1)["results"]
        known = "".join(f"You know: {one['memory']}\n" for one in found)
        chat.append({"role": "user", "content": known + question})
        chat.append({"role": "assistant", "content": requests.answer(chat)})
        facts.add(question, user_id="ann", infer=False)
    return "mem0ai"


def memory_tool(setup: Setup, requests: Requests) -> str:
    """A loop in Anthropic's format whose tool is the memory tool: a forced call in each turn, and a text after it."""
    from ctxreuse_agents.adapters import MemoryTool

    path = "/memories/log.md"
    fields = {"command": {"enum": ["view"]}, "path": {"enum": [path]}}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    tool = {"name": "memory", "description": "Files that last.", "input_schema": schema}
    messages: list[dict[str, Any]] = []
    for requests.turn, question, memory in setup.turns():
        files = MemoryTool(memory)
        files.run({"command": "create", "path": path, "file_text": f"Day {requests.turn}."})
        messages.append({"role": "user", "content": question})
        for choice in ({"type": "tool", "name": "memory"}, {"type": "none"}):
            body = {"system": setup.system, "messages": messages, "tools": [tool], "tool_choice": choice}
            blocks = requests.message(body | ({} if choice["type"] == "none" else {"max_tokens": 100}))
            messages.append({"role": "assistant", "content": blocks})
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": files.run(block["input"])}
                for block in blocks
                if block["type"] == "tool_use"
            ]
            if results:
                messages.append({"role": "user", "content": results})
    return "ctxreuse"


_AGENTS: dict[str, Callable[[Setup, Requests], str]] = {
    one.__name__: one for one in (openai_agents, langgraph, llama_index, google_adk, mem0, memory_tool)
}

if __name__ == "__main__":
    setup = Setup(**json.loads(sys.argv[1]))
    requests = Requests(setup)
    package = _AGENTS[setup.name](setup, requests)
    print(json.dumps({"rows": requests.rows, "package": f"{package} {version(package)}"}))
