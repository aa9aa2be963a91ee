"""An agent with two tools on LangChain; nothing here is about ctxreuse but the address.

ctxreuse-edge serve                 # in another terminal
pip install langchain-openai
python examples/clients/langchain_agent.py [URL]
"""

import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: str) -> str:
    """The weather in a city"""
    return f"It is sunny in {city}."


@tool
def add(a: int, b: int) -> int:
    """Add two integers"""
    return a + b


TOOLS = {one.name: one for one in (get_weather, add)}


def main(url: str) -> None:
    model = ChatOpenAI(base_url=url + "/v1", api_key="none", model="smollm2", temperature=0, max_tokens=64, timeout=600)
    messages = [SystemMessage("You help with the weather and with sums.")]
    for question in ("What is the weather in Paris?", "Add 2 and 3.", "And in Rome?"):
        messages.append(HumanMessage(question))
        # A model of a billion parameters or more decides by itself: tool_choice="auto".
        for choice in ("required", "none"):
            answer = model.bind_tools(list(TOOLS.values()), tool_choice=choice).invoke(messages)
            messages.append(answer)
            for call in answer.tool_calls:
                messages.append(TOOLS[call["name"]].invoke(call))
                print(f"call    {call['name']}({call['args']}) = {messages[-1].content}")
            usage = answer.usage_metadata
            print(
                f"reused  {usage['input_token_details']['cache_read']} of {usage['input_tokens']} tokens of the prompt"
            )
        print(f"answer  {answer.content}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7351")
