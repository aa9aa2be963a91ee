"""An agent with two tools on LlamaIndex; nothing here is about ctxreuse but the address.

ctxreuse-edge serve                 # in another terminal
pip install llama-index-llms-openai-like
python examples/clients/llama_index_agent.py [URL]
"""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def get_weather(city: str) -> str:
    """The weather in a city"""
    return f"It is sunny in {city}."


def add(a: int, b: int) -> int:
    """Add two integers"""
    return a + b


TOOLS = {one.metadata.name: one for one in map(FunctionTool.from_defaults, (get_weather, add))}


def main(url: str) -> None:
    model = OpenAILike(
        model="smollm2", api_base=url + "/v1", api_key="none", is_chat_model=True, is_function_calling_model=True,
        temperature=0, max_tokens=64, timeout=600,
    )  # fmt: skip
    messages = [ChatMessage(role="system", content="You help with the weather and with sums.")]
    for question in ("What is the weather in Paris?", "Add 2 and 3.", "And in Rome?"):
        messages.append(ChatMessage(role="user", content=question))
        # A model of a billion parameters or more decides by itself: leave out tool_required.
        answer = model.chat_with_tools(list(TOOLS.values()), chat_history=messages, tool_required=True)
        messages.append(answer.message)
        for call in model.get_tool_calls_from_response(answer):
            result = TOOLS[call.tool_name](**call.tool_kwargs)
            messages.append(
                ChatMessage(role="tool", content=str(result.content), additional_kwargs={"tool_call_id": call.tool_id})
            )
            print(f"call    {call.tool_name}({call.tool_kwargs}) = {result.content}")
        answer = model.chat(messages)
        messages.append(answer.message)
        usage = answer.raw.usage
        print(f"reused  {usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} tokens of the prompt")
        print(f"answer  {answer.message.content}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7351")
