"""Any id as a letter: what a completion needs of a tokenizer."""

from __future__ import annotations

from typing import Any

from ctxreuse.errors import EngineError


class Letters:
    stop_ids: frozenset[int] = frozenset()
    markers: frozenset[str] = frozenset()

    def encode(self, text: str, *, markers: bool = True) -> Any:
        raise AssertionError

    def decode(self, ids: Any) -> str:
        return "".join(chr(0x100 + int(i)) for i in ids)

    def render(self, messages: Any, *, generate: bool) -> str:
        raise EngineError("letters have no template")
