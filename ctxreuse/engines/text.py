"""Text and token ids: tokenizer, chat template and stop ids of a model, without torch or transformers."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from ctxreuse.constrain.vocabulary import Vocabulary, byte_table, vocabulary_of
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.identity.keys import Tokens
from ctxreuse.models import file_digest
from ctxreuse.models.word_cache import bound_word_cache

__all__ = ["HFText", "Message", "TextModel", "ToolCall", "tokenizer_digest"]

#: Files that decide how a tokenizer splits text.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of a tool: its name, the JSON of its arguments, and the id by which its result names it."""

    name: str
    arguments: str
    id: str = ""

    @classmethod
    def plain(cls, name: str, arguments: str, id: str = "") -> ToolCall:
        """One whose JSON is as ``json.dumps`` writes it, so that markers in it stand as they are; what is no JSON
        stays as it is."""
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
        return cls(name, arguments, id)

    @property
    def value(self) -> Any:
        """The arguments, as the text itself if it is no JSON."""
        try:
            return json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation: who says it (``system``, ``user``, ``assistant``, ``tool``) and what.

    ``cuts``: characters of the content at which its parts (documents, tool results, the question) end, ascending; each
    part is encoded by itself, so that it is known again wherever it stands. ``tool_calls``: the tools that an
    assistant's message calls; ``tool_call_id``: the call whose result a tool's message is.
    """

    role: str
    content: str
    name: str | None = None
    cuts: tuple[int, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    @classmethod
    def kept(cls, role: str, content: str, meta: Mapping[str, Any]) -> Message:
        """A message as a turn of a ledger keeps it: its other fields stand in the turn's ``meta``, which may be
        anybody's and hold anything else under these names."""
        name, cuts, id = meta.get("name"), meta.get("cuts"), meta.get("tool_call_id")
        given = cuts if isinstance(cuts, list | tuple) and all(type(cut) is int for cut in cuts) else ()
        calls: tuple[ToolCall, ...] = ()
        with contextlib.suppress(msgspec.ValidationError):
            calls = msgspec.convert(meta.get("tool_calls", ()), tuple[ToolCall, ...])
        named, called = name if isinstance(name, str) else None, id if isinstance(id, str) else ""
        return cls(role, content, named, tuple(given), calls, called)

    @property
    def meta(self) -> dict[str, Any]:
        """What `kept` reads of a turn's meta."""
        calls = [msgspec.to_builtins(call) for call in self.tool_calls]
        found = {"name": self.name, "cuts": list(self.cuts), "tool_calls": calls, "tool_call_id": self.tool_call_id}
        return {name: value for name, value in found.items() if value}


@runtime_checkable
class TextModel(Protocol):
    """How a model's text becomes ids and back. Thread-safe."""

    def encode(self, text: str, *, markers: bool = True) -> Tokens:
        """Ids of a text, int32 [n]; nothing is added.

        Markers such as ``<|im_start|>`` become their special ids; without ``markers`` they stay the text they are.
        """
        ...

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        """Text of ids, special ones left out; bytes that are not UTF-8 (yet) become U+FFFD."""
        ...

    def render(self, messages: Sequence[Message], *, generate: bool, tools: Sequence[str] = ()) -> str:
        """The prompt text of a conversation; with ``generate`` it ends where the assistant's answer begins.

        ``tools``: the tools that it may call, as JSON; see `ctxreuse.toolcalls.Tool.text`.
        """
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        ...

    @property
    def markers(self) -> frozenset[str]:
        """The texts that ``encode`` turns into special ids."""
        ...

    @property
    def token_chars(self) -> int:
        """Characters of a text, controls left out, that one token can stand for at most; 0: any number."""
        ...


