"""From messages to a prompt's ids, turn by turn, so that no text that a message carries can act as the model's markers.

A document may spell the end of its own turn and a system turn after it. Were it encoded with the text that the chat
template writes, the model would obey it. So every marker in a message is hidden behind a private character while the
template runs, and spelt as the plain text that it is when the result is encoded.

A message may say where its parts end (documents, then a question). Each part is encoded by itself, with another private
character at its ends while the template runs: so a document has the same ids wherever it stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from ctxreuse.engines.remembered import text_memory
from ctxreuse.engines.text import Message, TextModel, ToolCall
from ctxreuse.errors import ContextTooLongError, EngineError
from ctxreuse.identity.keys import Tokens, as_tokens

__all__ = ["EncodedPrompt", "Placeholders", "check_length", "encode_prompt", "rewrites_history", "seams"]

# Ends of turns are looked for after each of the first turns, later after every so many: each end where the template's
# words between two messages have not been seen before costs a run of the template over all turns before it. What may be
# looked for depends on the position alone, so that a prompt that grows keeps the ids it had.
_EACH, _EVERY = 64, 16
#: Characters that a vocabulary may have no token for.
_CONTROLS = (*map(chr, (*range(9), 11, 12, *range(14, 32))), "\x7f")
# Messages that go through the template at most for ends after the first turns, and for parts that it shows otherwise.
_MOST_RENDERED = 1 << 15


def seams(content: str, cuts: Sequence[int]) -> tuple[int, ...]:
    """Characters of a content at which its parts are taken apart: the ``cuts`` within it, its beginning and its end.

    None without a cut within. Blanks at both ends belong to no part: templates may remove them.
    """
    start, end = len(content) - len(content.lstrip()), len(content.rstrip())
    inner = sorted({cut for cut in cuts if start < cut < end})
    return (start, *inner, end) if inner else ()


class Placeholders:
    """Hides the markers of a model in some texts, and encodes what a template made of them. Thread-safe."""

    def __init__(self, text: TextModel, texts: Iterable[str]) -> None:
        """``texts``: all that will be hidden or rendered; the private characters are such that none of them has.

        Raises EngineError if there are markers to hide and the texts have all such characters.
        """
        self._text, self._memory = text, text_memory(text)
        self._names = sorted(text.markers, key=lambda name: (-len(name), name))
        self._find = re.compile("|".join(map(re.escape, self._names))) if self._names else None
        self._mark = ""
        used: set[str] = set()
        for given in texts:
            if self._find is not None and self._find.search(given):
                self._mark = "?"
            used.update(given)
        free = (char for char in map(chr, chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))) if char not in used)
        if self._mark:
            self._mark = next(free, "")
            if not self._mark:
                raise EngineError("the text has every private-use character there is", fix="Remove some of them")
        #: Stands where parts end; "" if there is no character left for it: then nothing is taken apart.
        self.seam = next(free, "")
        #: Another such character, or "".
        self.end = next(free, "")

    def __bool__(self) -> bool:
        """True if there is anything to hide."""
        return bool(self._mark)

    def hide(self, given: str) -> str:
        """The text with each marker replaced by a private character, its number and that character again."""
        if not self._mark or self._find is None:
            return given
        return self._find.sub(lambda m: f"{self._mark}{self._names.index(m[0])}{self._mark}", given)

    def sew(self, given: str, cuts: Sequence[int]) -> str:
        """As `hide`, with the seam at both ends of each part that ``cuts`` make of the text."""
        ends = seams(given, cuts) if self.seam else ()
        return self.seam.join(self.hide(given[a:b]) for a, b in pairwise((0, *ends, len(given))))

    def show(self, hidden: str) -> str:
        """The text as it was before `hide` or `sew`, and what a template wrote around it."""
        if self.seam:
            hidden = hidden.replace(self.seam, "")
        if not self._mark:
            return hidden
        return re.sub(f"{self._mark}(\\d+){self._mark}", lambda m: self._names[int(m[1])], hidden)

    def encode(self, hidden: str) -> Tokens:
        """Ids of a template's text, int32 [n]: its own markers are special, hidden ones are plain text."""
        if not self._mark or self._mark not in hidden or self._find is None:
            return self._memory.encode(self._text, hidden)
        parts: list[Tokens] = []
        at = 0
        for found in self._find.finditer(hidden):
            parts += [self._plain(hidden[at : found.start()]), self._memory.encode(self._text, found[0])]
            at = found.end()
        return as_tokens(np.concatenate([*parts, self._plain(hidden[at:])]))

    def encode_parts(self, hidden: str) -> tuple[Tokens, tuple[int, ...]]:
        """As `encode`, each part by itself; and the positions [tokens] where parts end, the last one left out."""
        pieces = [self.encode(piece) for piece in (hidden.split(self.seam) if self.seam else [hidden]) if piece]
        ends = tuple(accumulate(map(len, pieces)))
        return as_tokens(np.concatenate(pieces) if pieces else []), tuple(sorted({*ends[:-1]} - {0, *ends[-1:]}))

    def _plain(self, hidden: str) -> Tokens:
        return self._memory.encode(self._text, self.show(hidden), markers=False)


