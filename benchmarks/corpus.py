"""Documents and questions that benches of reuse ask over: public ones where they are at hand, else made-up ones."""

from __future__ import annotations

import itertools
import json
import lzma
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from ctxreuse.errors import ConfigError

__all__ = [
    "Asked",
    "Corpus",
    "ManyAsked",
    "Question",
    "Questions",
    "article",
    "chats",
    "facts",
    "long_texts",
    "pool",
    "questions",
    "questions_on_many",
    "recorded",
    "sentences",
]

#: Under the folder that CTXREUSE_TRACES names.
_ARTICLES, _MEETINGS = "rag/loogle_wikipedia.jsonl.xz", "rag/qmsum_meetings.jsonl.xz"
_TRANSCRIPTS = "rag/podcasts_documents.jsonl.xz"
_TOOL_LOOPS = "agents/tau_airline_gpt4o.jsonl.xz"
_PASSAGES = "rag/2wiki_corpus.jsonl.xz"
_CHATS, _ASKED = "rag/lihua_world_chats.jsonl.xz", "rag/lihua_world_questions.jsonl.xz"
#: Every so many meetings one is read: neighbours are of one kind.
_EVERY = 5
#: Heads say little.
_HEAD = 2_000
_PEOPLE = ("Ada", "Bruno", "Chen", "Dora", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jana", "Karim", "Lena")
_PLACES = (
    "Tallinn",
    "Porto",
    "Lima",
    "Osaka",
    "Tunis",
    "Bergen",
    "Quito",
    "Perth",
    "Gdansk",
    "Malmo",
    "Accra",
    "Turin",
)
_GOODS = ("glass", "timber", "saffron", "salt", "copper wire", "wool", "tea", "cork", "amber", "paper", "rope", "tin")
_MONTHS = ("March", "April", "May", "June", "August", "October")


class Corpus(NamedTuple):
    """Texts, and where they are from in words."""

    texts: list[str]
    source: str
    real: bool


class Question(NamedTuple):
    """A question, its answer, and the number of the document that holds it."""

    question: str
    answer: str
    document: int


class Questions(NamedTuple):
    """Documents and what is asked about them."""

    documents: list[str]
    questions: list[Question]
    source: str
    real: bool


class Asked(NamedTuple):
    """A question, and the numbers of the documents that answer it together."""

    question: str
    documents: frozenset[int]


class ManyAsked(NamedTuple):
    """Documents and what is asked about one or more of them."""

    documents: list[str]
    questions: list[Asked]
    real: bool


def _rows(name: str, *fields: str) -> Iterator[dict[str, Any]] | None:
    """The rows of a trace, each with these fields; None if it is not here. Raises ConfigError for a damaged file."""
    folder = os.environ.get("CTXREUSE_TRACES", "")
    path = Path(folder) / name
    return _read(path, fields) if folder and path.is_file() else None


def _read(path: Path, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
    try:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                if not isinstance(row, dict) or not row.keys() >= set(fields):
                    raise ValueError(f"a line is no JSON object with {', '.join(fields)}")
                yield row
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise ConfigError(f"the trace cannot be read: {error}", where=str(path), fix="Fetch it again") from error


def article() -> str:
    """A Wikipedia article without its head; "" if none is here."""
    return next((str(row["text"])[_HEAD:] for row in _rows(_ARTICLES, "text") or ()), "")


def chats(count: int = 40) -> str:
    """Chats in a row; "" if none are here."""
    return "\n\n".join(str(row["text"]) for row in itertools.islice(_rows(_CHATS, "text") or (), count))


def long_texts() -> Corpus:
    """Texts of many thousand tokens: articles and meetings, else what every Python brings along."""
    articles, meetings = _rows(_ARTICLES, "text"), _rows(_MEETINGS, "meeting_transcripts")
    if articles is None or meetings is None:
        from ctxreuse.calibrate import default_texts
        from ctxreuse.calibrate.texts import in_turn

        return Corpus(in_turn(default_texts()["held-out"]), "the texts that calibration holds out", False)
    written = [str(row["text"])[_HEAD:] for row in articles]
    spoken = [_spoken(row) for number, row in enumerate(meetings) if number % _EVERY == 0]
    texts = [text for pair in zip(spoken, written) for text in pair] + spoken[len(written) :]
    return Corpus(texts, "Wikipedia articles and meetings", True)


def _spoken(row: dict[str, Any]) -> str:
    turns = [f"{turn['speaker']}: {turn['content']}" for turn in row["meeting_transcripts"]]
    return "\n".join(turns)[_HEAD:]


def pool(count: int) -> Corpus:
    """Up to ``count`` documents of some hundred tokens, each of its own."""
    rows = _rows(_TRANSCRIPTS, "text")
    if rows is None:
        return Corpus([_firm(Random(i), i)[0] for i in range(count)], "made-up documents", False)
    texts = [str(row["text"]) for row in rows]
    # Evenly spread over all episodes: parts of one follow each other.
    return Corpus(texts[:: max(1, len(texts) // count)][:count], "podcast transcripts", True)


def questions(longest: int = 1_200) -> Questions:
    """Documents of at most ``longest`` characters with questions about single facts in them."""
    chats, asked = _rows(_CHATS, "doc", "text"), _rows(_ASKED, "question", "answer", "evidence", "type")
    if chats is None or asked is None:
        return facts(32)
    held: dict[str, int] = {}
    documents: list[str] = []
    for row in chats:
        if len(row["text"]) <= longest:
            held[row["doc"]] = len(documents)
            documents.append(str(row["text"]).strip())
    found = [
        Question(str(row["question"]), str(row["answer"]), held[name])
        for row in asked
        if row["type"] == "Single" and (name := row["evidence"].replace(":", "")) in held
    ]
    return Questions(documents, found, "LiHua-World chats", True)


def recorded(count: int) -> list[list[tuple[str, str]]]:
    """Sessions of one agent that calls tools, each as turns: role and text as a template would write it."""
    rows = _rows(_TOOL_LOOPS, "traj")
    if rows is None:
        return [_made_up_session(Random(i)) for i in range(count)]
    found = []
    for row in itertools.islice(rows, count):
        turns = []
        for turn in row["traj"]:
            calls = [one["function"] for one in turn.get("tool_calls") or ()]
            said = (turn.get("content") or "") + "".join(f"<tool_call>{json.dumps(one)}</tool_call>" for one in calls)
            turns.append((str(turn["role"]), f"\n<{turn['role']}>\n{said}"))
        found.append(turns)
    return found


def _made_up_session(chance: Random) -> list[tuple[str, str]]:
    turns = [("system", "You look up and change orders of goods with the tools `get_order` and `change_order`.")]
    for _ in range(6):
        order = {"order": f"#W{chance.randrange(10**6)}", "goods": chance.choice(_GOODS), "to": chance.choice(_PLACES)}
        call = {"name": "get_order", "arguments": {"order": order["order"]}}
        turns += [
            ("user", f"\nWhat is in order {order['order']}?"),
            ("assistant", f"\n<tool_call>{json.dumps(call)}</tool_call>"),
            ("tool", f"\n{json.dumps(order)}"),
            ("assistant", f"\nYour order {order['order']} has {order['goods']} for {order['to']}."),
        ]
    return turns


def questions_on_many() -> ManyAsked:
    """All chats, and the questions that name those with their answers."""
    chats, asked = _rows(_CHATS, "doc", "text"), _rows(_ASKED, "question", "evidence")
    if chats is None or asked is None:
        made = facts(32)
        return ManyAsked(
            made.documents, [Asked(one.question, frozenset({one.document})) for one in made.questions], False
        )
    texts = {row["doc"]: str(row["text"]) for row in chats}
    number = {name: i for i, name in enumerate(texts)}
    found = []
    for row in asked:
        named = [name for part in re.split("<and>|<or>", row["evidence"]) if (name := part.replace(":", "")) in number]
        if named:
            found.append(Asked(str(row["question"]), frozenset(number[name] for name in named)))
    return ManyAsked(list(texts.values()), found, True)


def sentences(count: int) -> list[str]:
    """So many texts of a sentence or some: of Wikipedia passages where they are at hand, then of made-up reports."""
    found = [
        part for row in _rows(_PASSAGES, "text") or () for part in re.split(r"(?<=[.!?]) (?=[A-Z])", str(row["text"]))
    ]
    found, firm = found[:count], 0
    while len(found) < count:
        found += _firm(Random(firm), firm)[0].split("\n")
        firm += 1
    return found[:count]


def facts(count: int) -> Questions:
    """Made-up firms, one document each, and two questions about each."""
    made = [_firm(Random(1000 + i), i) for i in range(count)]
    found = [Question(question, answer, i) for i, (_, asked) in enumerate(made) for question, answer in asked]
    return Questions([document for document, _ in made], found, "made-up firms", False)


def _firm(rng: Random, number: int) -> tuple[str, Sequence[tuple[str, str]]]:
    """A document of about 200 tokens, and questions about it with their answers."""
    name = f"{rng.choice(_PLACES)} {rng.choice(('Trading', 'Works', 'BlockSource', 'Union'))} No. {number + 1}"
    owner, clerk = rng.sample(_PEOPLE, 2)
    port, inland = rng.sample(_PLACES, 2)
    goods, other = rng.sample(_GOODS, 2)
    lines = [
        f"Report on {name}.",
        f"The firm {name} belongs to {owner}, who took it over from a cousin and moved its office to {port}.",
        f"It sells {goods}, which is bought in {inland} and brought to {port} by rail.",
        f"{clerk} keeps the books of {name} and writes to the customers.",
    ]
    for _ in range(5):
        month, tons = rng.choice(_MONTHS), rng.randrange(3, 90)
        lines.append(
            f"In {month} it shipped {tons} crates of {rng.choice((goods, other))}; {rng.choice((owner, clerk))} noted "
            f"that the road to {rng.choice((port, inland))} was {rng.choice(('closed', 'open', 'flooded', 'icy'))} "
            f"for {rng.randrange(2, 9)} days."
        )
    return "\n".join(lines), ((f"Who owns {name}?", owner), (f"Where is the office of {name}?", port))
