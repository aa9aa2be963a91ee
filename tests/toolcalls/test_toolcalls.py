"""Calls of tools: families, what constrained answers are, and that they are read the same however they come."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.constrain import Grammar, GrammarCompiler
from ctxreuse.engines.text import Message, ToolCall
from ctxreuse.errors import GrammarError
from ctxreuse.toolcalls import (
    FAMILIES,
    ArgumentsDelta,
    CallBegan,
    CallParser,
    TextDelta,
    Tool,
    ToolChoice,
    call_grammar,
    family_of,
    parse_calls,
    prompt_text,
    special_markers,
)
from support.tiny_text import tiny_text

WEATHER = Tool(
    "get_weather",
    "The weather of a place.",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
CLOCK = Tool('uhr "é"', "", {"properties": {"on": {"type": "boolean"}}, "additionalProperties": False})
TOOLS = (WEATHER, CLOCK)
EVERY = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


def marked_text() -> Any:
    """A tokenizer in which Mistral's markers are special tokens, as in its models."""
    from tokenizers import AddedToken

    text = tiny_text()
    text._tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True), AddedToken("[ARGS]", special=True)])
    return text


def answer(text: Any, grammar: Grammar, rng: Any, *, say: str = "", most: int = 600) -> str:
    """What a model that draws letters blindly says in this grammar, after it began with ``say``."""
    size = len(text.vocabulary().tokens)
    constraint, ids = GrammarCompiler(text, size, frozenset({257})).compile(grammar), []
    forced = text.encode(say).tolist()
    for n in range(most):
        masked = constraint.mask(rng.normal(size=size).astype(np.float32))
        token = forced[n] if n < len(forced) else int(masked.argmax())
        assert np.isfinite(masked[token]), text.decode([*ids, token], markers=True)
        if token == 257:
            break
        ids.append(token)
        if constraint.advance(token):
            break
    return str(text.decode(ids, markers=True))


def valid(call: ToolCall) -> bool:
    found = json.loads(call.arguments)
    if call.name == WEATHER.name:
        return set(found) <= {"city", "days"} and len(found["city"]) <= 8 and found.get("days", 0) <= 9
    return call.name == CLOCK.name and set(found) <= {"on"} and type(found.get("on", True)) is bool


@EVERY
@pytest.mark.parametrize("text", [tiny_text(), marked_text()], ids=["plain", "special"])
def test_required_and_named_calls_are_valid_whatever_the_model_says(family: Any, text: Any) -> None:
    special, rng = special_markers(text, family), np.random.default_rng(3)
    for choice in (ToolChoice("required"), ToolChoice(name=CLOCK.name), ToolChoice("required", parallel=False)):
        said, calls = parse_calls(family, answer(text, call_grammar(family, TOOLS, choice, special), rng))
        assert calls
        if all(call.arguments.endswith("}") for call in calls):  # blind answers may be longer than is waited for
            assert said == ""
            assert all(map(valid, calls))
        assert not choice.name or {call.name for call in calls} == {CLOCK.name}
        assert choice.parallel or len(calls) == 1


@EVERY
@pytest.mark.parametrize("text", [tiny_text(), marked_text()], ids=["plain", "special"])
def test_auto_is_text_until_a_call_begins_and_none_is_text_only(family: Any, text: Any) -> None:
    special, rng = special_markers(text, family), np.random.default_rng(4)
    auto = call_grammar(family, TOOLS, ToolChoice(), special)
    said = answer(text, auto, rng, say="Well, <tool", most=40)
    assert said.startswith("Well, <tool")
    before = "Let me see. <tool\n" if family.begin else ""
    begun = before + family.begin + family.open + family.head
    said, calls = parse_calls(family, answer(text, auto, rng, say=begun, most=3000))
    assert said == before.rstrip()
    assert calls
    assert all(map(valid, calls[:-1]))
    none = call_grammar(family, TOOLS, ToolChoice("none"), special)
    with pytest.raises(AssertionError):
        answer(text, none, rng, say=begun + "get_weather")
    assert answer(text, none, rng, say="Well, <tool", most=20).startswith("Well, <tool")


@EVERY
def test_an_answer_of_a_form_or_calls(family: Any) -> None:
    if not family.begin:
        return
    text, rng = tiny_text(), np.random.default_rng(5)
    schema = {"properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    form = Grammar.json_schema({"type": "object", **schema})
    both = call_grammar(family, TOOLS, ToolChoice(), special_markers(text, family), form)
    assert set(json.loads(answer(text, both, rng, say="{"))) == {"a"}
    assert parse_calls(family, answer(text, both, rng, say=family.begin))[1]


CHARACTERS = st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"], exclude_characters='"\\[]<>')
NAMES = st.text(CHARACTERS, min_size=1, max_size=8)
PLAIN = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=2), max_leaves=3)
CALLS = st.lists(
    st.builds(
        lambda name, arguments: ToolCall(name, json.dumps(arguments, ensure_ascii=False)),
        NAMES,
        st.dictionaries(st.text(max_size=6), VALUES | st.just('}]"<tool_call>'), max_size=3),
    ),
    max_size=3,
)