def rewrites_history(text: TextModel) -> bool:
    """Return True if the template shows a past answer otherwise than it was generated: without the scaffold that it put
    before the answer (an empty block of thoughts), or without the thoughts in it.

    The next prompt of a conversation then continues the history alone, not the prompt before it.
    """
    question = [Message("user", "a")]
    thoughts = "<think>\nb\n</think>"
    try:
        prompt = text.render(question, generate=True)
        later = text.render([*question, Message("assistant", f"{thoughts}\n\nc"), Message("user", "d")], generate=False)
    except EngineError:
        return False
    return not later.startswith(prompt + thoughts)


class EncodedPrompt(NamedTuple):
    """``ids`` of a prompt, and where in it turns end, ascending: contexts that share the beginning go on from there.
    ``parts``: where parts of messages and turns end, ascending. ``tools``: where the text of each tool begins; empty if
    the template does not show them one after the other."""

    ids: Tokens
    ends: tuple[int, ...]
    parts: tuple[int, ...] = ()
    tools: tuple[int, ...] = ()


def check_length(text: TextModel, given: str, max_tokens: int) -> None:
    """Raise ContextTooLongError for a text that cannot fit into ``max_tokens``, without tokenising it."""
    most = text.token_chars * max_tokens
    if most and len(given) > most and len(given) - sum(map(given.count, _CONTROLS)) > most:
        raise ContextTooLongError(
            f"the prompt has {len(given):,} characters, too many for the {max_tokens:,} tokens the model takes",
            fix="Send less",
        )


class _Rendering:
    """Renders every prompt with these tools, one that was rendered before from memory."""

    def __init__(self, text: TextModel, tools: Sequence[str]) -> None:
        self._text, self._tools, self._memory = text, tools, text_memory(text)

    def render(self, messages: Sequence[Message], *, generate: bool) -> str:
        return self._memory.render(self._text, messages, generate=generate, tools=self._tools)


