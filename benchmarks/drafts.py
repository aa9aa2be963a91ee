"""Answers that are drafted from what was said before, against plain decoding and prompt lookup of fixed lengths.

Six tasks of an agent: quoting a document, editing code and the turns of a recorded tool loop (the model computes, and
each token that it may draw is that of the document, the edited code, the recorded turn; the agent's other sessions were
said before); a list as JSON by a schema, a summary and an open question (the model's own greedy answers). One answer,
then eight at a time. Each way has a runtime of its own over the same engine, the ways take turns, and texts are
forgotten between rounds, but not what passes cost. All is CPU time of one thread after the first token: other programs
on the machine count less. A figure is the median over rounds of tokens a second against plain decoding in the same
round; peer: the better of prompt lookup with 4 and with 10 tokens; bound: all drafts right, at the best length for what
this engine's passes cost. ``--model``: another known name. ``CTXREUSE_ENGINES``: only these engines, with commas
between them; each takes 20 to 40 minutes of one core.

``…_model`` are runs with a draft model besides, the GGUF of the same weights (of the quote, the summary and the open
question): for torch in float32, of whose passes its tokens take a part, and for llama.cpp itself, where it never pays.
Peer: the better of that model drafting four and eight tokens each time; bound: all of its tokens right.
"""

from __future__ import annotations

import inspect
import os
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from benchmarks.corpus import facts, long_texts, recorded
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.constrain import Grammar
from ctxreuse.engines import open_engine
from ctxreuse.engines.base import Engine
from ctxreuse.engines.prompt import encode_prompt
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.text import Message, TextModel
from ctxreuse.errors import ConfigError
from ctxreuse.identity.keys import Tokens
from ctxreuse.models import get_gguf
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.runtime.answers import AnswerGroup, pieces_in_turn
from ctxreuse.runtime.draft_model import DraftModel, ModelDrafter
from ctxreuse.speculate import AnswerDrafter, DraftMemory, DraftPolicy, PassCosts, PassLoad

__all__ = ["OPTIONS", "PromptLookup", "Task", "answered", "run", "tasks"]

OPTIONS = ("model",)
_DOCUMENT, _ROUNDS = 300, 2
#: Tokens of an answer, where one decodes, and where eight do.
_ANSWER, _BESIDE = 64, 24
_BARS = {"quote": 3.5, "code": 1.4, "tools": 1.5}
#: No task may be slower than plain decoding by more.
_LEAST = 0.97
#: Of a recorded session: tokens before its turns, and turns.
_SESSION, _TURNS = 400, 4
_LOOKUPS = (4, 10)
#: What is answered with a draft model, and tokens that it drafts each time where that is fixed.
_MODELLED, _FIXED = ("quote", "summary", "open"), (4, 8)
#: Prompt lookup has none; it is never asked.
_POLICY = DraftPolicy(PassCosts())


class Task(NamedTuple):
    """Prompts with the answers that are recorded of them (None: the model's own), and what was said before."""

    name: str
    prompts: Sequence[Tokens]
    scripts: Sequence[Tokens | None]
    before: Sequence[Tokens] = ()
    grammar: Grammar | None = None


class _Recorded:
    """A constraint by which only the tokens of a recorded answer can be drawn; it forces and forbids no draft."""

    def __init__(self, ids: Tokens) -> None:
        self._ids, self._at = ids, 0

    def mask(self, logits: Any) -> Any:
        masked = np.full_like(logits, -np.inf)
        masked[self._ids[self._at]] = 0.0
        return masked

    def advance(self, token: int) -> bool:
        self._at += 1
        return self._at == len(self._ids)

    def forced(self, count: int) -> Tokens:
        return self._ids[:0]

    def follows(self, tokens: Tokens) -> int:
        return len(tokens)


class PromptLookup(AnswerDrafter):
    """What followed the last three tokens before, so many tokens whatever they cost."""

    def __init__(self, length: int, history: Tokens) -> None:
        super().__init__(_POLICY, DraftMemory(), "", history)
        self._length = length

    def next(self, history: Tokens, left: int, load: PassLoad, constraint: Any = None) -> Tokens:
        """See `AnswerDrafter.next`."""
        body, tail = history[:-1], history[-3:]
        places = np.flatnonzero((body[2:] == tail[2]) & (body[1:-1] == tail[1]) & (body[:-2] == tail[0]))
        at = int(places[-1]) + 3 if len(places) else len(history)
        self._drafted = history[at : at + min(self._length, max(left, 0))]
        return self._drafted

    def checked(self, came: Sequence[int], seconds: float, load: PassLoad) -> None:
        """See `AnswerDrafter.checked`."""
        self.drafted += len(self._drafted)
        self.accepted += len(came) - 1