@given(
    st.sampled_from(list(FAMILIES.values())),
    st.text(max_size=12).filter(lambda text: "[TOOL" not in text and not text.startswith("{")),
    CALLS,
    st.lists(st.integers(1, 40), max_size=12),
    st.integers(0, 200),
)
def test_any_split_of_an_answer_gives_the_same_calls(
    family: Any, said: str, calls: list[ToolCall], sizes: list[int], cut: int
) -> None:
    said = said.rstrip() if calls else said
    if not family.begin and calls:
        said = ""
    written = said + ("\n" if said else "") + family.write(calls) if calls else said
    text, found = parse_calls(family, written)
    assert text == said
    assert [(call.name, call.arguments) for call in found] == [(call.name, call.arguments) for call in calls]
    assert len({call.id for call in found}) == len(calls)
    # in pieces
    parser, events, at = CallParser(family, lambda _: "id"), [], 0
    for size in sizes:
        events += parser.feed(written[at : at + size])
        at += size
    events += [*parser.feed(written[at:]), *parser.finish()]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == said
    assert [event.name for event in events if isinstance(event, CallBegan)] == [call.name for call in calls]
    for number, call in enumerate(calls):
        pieces = [event.text for event in events if isinstance(event, ArgumentsDelta) and event.number == number]
        assert "".join(pieces) == call.arguments
    assert parser.whole == bool(calls)
    # cut in the middle: what was read is a beginning of the whole
    parser = CallParser(family)
    parser.feed(written[:cut])
    parser.finish()
    for part, call in zip(parser.calls, calls):
        assert part.name == call.name
        assert call.arguments.startswith(part.arguments)


def test_what_is_no_call_stays_text() -> None:
    hermes = FAMILIES["hermes"]
    for text in ("<tool_call>nonsense", "a < b <tool", "<tool_call>\n[1]\n</tool_call>", "x \n <tool_cal l>"):
        assert parse_calls(hermes, text) == (text, [])
    llama = FAMILIES["llama3"]
    for text in ('{"a": 1}', "{", ' {"name": "x"', "{}", '{"name": "Ann", "age": 3}', '{"name": "\\", \\"parameters"}'):
        assert parse_calls(llama, text) == (text, [])
    for text in ("a \n <tool_call>\n{}", 'a\n<tool_call>\n{"name": "b"}', '<tool_call>\n{"name": "b", "args": {}}'):
        assert parse_calls(hermes, text) == (text, [])
    assert parse_calls(hermes, 'a<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>\n')[0] == "a"
    parser = CallParser(hermes)
    for piece in ('<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>', "\n", " c "):
        said = parser.feed(piece)
    assert said == [TextDelta("c ")]


TEMPLATES = {
    "hermes": "{% if tools %}<tools>{{ tools }}</tools><tool_call>{% endif %}",
    "llama3": "<|start_header_id|>{% if tools is not none %}{{ tools }}",
    "mistral": "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]",
    "mistral-args": "{{ tools }}[TOOL_CALLS]name[ARGS]",
    "gemma": "<start_of_turn>{{ m }}",
    "generic": "<|im_start|>{{ m }}",
}


def test_the_template_tells_the_family() -> None:
    assert {name: family_of(template).name for name, template in TEMPLATES.items()} == {
        name: name for name in TEMPLATES
    }
    assert family_of("{{ tools }}<tool_call><function=x>").name == "generic", "arguments in tags are not JSON"
    assert family_of("").name == "generic"


def test_templates_without_tools_get_them_in_messages_and_a_prompt_that_grows_keeps_its_beginning() -> None:
    text = tiny_text()
    folded = prompt_text(text, FAMILIES["generic"])
    call = ToolCall.plain("get_weather", '{"city":"K\\u00f6ln"}', "call_1")
    messages = [
        Message("system", "Be brief."),
        Message("user", "Köln?"),
        Message("assistant", "", tool_calls=(call, call)),
        Message("tool", "12 °C", tool_call_id="call_1"),
        Message("tool", "rain", tool_call_id="call_1"),
    ]
    tools = [tool.text for tool in TOOLS]
    full = folded.render(messages, generate=True, tools=tools)
    assert all(tool in full for tool in tools)
    assert full.count('{"name": "get_weather", "arguments": {"city": "Köln"}}') == 2
    assert full.count("<|im_start|>user") == 2
    assert "<tool_response>\n12 °C\n</tool_response>\n<tool_response>\nrain" in full
    before = folded.render(messages[:2], generate=True, tools=tools)
    assert full.startswith(before)
    assert folded.render(messages[1:2], generate=False, tools=tools).startswith("<|im_start|>system\nYou can call")
    assert prompt_text(text, FAMILIES["hermes"]) is not text, "its template would not show the tools"
    native = tiny_text("{% if tools %}{{ tools }}<tool_call>{% endif %}")
    assert prompt_text(native, FAMILIES["hermes"]) is native
    assert prompt_text(native, FAMILIES["generic"]) is not native


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"type": "function"}, "name"),
        ({"function": {"name": ""}}, "1 to 64"),
        ({"name": "a\nb"}, "printable"),
        ({"name": "x" * 65}, "1 to 64"),
        ({"name": "x", "parameters": {"type": "array"}}, "of an object"),
        ({"name": "x", "parameters": []}, "object"),
        ({"name": "x", "description": 5}, "str"),
    ],
)
def test_descriptions_that_are_none_are_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(GrammarError, match=what):
        Tool.of(given)