def encode_prompt(
    text: TextModel,
    messages: Sequence[Message],
    *,
    tools: Sequence[str] = (),
    generate: bool = True,
    max_tokens: int | None = None,
) -> EncodedPrompt:
    """The ids of a conversation; with ``generate`` they end where the assistant's answer begins.

    ``tools``: the tools that it may call, as JSON, see `TextModel.render`; each of them is a part.

    With ``max_tokens`` it raises ContextTooLongError, before tokenising, for messages that cannot fit: each message
    takes at least one token, and a token has a longest text.

    Every turn is encoded by itself, so a conversation that goes on keeps the ids that it had; and so is every part of a
    message (`Message.cuts`), as far as the template shows the content as it is. Raises EngineError if the template
    refuses the messages or a text is not valid Unicode.
    """
    if max_tokens is not None and len(messages) > max_tokens:
        raise ContextTooLongError(
            f"the prompt has {len(messages):,} messages, too many for the {max_tokens:,} tokens the model takes",
            fix="Send fewer",
        )
    disguise = Placeholders(text, (given for each in (*map(_texts, messages), tools) for given in each))
    hidden = [_hidden(disguise, message) for message in messages]
    shown_tools = [disguise.hide(tool) for tool in tools]
    shown = _Rendering(text, shown_tools)
    full = shown.render(hidden, generate=generate)
    if max_tokens is not None:
        check_length(text, full if not disguise else disguise.show(full), max_tokens)
    contents = [disguise.sew(m.content, m.cuts) if m.cuts else h.content for m, h in zip(messages, hidden)]
    if contents != [m.content for m in hidden]:
        hidden = _joined(lambda given: shown.render(given, generate=generate), disguise, hidden, contents, full)
        full = shown.render(hidden, generate=generate)
    cuts = list(_cuts(shown, hidden, full, disguise.end, generate=generate))
    starts = _tool_starts(text, hidden, shown_tools, full, disguise.end, generate=generate) if tools else []
    ids: list[Tokens] = []
    ends: list[int] = []
    begun: list[int] = []
    parts: list[int] = []
    at = n = 0
    for cut in sorted({*cuts, *starts, len(full)}):
        if cut > at:
            piece, inner = disguise.encode_parts(full[at:cut])
            ids.append(piece)
            parts += [n + end for end in inner]
            at, n = cut, n + len(piece)
            if cut in starts:
                begun.append(n)
            else:
                ends.append(n)
    # The end of a generation prompt is no end of a turn.
    turns = tuple(ends[: len(cuts)])
    found = tuple(sorted({*parts, *turns, *begun} - {0}))
    return EncodedPrompt(as_tokens(np.concatenate(ids)) if ids else as_tokens([]), turns, found, tuple(begun))


def _texts(message: Message) -> Iterable[str]:
    """All that a message brings into a prompt."""
    yield from (message.role, message.content, message.name or "", message.tool_call_id)
    for call in message.tool_calls:
        yield from (call.name, call.arguments, call.id)


def _hidden(disguise: Placeholders, message: Message) -> Message:
    hide = disguise.hide
    calls = tuple(ToolCall(hide(call.name), hide(call.arguments), hide(call.id)) for call in message.tool_calls)
    name = None if message.name is None else hide(message.name)
    return Message(
        hide(message.role), hide(message.content), name, tool_calls=calls, tool_call_id=hide(message.tool_call_id)
    )


def _tool_starts(
    text: TextModel, messages: Sequence[Message], tools: Sequence[str], full: str, mark: str, *, generate: bool
) -> list[int]:
    """Characters of ``full`` where the tools begin, ascending; none if the template shows them otherwise.

    One run of the template, with a mark before the name of each, shows where they are.
    """
    marked = [tool.replace('"name": "', f'"name": "{mark}', 1) for tool in tools]
    try:
        pieces = text.render(messages, generate=generate, tools=marked).split(mark) if mark else []
    except EngineError:
        return []
    if len(pieces) != len(tools) + 1 or "".join(pieces) != full:
        return []
    found: list[int] = []
    for name in list(accumulate(map(len, pieces)))[:-1]:
        before = found[-1] + 1 if found else 0
        start = full.rfind('{"type"', before, name)
        found.append(start if start >= 0 else max(full.rfind("\n", before, name) + 1, before))
    return found