class HFText:
    """The text side of a Hugging Face folder (tokenizer.json, tokenizer_config.json, generation_config.json).

    A folder without a chat template is a base model's: messages are rendered as lines ``role: content``, after the mark
    that the tokenizer itself would put at the beginning of a text, and an answer begins after ``assistant:``.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | None = None,
        specials: dict[str, str] | None = None,
        stop_ids: frozenset[int] = frozenset(),
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._tokenizer, self._template, self._specials, self._now = tokenizer, template, specials or {}, now
        self._stop_ids = stop_ids
        if tokenizer is not None:  # a subclass may have another
            bound_word_cache(tokenizer, _WORDS)

    @classmethod
    def open(cls, folder: Path, stop_ids: frozenset[int] = frozenset()) -> HFText | None:
        """The text model of a folder; None if it has no tokenizer.json. Raises ConfigError if a file is broken.

        ``stop_ids``: ids that end an answer besides those that the folder's files name.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises bare Exception
            raise ConfigError(f"the tokenizer does not load: {error}", where=str(path)) from error
        settings = _read(folder / "tokenizer_config.json")
        specials = {k: v for k, v in ((k, _content(settings.get(k))) for k in settings if k.endswith("_token")) if v}
        stops = stop_ids | _ids(_read(folder / "generation_config.json").get("eos_token_id"))
        stops |= _ids(_read(folder / "config.json").get("eos_token_id"))
        if "eos_token" in specials:
            stops |= _ids(tokenizer.token_to_id(specials["eos_token"]))
        return cls(tokenizer, template=_template(folder, settings), specials=specials, stop_ids=stops)

    @property
    def stop_ids(self) -> frozenset[int]:
        """See `TextModel.stop_ids`."""
        return self._stop_ids

    @cached_property
    def markers(self) -> frozenset[str]:
        """See `TextModel.markers`."""
        return frozenset(t.content for t in self._tokenizer.get_added_tokens_decoder().values() if t.special)

    @cached_property
    def token_chars(self) -> int:
        """See `TextModel.token_chars`."""
        return _token_chars(json.loads(self._tokenizer.to_str()))

    def vocabulary(self) -> Vocabulary:
        """See `ctxreuse.constrain.HasVocabulary`."""
        count = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        pieces = [self._tokenizer.id_to_token(i) for i in range(count)]
        return vocabulary_of(json.loads(self._tokenizer.to_str()), pieces)

    def encode(self, text: str, *, markers: bool = True) -> Tokens:
        """See `TextModel.encode`. Raises EngineError for a text that is not valid Unicode."""
        try:
            ids = (self._tokenizer if markers else self._literal).encode(text, add_special_tokens=False).ids
        except (UnicodeError, TypeError) as error:
            raise EngineError(f"the text cannot be tokenised: {error}", fix="Remove lone surrogates") from error
        return np.asarray(ids, "<i4")

    @cached_property
    def _literal(self) -> Any:
        from tokenizers import Tokenizer

        copy = Tokenizer.from_str(self._tokenizer.to_str())
        copy.encode_special_tokens = True
        bound_word_cache(copy, _WORDS)
        return copy

    def decode(self, ids: Sequence[int] | Tokens, *, markers: bool = False) -> str:
        """See `TextModel.decode`; with ``markers`` special tokens are spelt out."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=not markers))

    @property
    def template(self) -> str:
        """The chat template; "" without one."""
        return self._template or ""

    def render(self, messages: Sequence[Message], *, generate: bool, tools: Sequence[str] = ()) -> str:
        """See `TextModel.render`. Raises EngineError if the template refuses the messages."""
        if self._template is None:
            text = self._begin + "".join(f"{m.name or m.role}: {m.content}\n" for m in messages)
            return text + "assistant:" if generate else text
        plain, template = [_plain(message) for message in messages], self._compiled
        given = {"tools": [json.loads(tool) for tool in tools]} if tools else {}
        try:
            return str(template.render(messages=plain, add_generation_prompt=generate, **given, **self._specials))
        except Exception as error:  # a template is a stranger's program and may fail as any program does
            raise EngineError(
                f"the chat template refuses these messages: {error}",
                fix="Look at the order of roles; many templates want user and assistant in turn",
            ) from error

    @cached_property
    def _begin(self) -> str:
        # Gemma answers nonsense without its mark at the beginning, and only its tokenizer's post-processor knows that.
        mark = self._specials.get("bos_token", "")
        added = self._tokenizer.encode("", add_special_tokens=True).ids[:1]
        return mark if mark and added == [self._tokenizer.token_to_id(mark)] else ""

    @cached_property
    def _compiled(self) -> Any:
        # The dialect of transformers' apply_chat_template; a template comes from a stranger, hence the sandbox.
        from jinja2.exceptions import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        jinja.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
        jinja.globals["raise_exception"] = refuse
        jinja.globals["strftime_now"] = lambda pattern: self._now().strftime(pattern)
        try:
            return jinja.from_string(self._template or "")
        except TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error


def _plain(message: Message) -> dict[str, Any]:
    """A message as chat templates know it."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        found["name"] = message.name
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.value}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


