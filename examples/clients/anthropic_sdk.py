"""An agent with two tools on Anthropic's official SDK; nothing here is about ctxreuse but the address.

ctxreuse-edge serve                 # in another terminal
pip install anthropic
python examples/clients/anthropic_sdk.py [URL]
"""

import sys

from anthropic import Anthropic


def get_weather(city: str) -> str:
    return f"It is sunny in {city}."


def add(a: int, b: int) -> str:
    return str(a + b)


FUNCTIONS = {"get_weather": get_weather, "add": add}
CITY, NUMBER = {"type": "string"}, {"type": "integer"}
TOOLS = [
    {"name": name, "description": about, "strict": True, "input_schema": {
        "type": "object", "properties": fields, "required": list(fields), "additionalProperties": False,
    }}
    for name, about, fields in (
        ("get_weather", "The weather in a city", {"city": CITY}),
        ("add", "Add two integers", {"a": NUMBER, "b": NUMBER}),
    )
]  # fmt: skip
MODEL, KEPT = "smollm2", {"type": "ephemeral", "ttl": "1h"}
SYSTEM = [{"type": "text", "text": "You help with the weather and with sums. " * 8, "cache_control": KEPT}]


def main(url: str) -> None:
    client = Anthropic(base_url=url, api_key="none", timeout=600)
    messages = []
    for question in ("What is the weather in Paris?", "Add 2 and 3.", "And in Rome?"):
        messages.append({"role": "user", "content": question})
        # A model of a billion parameters or more decides by itself: {"type": "auto"}.
        for choice in ("any", "none"):
            answer = client.messages.create(
                model=MODEL, system=SYSTEM, messages=messages, tools=TOOLS, tool_choice={"type": choice},
                max_tokens=64, extra_body={"temperature": 0},
            )  # fmt: skip
            messages.append({"role": "assistant", "content": answer.content})
            results = []
            for block in answer.content:
                if block.type == "tool_use":
                    result = FUNCTIONS[block.name](**block.input)
                    results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
                    print(f"call    {block.name}({block.input}) = {result}")
            if results:
                messages.append({"role": "user", "content": results})
            usage = answer.usage
            prompt = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
            print(f"reused  {usage.cache_read_input_tokens} of {prompt} tokens of the prompt")
        print(f"answer  {' '.join(block.text for block in answer.content)}")
    messages.append({"role": "user", "content": "And in Oslo?"})
    common = {"model": MODEL, "system": SYSTEM, "messages": messages, "tools": TOOLS}
    with client.messages.stream(
        **common, tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
        max_tokens=64, extra_body={"temperature": 0},
    ) as stream:  # fmt: skip
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        [call] = stream.get_final_message().content
    print(f"stream  {len(pieces)} pieces, {call.name}({call.input})")
    print(f"tokens  {client.messages.count_tokens(**common).input_tokens}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7351")
