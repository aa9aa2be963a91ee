"""Ask a running edge daemon about a document, as any OpenAI-compatible client would; see where its tokens came from.

    ctxreuse-edge serve                 # in another terminal
    python examples/edge_client.py [URL]

Ask twice: the document is computed once. A second device with the same cloud fetches it from there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx

DOCUMENT = """The lighthouse of Ness was built in 1871. Its lamp turns once every twenty seconds. The keeper winds the
clockwork each evening at six, trims the wick at midnight and writes the log at dawn. Boats from the village bring oil
on the first Monday of the month, weather permitting. In fog the horn sounds twice a minute.
"""


def events(url: str, question: str) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer."""
    messages = [{"role": "system", "content": 4 * DOCUMENT}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, "stream": True}
    with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=300) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{answer.status_code}: {answer.read().decode()}")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def main(url: str) -> None:
    for question in ("When does the keeper write the log?", "How often does the horn sound in fog?"):
        print(f"\n{question}\n  ", end="")
        started, first = time.perf_counter(), 0.0
        usage: dict[str, Any] = {}
        for event in events(url, question):
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    first = first or time.perf_counter() - started
                    print(text, end="", flush=True)
            usage = event.get("usage") or usage
        sources = usage["prompt_tokens_details"]["sources"]
        counts = ", ".join(f"{count} {source}" for source, count in sources.items() if count)
        print(f"\n  {first:.2f} s to the first token; {usage['prompt_tokens']} prompt tokens: {counts}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7351")