def _joined(
    render: Callable[[Sequence[Message]], str],
    disguise: Placeholders,
    hidden: list[Message],
    joined: list[str],
    full: str,
) -> list[Message]:
    """The messages with ``joined`` contents, but for those that the template would show otherwise than in ``full``."""
    shown = disguise.show(full)

    def same(messages: list[Message]) -> bool:
        try:
            return disguise.show(render(messages)) == shown
        except EngineError:
            return False

    whole = [msgspec.structs.replace(m, content=content) for m, content in zip(hidden, joined)]
    if same(whole):
        return whole
    found = list(hidden)
    tries = max(_MOST_RENDERED // len(hidden), 1)
    for i in [i for i, message in enumerate(whole) if message.content != hidden[i].content][:tries]:
        tried = [*found[:i], whole[i], *found[i + 1 :]]
        if same(tried):
            found = tried
    return found


def _cuts(text: _Rendering, messages: Sequence[Message], full: str, mark: str, *, generate: bool) -> Iterable[int]:
    """Characters of ``full`` after which a turn has ended, ascending."""
    count, last, rendered = len(messages), 0, 0
    between = _Between(text, messages, full, mark, generate=generate) if count > _EACH else None
    for n in range(1, count + 1):
        if n > _EACH and n % _EVERY and n < count - 1:
            continue
        at = between.end(n) if between is not None and n > _EACH else None
        if at is None:
            if n > _EACH:
                rendered += n
                if rendered > _MOST_RENDERED:
                    continue
            try:
                before = text.render(messages[:n], generate=False)
            except EngineError:
                continue  # templates may refuse to end there, after a system turn for example
            at = len(before) if full.startswith(before) else 0
            if between is not None:
                between.learn(n, at)
        if at > last:
            last = at
            yield at


class _Between:
    """The template's words between the contents of neighbours, and where in them a turn ends.

    One run of the template, with a mark at both ends of each content, shows them all. The same words between the same
    roles end a turn at the same place, so that few ends cost a run of their own.
    """

    def __init__(self, text: _Rendering, messages: Sequence[Message], full: str, mark: str, *, generate: bool) -> None:
        """``full``: the text without marks; ``mark``: a character that no message has."""
        self._messages, self._full = messages, full
        self._known: dict[tuple[str, str, str], int] = {}
        #: Characters of ``full`` where the contents begin and end; empty if the template shows them otherwise.
        self._edges: list[int] = []
        marked = [msgspec.structs.replace(m, content=_framed(m.content, mark)) for m in messages]
        try:
            shown = text.render(marked, generate=generate) if mark else ""
        except EngineError:
            return
        pieces = shown.split(mark) if mark else []
        if len(pieces) == 2 * len(messages) + 1 and "".join(pieces) == full:
            self._edges = list(accumulate(map(len, pieces)))[:-1]

    def _words(self, n: int) -> tuple[tuple[str, str, str], int] | None:
        """What identifies the words after message ``n`` (from 1), and the character where they begin."""
        if not self._edges:
            return None
        begin = self._edges[2 * n - 1]
        if n < len(self._messages):
            end, after = self._edges[2 * n], self._messages[n].role
        else:
            end, after = len(self._full), ""
        return (self._messages[n - 1].role, after, self._full[begin:end]), begin

    def learn(self, n: int, at: int) -> None:
        """The turn of message ``n`` ends at the character ``at``; 0: nowhere."""
        found = self._words(n)
        if found is not None:
            self._known[found[0]] = at - found[1] if at else -1

    def end(self, n: int) -> int | None:
        """The character at which the turn of message ``n`` ends; 0: nowhere; None: unknown."""
        found = self._words(n)
        if found is None or (offset := self._known.get(found[0])) is None:
            return None
        return found[1] + offset if offset >= 0 else 0


def _framed(content: str, mark: str) -> str:
    """The content with the mark at both ends; blanks stay outside, as templates may remove them."""
    inner = content.strip()
    if not inner:
        return mark + mark
    start = content.index(inner)
    return f"{content[:start]}{mark}{inner}{mark}{content[start + len(inner) :]}"
