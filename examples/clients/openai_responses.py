"""An agent with two tools on the Responses API of the official OpenAI SDK; nothing here is about ctxreuse but the
address.

ctxreuse-edge serve                 # in another terminal
pip install openai
python examples/clients/openai_responses.py [URL]
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
    {"type": "function", "name": name, "description": about, "parameters": {
        "type": "object", "properties": fields, "required": list(fields), "additionalProperties": False,
    }, "strict": True}
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
    answer = None
    for question in ("What is the weather in Paris?", "Add 2 and 3.", "And in Rome?"):
        items = [{"role": "user", "content": question}]
        # A model of a billion parameters or more decides by itself: tool_choice="auto".
        for choice in ("required", "none"):
            events = list(client.responses.create(
                model="smollm2", instructions="You help with the weather and with sums.", input=items, tools=TOOLS,
                tool_choice=choice, parallel_tool_calls=False, max_output_tokens=64, temperature=0, stream=True,
                previous_response_id=answer.id if answer else None,
            ))  # fmt: skip
            answer, items = events[-1].response, []
            for call in answer.output:
                if call.type == "function_call":
                    result = FUNCTIONS[call.name](**json.loads(call.arguments))
                    items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
                    print(f"call    {call.name}({call.arguments}) = {result}")
            usage = answer.usage
            print(f"reused  {usage.input_tokens_details.cached_tokens} of {usage.input_tokens} tokens of the prompt")
        print(f"answer  {answer.output_text}")
    kept = client.responses.retrieve(answer.id)
    print(f"kept    {len(client.responses.input_items.list(kept.id, limit=100).data)} items before {kept.id}")
    with client.responses.stream(
        model="smollm2", input="What is the weather in Oslo?", tools=TOOLS, tool_choice="required",
        parallel_tool_calls=False, store=False, max_output_tokens=256,
    ) as stream:  # fmt: skip
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
    (call,) = stream.get_final_response().output
    print(f"stream  {len(pieces)} pieces, {call.name}({json.dumps(json.loads(''.join(pieces)))})")
    typed = client.responses.parse(model="smollm2", input="Describe Paris.", text_format=City, max_output_tokens=64)
    print(f"typed   {typed.output_parsed!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7351")