#: Words whose tokens a tokenizer keeps, in each thread: with ten times as many prose is tokenised no faster.
_WORDS = 1000
#: Bytes of UTF-8 text, but for controls and leads of characters beyond the first plane, whose other bytes count.
_TEXT_BYTES = (9, 10, 13, *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF0))
#: Characters that a normaliser makes one of, at most; others may remove any number.
_COMPOSED = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Prepend": 1, "Lowercase": 1}


def _token_chars(tokenizer: Mapping[str, Any]) -> int:
    """Characters of a text behind one token at most, from ``tokenizer.json``; 0: there is no such bound.

    Only byte-level vocabularies have one: others make a single unknown token of a whole word or run.
    """
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or ()
    normalisers, splitters = _steps(tokenizer.get("normalizer")), _steps(tokenizer.get("pre_tokenizer"))
    if (
        model.get("type") != "BPE"
        or not _spells_all(model, splitters)
        or any(token.get("lstrip") or token.get("rstrip") for token in added)
    ):
        return 0
    if any(step.get("behavior") == "Removed" for step in splitters):
        return 0
    if any(step.get("type") not in ("ByteLevel", "Split", "Digits", "Metaspace", "Punctuation") for step in splitters):
        return 0
    factor = 1
    for step in normalisers:
        pattern = (step.get("pattern") or {}).get("String", "")
        if step.get("type") == "Replace" and pattern and len(pattern) <= len(step.get("content") or ""):
            continue
        if step.get("type") not in _COMPOSED:
            return 0
        factor *= _COMPOSED[step["type"]]
    return factor * max(map(len, (*model["vocab"], *(token["content"] for token in added))))


def _spells_all(model: Mapping[str, Any], splitters: Sequence[Mapping[str, Any]]) -> bool:
    """True if every character but controls has a token for one of its bytes, so that none is left out or unknown."""
    names: Sequence[str] = ()
    if model.get("byte_fallback"):
        names = [f"<0x{byte:02X}>" for byte in _TEXT_BYTES]
    elif any(step.get("type") == "ByteLevel" for step in splitters):
        names = [char for char, byte in byte_table().items() if byte[0] in _TEXT_BYTES]
    return bool(names) and all(name in model["vocab"] for name in names)


def _steps(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a normaliser or pre-tokeniser, those of sequences one by one."""
    if step is None:
        return []
    inner = step.get("normalizers") or step.get("pretokenizers")
    return [one for each in inner for one in _steps(each)] if inner else [step]


def tokenizer_digest(folder: Path | None) -> str:
    """SHA-256 over the files that decide how text is split, or of a GGUF file; "none" without any."""
    if folder is not None and folder.is_file():
        return file_digest(folder)
    digest, found = hashlib.sha256(), False
    for name in _TOKENIZER_FILES:
        path = folder / name if folder else None
        if path is not None and path.is_file():
            digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
            found = True
            if name == "tokenizer.json":
                break  # it says everything; the others only repeat it
    return digest.hexdigest() if found else "none"


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the file is not JSON: {error}", where=str(path)) from error
    return value if isinstance(value, dict) else {}


def _content(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _ids(value: Any) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if isinstance(v, int))


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the chat template cannot be read: {error}", where=str(path)) from error
    found = settings.get("chat_template")
    if isinstance(found, list):  # several named ones
        defaults = (entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default")
        found = next(defaults, {}).get("template")
    return found if isinstance(found, str) else None
