"""An agent with two tools on the official OpenAI SDK; nothing here is about ctxreuse but the address.

ctxreuse-edge serve                 # in another terminal
pip install openai
python examples/clients/openai_sdk.py [URL]
"""

import json
import sys

from openai import OpenAI
from pydantic import BaseModel


def get_weather(city: str) -> str:
    return f"It is sunny in {city}."


def add(a: int, b: int) -> str:
    return str(a + b)


FUNCTIONS = {"get_weather": get_weather, "add": add}
CITY, NUMBER = {"type": "string"}, {"type": "integer"}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": about, "parameters": {
        "type": "object", "properties": fields, "required": list(fields), "additionalProperties": False,
    }, "strict": True}}
    for name, about, fields in (
        ("get_weather", "The weather in a city", {"city": CITY}),
        ("add", "Add two integers", {"a": NUMBER, "b": NUMBER}),
    )
]  # fmt: skip


class City(BaseModel):
    name: str
    capital: bool


def main(url: str) -> None:
    client = OpenAI(base_url=url + "/v1", api_key="none", timeout=600)
    messages = [{"role": "system", "content": "You help with the weather and with sums."}]
    for question in ("What is the weather in Paris?", "Add 2 and 3.", "And in Rome?"):
        messages.append({"role": "user", "content": question})
        # A model of a billion parameters or more decides by itself: tool_choice="auto".
        for choice in ("required", "none"):
            answer = client.chat.completions.create(
                model="smollm2", messages=messages, tools=TOOLS, tool_choice=choice, max_tokens=64, temperature=0
            )
            message, usage = answer.choices[0].message, answer.usage
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                print(f"call    {call.function.name}({call.function.arguments}) = {result}")
            reused = usage.prompt_tokens_details.cached_tokens
            print(f"reused  {reused} of {usage.prompt_tokens} tokens of the prompt")
        print(f"answer  {message.content}")
    stream = client.chat.completions.create(
        model="smollm2", messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
        max_tokens=64, temperature=0, stream=True,
    )  # fmt: skip
    pieces = [call.function for event in stream for choice in event.choices for call in choice.delta.tool_calls or ()]
    streamed = json.loads("".join(piece.arguments or "" for piece in pieces))
    print(f"stream  {len(pieces)} pieces, {pieces[0].name}({json.dumps(streamed)})")
    question = [{"role": "user", "content": "Describe Paris."}]
    typed = client.chat.completions.parse(
        model="smollm2", messages=question, response_format=City, max_tokens=64, temperature=0
    )
    print(f"typed   {typed.choices[0].message.parsed!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7351")
