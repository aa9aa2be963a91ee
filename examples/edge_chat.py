"""Ask a running edge daemon as any OpenAI client would, with nothing but the standard library.

Start one with `ctxreuse-edge serve`, then run: python examples/edge_chat.py [URL]
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

MANUAL = "To open the box, press the red button twice, wait for the click, then lift the lid. " * 40


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def main(url: str = "http://127.0.0.1:7351") -> None:
    messages = [{"role": "system", "content": f"Answer from this manual: {MANUAL}"}]
    for question in ("How do I open the box?", "Which button is it?"):
        conversation = [*messages, {"role": "user", "content": question}]
        answer = post(f"{url}/v1/chat/completions", {"messages": conversation, "temperature": 0, "max_tokens": 24})
        usage = answer["usage"]
        reused = usage["prompt_tokens_details"]["cached_tokens"]
        print(f"> {question}\n{answer['choices'][0]['message']['content'].strip()}")
        print(f"  [{reused:,} of {usage['prompt_tokens']:,} prompt tokens were not computed again]")


if __name__ == "__main__":
    main(*sys.argv[1:])
