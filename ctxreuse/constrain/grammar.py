"""What an answer must look like: a JSON schema, any JSON object, a regular expression or a grammar."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from ctxreuse.errors import GrammarError

__all__ = ["STYLE", "Grammar", "check_schema", "closed"]

#: JSON is written with these separators and no other blanks, as ``json.dumps`` does: a model that may write blanks at
#: will can do so until its tokens are used up.
STYLE: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

#: Limits of what is compiled, as its caller may be anybody: characters; values in a schema, properties of an object,
#: objects within each other; repetitions within each other in a regular expression.
_CHARACTERS, _VALUES, _PROPERTIES, _DEPTH = 1 << 18, 20_000, 1_000, 64


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """A constraint of an answer; `json_schema`, `json_object`, `regex` and `lark` make one.

    ``text``: the schema as JSON, the regular expression, or the grammar in llguidance's dialect of Lark. ``lenient``:
    keywords of a schema that cannot be enforced are ignored instead of refused.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    lenient: bool = False

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any], *, lenient: bool = False) -> Grammar:
        """Only values that the schema allows, see `closed`. Raises GrammarError for one that is too large."""
        check_schema(schema)
        return cls("json_schema", json.dumps(closed(schema), ensure_ascii=False, separators=(",", ":")), lenient)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_schema", '{"type":"object"}')

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that the regular expression matches as a whole (Rust's syntax, without look-around)."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """One of these texts."""
        return cls("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text that a context-free grammar makes, beginning with its rule ``start``."""
        return cls("lark", text)

    @property
    def digest(self) -> bytes:
        """What it is cached by."""
        return hashlib.sha256(msgspec.json.encode([self.kind, self.text, self.lenient])).digest()

    def check(self) -> None:
        """Raise GrammarError for a text that is too large to be compiled."""
        if len(self.text) > _CHARACTERS:
            raise GrammarError(f"the grammar has {len(self.text):,} characters; at most {_CHARACTERS:,} are compiled")
        if self.kind == "json_schema":
            try:
                schema = json.loads(self.text)
            except (ValueError, RecursionError) as error:
                raise GrammarError(f"the schema is not JSON: {error}") from None
            check_schema(schema)


def check_schema(schema: Any) -> None:
    """Raise GrammarError, naming the place, for what is no schema or too large a one."""
    if not isinstance(schema, Mapping | bool):
        raise GrammarError("a schema is an object", where="#")
    for count, (place, depth, value) in enumerate(_walk(schema), 1):
        if count > _VALUES:
            raise GrammarError(f"the schema has more than {_VALUES:,} values", where=place)
        if depth > _DEPTH:
            raise GrammarError(f"the schema has more than {_DEPTH} levels", where=place)
        if isinstance(value, Mapping) and len(value) > _PROPERTIES:
            raise GrammarError(f"{len(value):,} entries; at most {_PROPERTIES:,} are compiled", where=place)


#: Keywords beside ``properties`` that say more of the same object: each part of it names only some of its properties.
_JOINED = ("allOf", "anyOf", "oneOf", "if", "$ref", "dependentSchemas", "patternProperties", "unevaluatedProperties")


def closed(schema: Any) -> Any:
    """Return a schema whose objects have no other properties than it names, where it does not speak of others.

    A model that may add properties adds them until its tokens are used up.
    """
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(found.get(key), Mapping):
            found[key] = {name: closed(one) for name, one in found[key].items()}
    for key in ("items", "additionalProperties", "contains"):
        if key in found:
            found[key] = closed(found[key])
    joined = any(key in found for key in _JOINED)
    for key in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(found.get(key), list) and (key == "prefixItems" or not {"properties", "allOf"} & found.keys()):
            found[key] = [closed(one) for one in found[key]]
    if found.get("properties") and not joined:
        found.setdefault("additionalProperties", False)
    return found


def _walk(value: Any) -> Iterator[tuple[str, int, Any]]:
    """Every value in a schema, with its place and depth."""
    todo: list[tuple[str, int, Any]] = [("#", 0, value)]
    while todo:
        place, depth, value = todo.pop()
        yield place, depth, value
        if depth > _DEPTH:
            continue
        if isinstance(value, Mapping):
            todo += [(f"{place}/{str(name)[:64]}", depth + 1, inner) for name, inner in value.items()]
        elif isinstance(value, list | tuple):
            todo += [(f"{place}/{i}", depth + 1, inner) for i, inner in enumerate(value)]
