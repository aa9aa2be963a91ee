"""An agent with two tools on LiteLLM; nothing here is about ctxreuse but the address.

ctxreuse-edge serve                 # in another terminal
pip install litellm
python examples/clients/litellm_agent.py [URL]
"""

import json
import os
import sys

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices

import litellm


def get_weather(city: str) -> str:
    return f"It is sunny in {city}."


def add(a: int, b: int) -> str:
    return str(a + b)


FUNCTIONS = {"get_weather": get_weather, "add": add}
CITY, NUMBER = {"type": "string"}, {"type": "integer"}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": about, "parameters": {
        "type": "object", "properties": fields, "required": list(fields),
    }}}
    for name, about, fields in (
        ("get_weather", "The weather in a city", {"city": CITY}),
        ("add", "Add two integers", {"a": NUMBER, "b": NUMBER}),
    )
]  # fmt: skip


def main(url: str) -> None:
    messages = [{"role": "system", "content": "You help with the weather and with sums."}]
    for question in ("What is the weather in Paris?", "Add 2 and 3.", "And in Rome?"):
        messages.append({"role": "user", "content": question})
        # A model of a billion parameters or more decides by itself: tool_choice="auto".
        for choice in ("required", "none"):
            answer = litellm.completion(
                model="openai/smollm2", api_base=url + "/v1", api_key="none", timeout=600,
                messages=messages, tools=TOOLS, tool_choice=choice, max_tokens=64, temperature=0,
            )  # fmt: skip
            message, usage = answer.choices[0].message, answer.usage
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                print(f"call    {call.function.name}({call.function.arguments}) = {result}")
            reused = usage.prompt_tokens_details.cached_tokens
            print(f"reused  {reused} of {usage.prompt_tokens} tokens of the prompt")
        print(f"answer  {message.content}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7351")
