"""A tiny model whose chat template shows tools, calls and results as Hermes and Qwen do."""

from __future__ import annotations

import json
from pathlib import Path

from support.tiny_text import save_model

HERMES = (
    "{% if tools %}<|im_start|>system\n{{ messages[0]['content'] }}\n<tools>"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] %}{% if not loop.first or m['content'] %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% elif m['role'] == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m['content'] }}\n</tool_response>"
    "<|im_end|>\n{% elif not loop.first or not tools %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def hermes_folder(place: Path) -> Path:
    folder = save_model(place, positions=4096)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": HERMES}))
    return folder
