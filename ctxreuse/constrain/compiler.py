"""Grammars compiled for one model's vocabulary, and the masks that they put on logits. All of llguidance is here."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ctxreuse.constrain.grammar import STYLE, Grammar
from ctxreuse.constrain.vocabulary import HasVocabulary, Vocabulary
from ctxreuse.errors import ConfigError, GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Constraint", "GrammarCompiler"]

#: Compiled grammars that are kept.
_KEPT = 64
#: Seconds that compiling may take; a schema of an agent's tool takes about one thousandth.
_SECONDS = 5.0
#: Tokens that are tried when a grammar is compiled.
_PROBED = 3
#: Subschemas that are compiled alone at most to find the one that is wrong.
_TRIED = 256

# Half to a tenth of llguidance's own limits: a mask of a hostile pattern then takes half a second at most, once.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class Constraint:
    """The state of one answer in its grammar. Not thread-safe; waits for nothing."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def mask(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """A copy of the logits in which every token that the grammar does not allow next has -inf.

        Raises GrammarError if the grammar turns out to be too complex here.
        """
        raw = self._matcher.compute_bitmask()
        self._check()
        allowed = np.unpackbits(np.frombuffer(raw, np.uint8), count=len(logits), bitorder="little").view(bool)
        masked = np.full(len(logits), -np.inf, np.float32)
        np.copyto(masked[: len(allowed)], logits[: len(allowed)], where=allowed)
        return masked

    def advance(self, token: int) -> bool:
        """Take the token that was chosen; True if nothing may follow it. Raises GrammarError for one that is not
        allowed."""
        self._matcher.consume_token(token)
        self._check()
        return bool(self._matcher.is_stopped())

    def forced(self, count: int) -> npt.NDArray[np.int32]:
        """The tokens that most probably follow because nothing else may: text that the grammar fixes, as the tokenizer
        cuts it, ``count`` at most."""
        return np.array(self._matcher.compute_ff_tokens()[:count], np.int32)

    def follows(self, tokens: npt.NDArray[np.int32]) -> int:
        """How many of these tokens may follow, one after the other."""
        return int(self._matcher.validate_tokens(tokens.tolist()))

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed: {_first_line(self._matcher.get_error())}")


class GrammarCompiler:
    """Compiles grammars for one model, and keeps the last ones by their content. Thread-safe.

    The vocabulary is read at the first use, which takes about a quarter of a second for 50,000 tokens; or by `warm`.
    """

    def __init__(self, text: Any, vocab_size: int, stop_ids: frozenset[int], *, seconds: float = _SECONDS) -> None:
        """``text``: a text model that `HasVocabulary`; ``vocab_size``: logits of the model."""
        self._text, self._vocab_size, self._stop_ids, self._seconds = text, vocab_size, stop_ids, seconds
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._matchers: OrderedDict[bytes, LLMatcher] = OrderedDict()
        # What takes too long is abandoned, not ended: these are all the threads that it can take.
        self._threads = ThreadPoolExecutor(2, "grammar")

    def compile(self, grammar: Grammar) -> Constraint:
        """Return the beginning of an answer in this grammar.

        Raises GrammarError, with the place in a schema, for what is no grammar, cannot be enforced or is too complex;
        ConfigError without llguidance, or for a text model without a vocabulary.
        """
        key = grammar.digest
        with self._lock:
            found = self._matchers.get(key)
            if found is not None:
                self._matchers.move_to_end(key)
                return Constraint(found.deep_copy())
        grammar.check()
        tokenizer = self._opened()
        compiling = self._threads.submit(_compiled, tokenizer, grammar)
        try:
            matcher = compiling.result(self._seconds)
        except LateError:
            compiling.cancel()
            what = f"compiling the grammar takes more than {self._seconds:g} s"
            raise GrammarError(what, fix="Simplify it") from None
        with self._lock:
            self._matchers[key] = matcher
            while len(self._matchers) > _KEPT:
                self._matchers.popitem(last=False)
        return Constraint(matcher.deep_copy())

    def warm(self) -> None:
        """Read the vocabulary now. Raises ConfigError without llguidance, or for a text model without one."""
        self._opened()

    def _opened(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                try:
                    from llguidance import LLTokenizer
                except ImportError:
                    fix = "Run: pip install 'ctxreuse[edge]', or the extra of an engine"
                    raise ConfigError("constrained answers need llguidance", fix=fix) from None
                if not isinstance(self._text, HasVocabulary):
                    raise ConfigError(
                        "this text model does not tell its vocabulary, so no answer can be constrained",
                        fix="Give it a method vocabulary(), see ctxreuse.constrain.HasVocabulary",
                    )
                tokens = _Tokens(self._text, self._text.vocabulary(), self._vocab_size, self._stop_ids)
                self._tokenizer = LLTokenizer(tokens, eos_token=sorted(self._stop_ids) or None)  # type: ignore[arg-type]
            return self._tokenizer


class _Tokens:
    """The tokenizer as llguidance wants it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, text: Any, vocabulary: Vocabulary, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._text = text
        self.tokens = [*vocabulary.tokens[:vocab_size], *[b""] * (vocab_size - len(vocabulary.tokens))]
        self.special_token_ids = [number for number in vocabulary.special if number < vocab_size]
        self.eos_token_id = max(stop_ids, default=vocab_size - 1)

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode() if isinstance(text, bytes) else text
        ids: list[int] = self._text.encode(plain, markers=False).tolist()
        return ids


