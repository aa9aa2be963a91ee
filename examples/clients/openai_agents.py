"""An agent with two tools on the OpenAI Agents SDK; nothing here is about ctxreuse but the address.

ctxreuse-edge serve                 # in another terminal
pip install openai-agents
python examples/clients/openai_agents.py [URL]
"""

import sys

from openai import AsyncOpenAI

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city"""
    return f"It is sunny in {city}."


@function_tool
def add(a: int, b: int) -> int:
    """Add two integers"""
    return a + b


def main(url: str) -> None:
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=url + "/v1", api_key="none", timeout=600))
    # A model of a billion parameters or more decides by itself: leave out tool_choice.
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=256)
    agent = Agent(
        name="helper",
        instructions="You help with the weather and with sums.",
        model="smollm2",
        tools=[get_weather, add],
        model_settings=settings,
    )
    # Each turn continues the response that the last one ended with, which the server has kept.
    last = None
    for question in ("What is the weather in Paris?", "Add 2 and 3.", "And in Rome?"):
        done = Runner.run_sync(agent, question, previous_response_id=last, max_turns=6)
        last = done.last_response_id
        for item in done.new_items:
            if item.type == "tool_call_item":
                print(f"call    {item.raw_item.name}({item.raw_item.arguments})")
            elif item.type == "tool_call_output_item":
                print(f"result  {item.output}")
        usage = done.context_wrapper.usage
        print(f"reused  {usage.input_tokens_details.cached_tokens} of {usage.input_tokens} tokens of the prompt")
        print(f"answer  {done.final_output}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7351")