class FixedDrafts(PromptLookup):
    """What a model says next, so many tokens whatever they cost."""

    def __init__(self, length: int, history: Tokens, model: DraftModel) -> None:
        super().__init__(length, history)
        self._drafter = ModelDrafter(model)

    def next(self, history: Tokens, left: int, load: PassLoad, constraint: Any = None) -> Tokens:
        """See `AnswerDrafter.next`."""
        self._drafted = history[:0]
        while len(self._drafted) < min(self._length, left):
            ids = self._drafter.draft(history, self._drafted, 1).ids
            self._drafted = np.concatenate([self._drafted, ids])
        return self._drafted


class _FixedDrafting:
    """Stands in for a runtime's `Drafting`."""

    def __init__(self, length: int, model: DraftModel | None = None) -> None:
        self._length, self._model, self.memory = length, model, DraftMemory()

    def begin(self, request: Any, sampling: SamplingParams) -> AnswerDrafter:
        if self._model is not None:
            return FixedDrafts(self._length, request.ids, self._model)
        return PromptLookup(self._length, request.ids)

    def end(self, request: Any, drafter: AnswerDrafter, tokens: Tokens) -> None: ...

    def outcome(self, sampling: SamplingParams, drafter: AnswerDrafter | None) -> None:
        return None

    def save(self, seconds: float = 0.0) -> None: ...


class Measured(NamedTuple):
    """Tokens, CPU seconds after the first ones, passes, and tokens of drafts that were checked, and right."""

    tokens: int
    seconds: float
    passes: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def tasks(text: TextModel, options: Options) -> list[Task]:
    """The tasks, in the model's tokens."""
    size = options.pick(60, _DOCUMENT)
    document = text.decode(text.encode(long_texts().texts[0][4000:12000], markers=False)[:size].tolist())
    code = text.decode(text.encode(_source(), markers=False)[:size].tolist())
    firms = "\n\n".join(facts(3).documents)
    row = {name: {"type": "string", "maxLength": 40} for name in ("firm", "place", "goods")}
    schema = {
        "type": "array",
        "items": {"type": "object", "properties": row, "required": list(row), "additionalProperties": False},
    }
    asked = {
        "quote": f"Repeat this text word for word:\n\n{document}",
        "code": f"Rewrite this code with `text` renamed to `body`, and change nothing else:\n\n```python\n{code}\n```",
        "json": f"{firms}\n\nList the firms as JSON: firm, place and goods of each.",
        "summary": f"{document}\n\nSummarise this text in a few sentences.",
        "open": "How do boats of wood stay dry inside? Explain it to a child.",
    }
    scripted = {"quote": document, "code": code.replace("text", "body")}
    found = []
    for name, question in asked.items():
        ids = encode_prompt(text, [Message("user", question)]).ids
        script = text.encode(scripted[name], markers=False)[:_ANSWER] if name in scripted else None
        found.append(Task(name, [ids], [script], grammar=Grammar.json_schema(schema) if name == "json" else None))
    sessions = [text.encode("".join(turn for _, turn in one), markers=False) for one in recorded(4)]
    prompts, scripts, history = list[Tokens](), list[Tokens | None](), text.encode("", markers=False)
    for role, said in recorded(4)[0]:
        ids = text.encode(said, markers=False)
        if role == "assistant" and len(history) and len(ids) > 8 and len(prompts) < options.pick(1, _TURNS):
            prompts.append(history[-options.pick(100, _SESSION) :])
            scripts.append(ids[:_ANSWER])
        history = np.concatenate([history, ids]).astype("<i4")
    return [*found, Task("tools", prompts, scripts, sessions[1:])]


def _source() -> str:
    return inspect.getsource(textwrap)[2000:]


def answered(runtime: Runtime, task: Task, count: int, longest: int) -> Measured:
    """Answer the prompts of a task, ``count`` times at once."""
    if runtime.drafting is not None:
        runtime.drafting.memory.clear()
        for ids in task.before:
            runtime.drafting.memory.learn("", ids, [], runtime.space.block_tokens)
    total = Measured(0, 0.0, 0, 0, 0)
    assert runtime.text is not None
    for ids, script in zip(task.prompts, task.scripts):
        constraints: list[Any] = [None] * count
        if script is not None:
            constraints = [_Recorded(script) for _ in range(count)]
        elif task.grammar is not None:
            constraints = [runtime.constrain(task.grammar) for _ in range(count)]
        sampling = SamplingParams(max_tokens=longest, ignore_eos=True)
        group = AnswerGroup(runtime, runtime.text, runtime.request(ids), [sampling] * count, None, constraints)
        answers = group.completions()
        for one in answers:  # the prompt; a draft may hold all that follows
            next(one, None)
        drawn, began, passes = _drawn(group), time.process_time(), runtime.steps.stats().passes
        for _ in pieces_in_turn(answers):
            pass
        seconds = time.process_time() - began
        used = [one.usage.tokens for one in answers]
        total = Measured(
            total.tokens + _drawn(group) - drawn,
            total.seconds + seconds,
            total.passes + runtime.steps.stats().passes - passes,
            total.drafted + sum(one.drafted for one in used),
            total.accepted + sum(one.accepted for one in used),
        )
    return total


