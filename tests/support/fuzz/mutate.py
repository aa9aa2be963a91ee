"""Mutations that keep an input's outer form: of bytes, of trees (JSON, MessagePack), of lines of text."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

__all__ = ["Mutator", "of_bytes", "of_json", "of_lines", "of_tree", "packed", "spoiled"]

#: A changed input, at most ``most`` bytes long; ``other`` is another input of the target, to take parts of.
Mutator = Callable[[bytes, bytes, Random], bytes]

_WIDTHS = (1, 2, 4, 8)
_EDGES = (0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 63, 64, 100, 127, 128, 255, 256, 1000, 4095, 4096, 65535, 65536)
_LARGE = (2**20, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_NASTY: tuple[Any, ...] = (
    None, True, False, "", "\0", "a" * 300, "\u202e", "é", "kl-0.01", "../../etc/passwd", 0, -1, 1, 2**31, 2**53,
    2**63 - 1, -(2**63), 2**64 - 1, 0.0, -0.0, 1e308, -1e-308, [], {}, [[]], [None] * 40, {"a": 1}, {"": None},
)  # fmt: skip
_WORDS = (
    "nan", "inf", "-1", "1e999", "0x7fffffffffffffff", "99999999999999999999", "true", '""', "''", "[]", "{}", "[[",
    "]]", "[[a]]", "[a.b]", "=", "\\u0000", '"""', "'''", "2026-13-45T99:99:99Z", "1979-05-27", "#", "\t", "\x00",
    "\ufeff", "\ud7ff", "8GB", "-5m", "1MB/s", "null", '"', ",", "NaN", "Infinity", "\\ud800",
)  # fmt: skip


def of_bytes(data: bytes, other: bytes, chance: Random) -> bytes:
    """One to four changes anywhere: bits, numbers at their edges, pieces cut, doubled, moved, taken from ``other``."""
    raw = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(raw) + 1)
        if chance.random() < 0.5 and len(raw) > 256:  # heads decide more than bodies do
            at = chance.randrange(256)
        size = min(chance.choice((1, 2, 4, 8, 16, 64, 256)), len(raw) - at)
        match chance.randrange(9):
            case 0 | 1 if at < len(raw):
                raw[at] ^= 1 << chance.randrange(8)
            case 2 if at < len(raw):
                raw[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
            case 3:
                width = chance.choice(_WIDTHS)
                number = chance.choice(_EDGES + _LARGE) & (256**width - 1)
                raw[at : at + width] = number.to_bytes(width, chance.choice(("little", "big")))
            case 4:
                del raw[at : at + size]
            case 5:
                raw[at:at] = raw[at : at + size]
            case 6 if other:
                begin = chance.randrange(len(other))
                raw[at : at + size] = other[begin : begin + size]
            case 7:
                raw[at:at] = chance.randbytes(chance.choice((1, 4, 16)))
            case 8 if chance.random() < 0.2:
                del raw[at:]
    return bytes(raw)


def of_tree(tree: Any, other: Any, chance: Random) -> Any:
    """One to three changes of nested lists and dicts: parts replaced, left out, doubled, swapped, renamed."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        tree = _changed(tree, other, chance)
    return tree


def _changed(tree: Any, other: Any, chance: Random) -> Any:
    within = isinstance(tree, list | dict) and len(tree) > 0 and chance.random() < 0.85
    if not within:
        return _replaced(tree, other, chance)
    if isinstance(tree, list):
        made = list(tree)
        at = chance.randrange(len(made))
        match chance.randrange(8):
            case 0:
                del made[at]
            case 1:
                made.insert(at, made[at])
            case 2:
                to = chance.randrange(len(made))
                made[at], made[to] = made[to], made[at]
            case 3 if len(made) < 1000:
                made += made
            case _:
                made[at] = _changed(made[at], other, chance)
        return made
    fields = dict(tree)
    name = chance.choice(list(fields))
    match chance.randrange(7):
        case 0:
            del fields[name]
        case 1:
            fields[chance.choice(("", "x", f"{name}s", *list(fields)[:3]))] = fields.pop(name)
        case _:
            fields[name] = _changed(fields[name], other, chance)
    return fields


def _replaced(value: Any, other: Any, chance: Random) -> Any:
    match value:
        case bytes() if chance.random() < 0.8:
            return of_bytes(value, value, chance)
        case bool():
            return chance.choice((not value, None, 2, "true"))
        case int() if chance.random() < 0.7:
            return chance.choice((value + 1, value - 1, -value, value * 2, *_EDGES, *_LARGE, 2**64 - 1 - abs(value)))
        case float() if chance.random() < 0.7:
            return chance.choice((-value, value * 1e30, value / 3, 0.0, 5e-324, 1.7e308))
        case str() if chance.random() < 0.7:
            return of_bytes(value.encode("utf-8", "replace"), b"", chance).decode("utf-8", "replace")
    if chance.random() < 0.1:
        return _nested(chance.choice((2, 30, 200)), chance.random() < 0.5)
    if chance.random() < 0.2:
        return other
    return chance.choice(_NASTY)


def _nested(depth: int, lists: bool) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = [tree] if lists else {"a": tree}
    return tree


def of_json(data: bytes, other: bytes, chance: Random) -> bytes:
    """Mostly a change of the tree, written again as JSON; else of the bytes."""
    if chance.random() < 0.8:
        try:
            tree = of_tree(json.loads(data), _or_none(other), chance)
            return json.dumps(tree, ensure_ascii=chance.random() < 0.8).encode("utf-8", "surrogatepass")
        except (ValueError, RecursionError):
            pass
    return of_lines(data, other, chance) if chance.random() < 0.4 else of_bytes(data, other, chance)


def _or_none(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def packed(data: bytes, other: bytes, chance: Random) -> bytes:
    """As `of_json`, of MessagePack."""
    if chance.random() < 0.8:
        try:
            return msgspec.msgpack.encode(of_tree(msgspec.msgpack.decode(data), None, chance))
        except (ValueError, RecursionError, OverflowError, TypeError):
            pass
    return of_bytes(data, other, chance)


def of_lines(data: bytes, other: bytes, chance: Random) -> bytes:
    """Lines left out, doubled, swapped, taken from ``other``, changed inside; words replaced by nasty ones."""
    lines = data.splitlines(keepends=True)
    for _ in range(chance.choice((1, 1, 2, 4))):
        if not lines:
            break
        at = chance.randrange(len(lines))
        match chance.randrange(8):
            case 0:
                del lines[at]
            case 1:
                lines.insert(chance.randrange(len(lines)), lines[at])
            case 2 if others := other.splitlines(keepends=True):
                lines.insert(at, chance.choice(others))
            case 3:
                lines[at] = of_bytes(lines[at], other, chance)
            case 4:
                lines[at] = of_json(lines[at], other, chance) + b"\n" if chance.random() < 0.5 else lines[at] * 2
            case _:
                words = lines[at].split(b" ")
                words[chance.randrange(len(words))] = chance.choice(_WORDS).encode("utf-8", "surrogatepass")
                lines[at] = b" ".join(words) + b"\n" * chance.randrange(2)
    return b"".join(lines)


def spoiled(mutator: Mutator) -> Mutator:
    """As ``mutator``, and for some inputs bytes of the result are changed too."""

    def both(data: bytes, other: bytes, chance: Random) -> bytes:
        made = mutator(data, other, chance)
        return of_bytes(made, other, chance) if chance.random() < 0.15 else made

    return both
