"""Grammars: what is allowed, what is refused and where, what is kept, and that hostile ones end."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.constrain import Grammar, GrammarCompiler, HasVocabulary
from ctxreuse.errors import ConfigError, GrammarError
from support.tiny_text import merging_text, tiny_text

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["é", "b", "🚀"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def compiler_of(text: Any, **options: Any) -> GrammarCompiler:
    return GrammarCompiler(text, len(text.vocabulary().tokens) + 3, frozenset({257}), **options)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return compiler_of(tiny_text())


def drawn(compiler: GrammarCompiler, text: Any, grammar: Grammar, seed: int, most: int = 400) -> str:
    """An answer of a model that knows nothing: each token is drawn from those allowed."""
    rng, constraint, ids = np.random.default_rng(seed), compiler.compile(grammar), []
    for _ in range(most):
        logits = rng.normal(size=len(text.vocabulary().tokens) + 3).astype(np.float32)
        token = int(constraint.mask(logits).argmax())
        if token == 257:
            break
        ids.append(token)
        if constraint.advance(token):
            break
    return str(text.decode(ids))


@given(st.integers(0, 1 << 30))
def test_whatever_the_model_wants_the_answer_is_what_the_schema_allows(compiler: GrammarCompiler, seed: int) -> None:
    found = json.loads(drawn(compiler, tiny_text(), Grammar.json_schema(PERSON), seed))
    assert set(found) == set(PERSON["properties"])  # type: ignore[call-overload]
    assert 1 <= len(found["name"]) <= 6
    assert 0 <= found["age"] <= 120
    assert len(found["tags"]) <= 2
    assert set(found["tags"]) <= {"é", "b", "🚀"}


OPEN = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "shut"),
    [
        (OPEN, [()]),
        (OPEN | {"additionalProperties": True}, []),
        (OPEN | {"anyOf": [{"required": ["a"]}, {"properties": {"b": {}}}]}, []),
        ({"type": "object"}, []),
        ({"anyOf": [OPEN, {"type": "null"}]}, [("anyOf", 0)]),
        ({"type": "array", "items": OPEN}, [("items",)]),
        ({"$defs": {"one": OPEN}, "$ref": "#/$defs/one"}, [("$defs", "one")]),
        ({"type": "object", "properties": {"properties": {"const": OPEN}}}, [()]),
        ({"allOf": [OPEN, {"properties": {"b": {"type": "null"}}}]}, []),
    ],
)
def test_objects_have_no_properties_that_their_schema_does_not_name(schema: Any, shut: list[Any]) -> None:
    made = json.loads(Grammar.json_schema(schema).text)
    for place in shut:
        here = made
        for step in place:
            here = here[step]
        assert here.pop("additionalProperties") is False
    assert made == schema


def test_every_kind_of_grammar_and_tokens_of_several_characters(compiler: GrammarCompiler) -> None:
    text = tiny_text()
    assert drawn(compiler, text, Grammar.regex("(ab){3}"), 1) == "ababab"
    assert drawn(compiler, text, Grammar.choice(["grün 🟢", "grün"]), 1) in ("grün 🟢", "grün")
    assert drawn(compiler, text, Grammar.lark('start: "x" n\nn: /[0-9]{2}/'), 1)[0] == "x"
    assert drawn(compiler, text, Grammar.json_object(), 5, 4000)[0] == "{"
    merging = merging_text()
    assert drawn(compiler_of(merging), merging, Grammar.regex("two\n\none\n\ntwo"), 3) == "two\n\none\n\ntwo"


def test_a_complete_answer_ends_without_an_end_marker_and_no_marker_is_allowed_before(
    compiler: GrammarCompiler,
) -> None:
    constraint = compiler.compile(Grammar.regex("ab"))
    ids = tiny_text().encode("ab").tolist()
    assert np.flatnonzero(np.isfinite(constraint.mask(np.zeros(261, np.float32)))).tolist() == ids[:1]
    assert constraint.advance(ids[0]) is False
    assert constraint.advance(ids[1]) is True
    again = compiler.compile(Grammar.regex("ab"))
    with pytest.raises(GrammarError, match="cannot be followed"):
        again.advance(257)


def test_what_is_compiled_is_kept_by_content_and_answers_share_nothing(compiler: GrammarCompiler) -> None:
    first = compiler.compile(Grammar.regex("a[bc]"))
    kept = dict(compiler._matchers)
    first.advance(int(tiny_text().encode("a")[0]))
    second = compiler.compile(Grammar("regex", "a[bc]"))
    assert dict(compiler._matchers) == kept
    assert np.isfinite(second.mask(np.zeros(261, np.float32))).sum() == 1
    assert np.isfinite(first.mask(np.zeros(261, np.float32))).sum() == 2


@pytest.mark.parametrize(
    ("schema", "place", "what"),
    [
        ({"type": "objekt"}, "#", "Invalid type"),
        (
            {"type": "object", "properties": {"a": {"items": {"type": "string", "pattern": "("}}}},
            "properties/a/items",
            "unclosed",
        ),
        ({"anyOf": [{"type": "null"}, {"type": "array", "uniqueItems": True}]}, "anyOf/1", "uniqueItems"),
        ({"$ref": "#/nowhere"}, "#", "does not exist"),
        ({"$ref": "https://example.org/schema"}, "#", "not present"),
        (
            {"properties": {"a": {"type": "string", "pattern": "(?=x)"}}, "$defs": {"b": {}}},
            "properties/a",
            "look-around",
        ),
    ],
)
def test_a_wrong_schema_is_refused_with_the_place(
    compiler: GrammarCompiler, schema: dict[str, Any], place: str, what: str
) -> None:
    with pytest.raises(GrammarError, match=what) as refused:
        compiler.compile(Grammar.json_schema(schema))
    assert refused.value.where.endswith(place)


def test_keywords_that_cannot_be_enforced_are_ignored_only_where_that_is_wanted(compiler: GrammarCompiler) -> None:
    schema = {"type": "array", "items": {"type": "null"}, "uniqueItems": True, "maxItems": 2}
    with pytest.raises(GrammarError, match="uniqueItems"):
        compiler.compile(Grammar.json_schema(schema))
    assert drawn(compiler, tiny_text(), Grammar.json_schema(schema, lenient=True), 1).startswith("[")


NESTED: dict[str, Any] = {"type": "string"}
for _ in range(70):
    NESTED = {"anyOf": [NESTED]}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.json_schema({"properties": {f"p{n}": {} for n in range(10_000)}}),
        lambda: Grammar.json_schema({"properties": {f"p{n}": {"type": "string"} for n in range(900)}}),
        lambda: Grammar.json_schema(NESTED),
        lambda: Grammar.json_schema({"enum": list(range(30_000))}),
        lambda: Grammar.json_schema(
            {"allOf": [{"anyOf": [{"properties": {f"{c}{n}": {"const": n}}} for c in "ab"]} for n in range(16)]}
        ),
        lambda: Grammar.json_schema({"$defs": {"n": {"allOf": [{"$ref": "#/$defs/n"}, {}]}}, "$ref": "#/$defs/n"}),
        lambda: Grammar.regex("((a{1000}){1000}){1000}"),
        lambda: Grammar.regex("(" * 3000 + "a" + ")*" * 3000),
        lambda: Grammar.regex("a" * 300_000),
    ],
)
def test_hostile_grammars_are_refused(compiler: GrammarCompiler, make: Any) -> None:
    with pytest.raises(GrammarError):
        compiler.compile(make())


def test_recursion_and_patterns_that_backtrack_elsewhere_are_no_danger(compiler: GrammarCompiler) -> None:
    tree = {"$defs": {"n": {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}}}
    compiler.compile(Grammar.json_schema({**tree, "$ref": "#/$defs/n"}))
    assert drawn(compiler, tiny_text(), Grammar.regex("(a*)*(a|a)*b"), 4, 5000).endswith("b")


def test_compiling_has_a_deadline() -> None:
    late = compiler_of(tiny_text(), seconds=1e-9)
    slow = Grammar.json_schema({"type": "integer", "multipleOf": 79190})
    with pytest.raises(GrammarError, match="takes more than"):
        late.compile(slow)


def test_a_text_model_without_a_vocabulary_says_so() -> None:
    class Mute:
        stop_ids = frozenset({1})

    assert isinstance(tiny_text(), HasVocabulary)
    with pytest.raises(ConfigError, match="does not tell its vocabulary"):
        GrammarCompiler(Mute(), 8, frozenset({1})).compile(Grammar.regex("a"))
