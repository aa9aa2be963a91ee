"""An agent with two tools on Ollama's official client; nothing here is about ctxreuse but the address.

ctxreuse-edge serve                 # in another terminal
pip install ollama
python examples/clients/ollama_client.py [URL]
"""

import json
import sys

from ollama import Client


def get_weather(city: str) -> str:
    return f"It is sunny in {city}."


def add(a: int, b: int) -> str:
    return str(a + b)


FUNCTIONS = {"get_weather": get_weather, "add": add}
CITY, NUMBER = {"type": "string", "maxLength": 40}, {"type": "integer"}


def schema(name: str, fields: dict) -> dict:
    arguments = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    named = {"name": {"const": name}, "arguments": arguments}
    return {"type": "object", "properties": named, "required": list(named), "additionalProperties": False}


# A model of a billion parameters or more decides by itself: tools=[get_weather, add]. A smaller one has a format.
FORMAT = {"anyOf": [schema("get_weather", {"city": CITY}), schema("add", {"a": NUMBER, "b": NUMBER})]}
SYSTEM = 'Answer with a call of get_weather, {"city": ...}, or add, {"a": ..., "b": ...}, then with words.'


def main(url: str) -> None:
    client = Client(host=url, timeout=600)
    [model] = client.list().models
    print(f"model   {model.model}, {client.show(model.model).capabilities}")
    messages = [{"role": "system", "content": SYSTEM}]
    options = {"temperature": 0, "num_predict": 64}
    for question in ("What is the weather in Paris?", "Add 2 and 3.", "And in Rome?"):
        messages.append({"role": "user", "content": question})
        answer = client.chat(model.model, messages, format=FORMAT, options=options)
        call = json.loads(answer.message.content)
        result = FUNCTIONS[call["name"]](**call["arguments"])
        print(f"call    {call['name']}({call['arguments']}) = {result}")
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"function": call}]})
        messages.append({"role": "tool", "tool_name": call["name"], "content": result})
        pieces = list(client.chat(model.model, messages, options=options, stream=True))
        text = "".join(piece.message.content for piece in pieces)
        messages.append({"role": "assistant", "content": text})
        print(f"answer  {' '.join(text.split())}")
        print(f"prompt  {pieces[-1].prompt_eval_count} tokens, {pieces[-1].prompt_eval_duration / 1e6:.0f} ms")
    said = client.generate(model.model, "The capital of France is", raw=True, options=options | {"num_predict": 4})
    print(f"text    {said.response}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7351")