def _drawn(group: AnswerGroup) -> int:
    return sum(len(one.decoder.history) for one in group._answers if one.decoder is not None)


def _ways(engine: Engine, draft: Engine | None = None) -> dict[str, Runtime]:
    def runtime(drafting: Any = None, speculate: Any = "off", draft: Engine | None = None) -> Runtime:
        options = RuntimeOptions(context_cache_bytes=4 << 30, clock=time.process_time, speculate=speculate, draft=draft)
        made = Runtime(engine, None, options)
        made.drafting = drafting or made.drafting
        return made

    if draft is None:
        fixed = {length: runtime(_FixedDrafting(length)) for length in _LOOKUPS}
    else:
        model = DraftModel(draft, engine, engine.text, time.process_time)
        fixed = {length: runtime(_FixedDrafting(length, model)) for length in _FIXED}
    peers = {f"fixed{length}": one for length, one in fixed.items()}
    return {"plain": runtime(), **peers, "ours": runtime(speculate="auto", draft=draft)}


def _engines(name: str) -> Iterator[tuple[str, Callable[[], Engine]]]:
    from ctxreuse.models.build import build

    found: dict[str, Callable[[], Engine]] = {
        "llama_cpp": lambda: open_engine(str(get_gguf(name)), threads=1),
        "torch": lambda: open_engine(name, engine="torch", threads=1),
    }
    if find_spec("onnxruntime_genai") is not None:
        found["onnxruntime"] = lambda: open_engine(build(name, "int4", progress=False), threads=1)
    wanted = os.environ.get("CTXREUSE_ENGINES", "")
    for kind in wanted.split(",") if wanted else found:
        if kind not in found:
            raise ConfigError(f"no engine {kind!r} is measured here", fix=f"There are {', '.join(found)}")
        yield kind, found[kind]


def run(options: Options) -> list[Figure]:
    """Ratios of tokens a second to plain decoding, by engine, task and number of answers at once."""
    figures, rounds = list[Figure](), options.pick(1, _ROUNDS)
    for kind, opened in _engines(options.model or "smollm2"):
        options.step(f"opening {kind}")
        engine = opened()
        assert engine.text is not None
        made = tasks(engine.text, options)
        figures += _measured(kind, made, _ways(engine), rounds, options)
        if kind != "onnxruntime":
            draft = open_engine(str(get_gguf(options.model or "smollm2")), threads=1)
            some = [task for task in made if task.name in _MODELLED]
            figures += _measured(kind, some, _ways(engine, draft), rounds, options)
    return figures


def _measured(
    kind: str, made: Sequence[Task], ways: dict[str, Runtime], rounds: int, options: Options
) -> Iterator[Figure]:
    for count, longest in options.pick(((1, 8),), ((1, _ANSWER), (8, _BESIDE))):
        for task in made:
            found = dict[str, list[Measured]]()
            for number in range(rounds + 1):
                options.step(f"{kind}: {task.name}, {count} at once", number, rounds + 1)
                for way in sorted(ways, reverse=bool(number % 2)):
                    one = answered(ways[way], task, count, longest)
                    if number or options.quick:  # the first round learns what passes cost
                        found.setdefault(way, []).append(one)
            yield _figure(kind, task.name, count, found, ways["ours"], options)
    for runtime in ways.values():
        runtime.close()


def _figure(
    kind: str, task: str, count: int, found: dict[str, list[Measured]], ours: Runtime, options: Options
) -> Figure:
    ratios = {
        way: statistics.median(one.rate / plain.rate for one, plain in zip(all_, found["plain"]))
        for way, all_ in found.items()
    }
    last, plain = found["ours"][-1], ours.steps.costs.seconds(count)
    model = ours.drafting.model if ours.drafting is not None else None
    each = 0.0 if model is None else model.price(0).each
    lengths = [(rows + 1, ours.steps.costs.seconds(count * (rows + 1))) for rows in range(32)]
    costs = [(tokens, cost + (tokens - 1) * count * each) for tokens, cost in lengths if cost]
    bound = max(tokens * plain / cost for tokens, cost in costs) if plain else None
    fixed = {way: ratio for way, ratio in ratios.items() if way.startswith("fixed")}
    return Figure(
        metric=f"{kind}_{task}_{count}" + ("" if model is None else "_model"),
        value=ratios["ours"],
        unit="x",
        baseline=1.0,
        peer=max(fixed.values()),
        bound=bound,
        bar=None if options.quick else _LEAST if model is not None else _BARS.get(task, _LEAST),
        note=f"{last.rate:.1f} tokens a CPU second, plain {found['plain'][-1].rate:.1f}; {last.tokens / count:.0f} "
        f"tokens in {last.passes} passes, {last.accepted} of {last.drafted} drafted ones right; fixed lengths "
        + ", ".join(f"{way.removeprefix('fixed')}: {ratio:.2f}" for way, ratio in fixed.items()),
    )
