"""What an answer may be where there are tools: text, calls whose arguments have the tools' schemas, or either."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ctxreuse.constrain.grammar import STYLE, Grammar, closed
from ctxreuse.toolcalls.families import Family
from ctxreuse.toolcalls.tools import Tool

if TYPE_CHECKING:
    from ctxreuse.engines.text import TextModel

__all__ = ["MAX_CALLS", "ToolChoice", "call_grammar", "special_markers"]

#: Calls of one answer at most.
MAX_CALLS = 16


class ToolChoice(msgspec.Struct, frozen=True):
    """``auto``: text or calls; ``required``: calls; ``none``: text. ``name``: only calls of this tool. ``parallel``: an
    answer may have several calls."""

    mode: Literal["auto", "required", "none"] = "auto"
    name: str = ""
    parallel: bool = True


def call_grammar(
    family: Family,
    tools: Sequence[Tool],
    choice: ToolChoice,
    special: Mapping[str, int],
    answer: Grammar | None = None,
) -> Grammar:
    """The grammar of an answer.

    Args:
        family: how calls are written.
        tools: at least one.
        choice: what is allowed; the tool that it names is one of them.
        special: ids of the markers in the family's text that are special tokens, see `special_markers`.
        answer: what text must look like; None: anything.
    """
    # Where calls have no marker, text begins otherwise than they do.
    text = r"/(.|\n)*/" if family.begin else r"/([^{ \n]|\{[^\"])(.|\n)*/"
    if choice.mode == "none":
        if answer is not None:
            return answer
        if family.begin and family.begin not in special:
            text += f" & ~/(.|\\n)*{_escaped(family.begin)}(.|\\n)*/"
        return Grammar.lark(f"start: TEXT\nTEXT: {text}\n")
    mark = _words(family.begin, special)
    used = [tool for tool in tools if choice.name in ("", tool.name)]
    more = f"({_words(family.between, special)} call){{0,{MAX_CALLS - 1}}}" if choice.parallel else ""
    rules = [f"calls: {_words(family.open, special)} call {more} {_words(family.close, special)}"]
    rules.append("call: " + " | ".join(f"call_{n}" for n in range(len(used))))
    for n, tool in enumerate(used):
        head = f"{family.head}{family.called(tool.name)}"
        rules.append(f"call_{n}: {_words(head + family.middle, special)} args_{n} {_words(family.tail, special)}")
        options: dict[str, Any] = {**STYLE, "lenient": not tool.strict}
        schema = {**closed(tool.schema), "x-guidance": options}
        rules.append(f"args_{n}: %json {json.dumps(schema, ensure_ascii=False)}")
    if choice.mode == "required" or choice.name:
        rules.insert(0, f"start: {mark} calls")
    elif answer is not None:
        rules[:0] = [f"start: answer | {mark} calls", f"answer: {_inline(answer)}"]
    elif not family.begin:
        rules[:0] = ["start: TEXT | calls", f"TEXT: {text}"]
    elif family.begin in special:
        rules[:0] = [f"start: TEXT | TEXT? {mark} calls", f"TEXT: {text}"]
    else:
        rules[:0] = ["start: TEXT | begun calls", f"begun[lazy]: TEXT {mark}", f"TEXT: {text}"]
    return Grammar.lark("\n".join(rules) + "\n")


def special_markers(text: TextModel, family: Family) -> dict[str, int]:
    """The special tokens in the text of a family's calls, with their ids."""
    words = (family.begin, family.open, family.head, family.middle, family.tail, family.between, family.close)
    found = [marker for marker in text.markers if any(marker in word for word in words)]
    return {marker: int(text.encode(marker)[0]) for marker in sorted(found, key=len, reverse=True)}


def _inline(answer: Grammar) -> str:
    if answer.kind == "json_schema":
        options: dict[str, Any] = {**STYLE, "lenient": answer.lenient}
        return f"%json {json.dumps({**json.loads(answer.text), 'x-guidance': options}, ensure_ascii=False)}"
    return f"/{answer.text.replace('/', chr(92) + '/')}/" if answer.kind == "regex" else f"%lark {{\n{answer.text}\n}}"


def _words(text: str, special: Mapping[str, int]) -> str:
    """A text as the grammar writes it, its special tokens by their ids."""
    pieces = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    return " ".join(_word(piece, special) for piece in pieces if piece)


def _word(piece: str, special: Mapping[str, int]) -> str:
    return f"<[{special[piece]}]>" if piece in special else json.dumps(piece, ensure_ascii=False)


def _escaped(text: str) -> str:
    return re.sub(r"[^\w<>]", lambda char: "\\" + char[0], text)