def _compiled(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    if grammar.kind == "json_schema":
        schema = json.loads(grammar.text)
        matcher = _matcher(tokenizer, _schema_source(schema, grammar.lenient))
        if error := _error(matcher):
            raise GrammarError(error, where=_place(tokenizer, schema, error, grammar.lenient))
        return matcher
    from llguidance import LLMatcher

    make = LLMatcher.grammar_from_regex if grammar.kind == "regex" else LLMatcher.grammar_from_lark
    matcher = _matcher(tokenizer, make(grammar.text))
    if error := _error(matcher):
        raise GrammarError(error)
    return matcher


def _schema_source(schema: Any, lenient: bool) -> str:
    from llguidance import LLMatcher

    if isinstance(schema, bool):
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    overrides: Any = {**STYLE, "lenient": lenient}
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=overrides))


def _matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**_LIMITS))


def _error(matcher: LLMatcher) -> str:
    """What is wrong with a grammar, or nothing; its first masks show what compiling alone does not."""
    probe = matcher.deep_copy()
    for _ in range(_PROBED):
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(probe.compute_bitmask(), np.uint8), bitorder="little"))
        if probe.is_stopped() or not len(allowed):
            break
        probe.consume_token(int(allowed[-1]))
    return _first_line(probe.get_error())


def _place(tokenizer: LLTokenizer, schema: Any, error: str, lenient: bool) -> str:
    """The innermost subschema that alone has the same error, as a JSON pointer."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}
    place, here, tried = "#", schema, 0
    while True:
        for step, inner in _subschemas(here):
            tried += 1
            if tried > _TRIED:
                return place
            alone = {**shared, **inner} if isinstance(inner, dict) else inner
            if _error(_matcher(tokenizer, _schema_source(alone, lenient))) == error:
                place, here = f"{place}/{step}", inner
                break
        else:
            return place


def _subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, dict):
        return
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        inner = schema.get(key)
        if isinstance(inner, dict):
            yield from ((f"{key}/{name}", one) for name, one in inner.items() if isinstance(one, dict))
    for key in ("items", "additionalProperties", "contains"):
        if isinstance(schema.get(key), dict):
            yield key, schema[key]
    for key in ("anyOf", "allOf", "oneOf", "prefixItems"):
        inner = schema.get(key)
        if isinstance(inner, list):
            yield from ((f"{key}/{i}", one) for i, one in enumerate(inner) if isinstance(one, dict))


def _first_line(error: str) -> str:
    """An error of llguidance without the state that it prints behind it."""
    lines = [line.strip() for line in error.split("\n<")[0].splitlines() if line.strip(" ^|")]
    return " ".join(lines)[:400]
