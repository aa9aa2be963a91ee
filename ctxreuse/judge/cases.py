"""Steps of which it is known whether they are right: generated ones, and those of a file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ctxreuse.errors import ConfigError

__all__ = ["LabelledStep", "make_steps", "read_steps"]

_NAMES = ("Anna Berg", "Jonas Falk", "Mira Solberg", "Peter Lind", "Sara Holm", "Tomas Vik", "Eva Strand", "Ole Dahl")
_CITIES = ("Tallinn", "Bergen", "Turku", "Riga", "Malmo", "Gdansk", "Aarhus", "Kiel")
_THINGS = ("apples", "books", "chairs", "stamps", "bottles", "boxes")


class LabelledStep(msgspec.Struct, frozen=True):
    """A step of an answer to ``question``, after those ``before`` it, and whether it is ``right``; ``kind``: of task,
    for reports."""

    question: str
    step: str
    right: bool
    before: str = ""
    kind: str = ""


def make_steps(count: int, seed: int = 0) -> list[LabelledStep]:
    """Return ``count`` steps on sums and on reading a list, as many right as wrong; equal seeds give equal steps."""
    rng = random.Random(seed)
    kinds = (_sums(rng), _records(rng))
    return [next(kinds[number // 2 % 2]) for number in range(count)]


def _sums(rng: random.Random) -> Iterator[LabelledStep]:
    """In pairs: a sum of two numbers, right and then wrong."""
    while True:
        a, b, thing = rng.randint(11, 89), rng.randint(11, 89), rng.choice(_THINGS)
        question = f"A shop has {a} {thing} and gets {b} more. How many {thing} does it have now?"
        for off in (0, rng.choice((-10, -3, -2, -1, 1, 2, 3, 10))):
            step = f"The shop has {a} + {b} = {a + b + off} {thing}."
            yield LabelledStep(question, step, not off, kind="arithmetic")


def _records(rng: random.Random) -> Iterator[LabelledStep]:
    """In pairs: a field of one of four records, and then that of another one."""
    while True:
        names, cities = rng.sample(_NAMES, 4), rng.sample(_CITIES, 4)
        numbers = [f"555-{rng.randint(1000, 9999)}" for _ in names]
        lines = [f"{name}, {city}, phone {number}" for name, city, number in zip(names, cities, numbers)]
        at, other = rng.sample(range(4), 2)
        question = "Here is a list of people.\n" + "\n".join(lines)
        question += f"\nWhat is the phone number of {names[at]}?"
        for taken in (at, other):
            step = f"The phone number of {names[at]} is {numbers[taken]}."
            yield LabelledStep(question, step, taken == at, kind="extraction")


def read_steps(path: Path | str) -> list[LabelledStep]:
    """Read steps, one JSON object a line with the fields of `LabelledStep`. Raises ConfigError naming the line."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"labelled steps cannot be read: {error.strerror}", where=str(path)) from None
    found, decoder = list[LabelledStep](), msgspec.json.Decoder(LabelledStep)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            fix = 'Write one object a line: {"question": "…", "step": "…", "right": true}'
            raise ConfigError(f"line {number} is no labelled step: {error}", where=str(path), fix=fix) from None
    return found
