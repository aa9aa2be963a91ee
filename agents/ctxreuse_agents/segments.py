"""Token streams: a session's context as the concatenation of one durable segment of token ids a turn.

::

    turns      system        user          assistant            user
    segment    |--encoded--| |--encoded--| |gen|sampled|close| |--encoded--|      -> concatenated: the context

The segment of a written turn is what ``render(turns up to it)`` adds to ``render(turns before it)``, encoded alone.
That of a generated turn is the generation prompt, the ids exactly as sampled, and the template's closing of a turn. A
segment is kept in the ledger under the digest of the model space and never made twice, so the context after the next
turn begins with the very ids that were computed, and their KV is found again.

A template may rewrite earlier turns (strip them, merge them, drop reasoning). Then the turn's segment is *whole*: the
ids of everything up to it, encoded anew, marked by a leading ``-1``; what came before is not used. A template may also
refuse a turn as the last one (a system prompt alone): such a turn's segment is empty and the next one carries both.

A turn whose text has parts (documents, then a question) says in its meta entry ``cuts`` after which characters they
end. Each part is encoded by itself, so that its ids are the same in any other prompt; a ``-2`` stands in the segment
where one ends.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.engines.prompt import Disguise
from ctxreuse.engines.text import Message, TextModel
from ctxreuse.errors import CtxReuseError, EngineError
from ctxreuse.keys import Tokens, as_tokens
from ctxreuse.model import ModelSpace
from ctxreuse.store import Ledger, Turn
from ctxreuse.why import Part

__all__ = ["Draft", "Prompt", "Segment", "Segments", "message_of", "unpack"]

_WHOLE, _CUT = -1, -2
_KEPT_RENDERS = 32
# How far back a cut answer is searched for the last token wholly part of its text: longer than stop strings are.
_CUT_TOKENS = 64


class Segment(NamedTuple):
    """Token ids of one turn; ``whole``: they stand for everything up to and including it.

    ``cuts``: positions in ``ids``, ascending, at which parts of the turn's text end.
    """

    ids: Tokens
    whole: bool = False
    cuts: tuple[int, ...] = ()

    def pack(self) -> bytes:
        """As the ledger keeps it: int32 little-endian, a whole one after -1, -2 where a part ends."""
        marked = np.insert(self.ids, self.cuts, _CUT) if self.cuts else self.ids
        return (np.concatenate([[_WHOLE], marked]) if self.whole else marked).astype("<i4").tobytes()


def unpack(raw: bytes, vocab_size: int = 1 << 31) -> Segment | None:
    """The segment in the ledger's bytes; None if they cannot be one for a vocabulary of this size."""
    if len(raw) % 4:
        return None
    held: npt.NDArray[np.int32] = np.frombuffer(raw, "<i4")
    whole = len(held) > 0 and int(held[0]) == _WHOLE
    held = held[1:] if whole else held
    marks = np.flatnonzero(held == _CUT)
    ids = held[held != _CUT] if len(marks) else held
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        return None
    cuts = tuple(int(at) for at in marks - np.arange(len(marks)))
    if cuts and (cuts[0] < 1 or cuts[-1] >= len(ids) or len(set(cuts)) < len(cuts)):
        return None
    return Segment(ids, whole, cuts)


class Draft(NamedTuple):
    """A turn that is not in the ledger yet; ``cuts``: see `ctxreuse.engines.text.Message`."""

    role: str
    content: str
    name: str | None = None
    cuts: tuple[int, ...] = ()


class Prompt(NamedTuple):
    """What an answer starts from: ``ids`` = context and generation prompt, which is ``added`` at the end of it.

    ``draft`` is the segment of the draft turn, if there was one. ``base`` and ``text`` are the rendered text without
    and with the generation prompt; ``whole``: the generation prompt does not simply follow the context. ``parts``:
    where each turn ends, by its role; ``cuts``: where turns and parts of their texts end.
    """

    ids: Tokens
    added: Tokens
    draft: Segment | None
    base: str
    text: str
    whole: bool
    parts: tuple[Part, ...] = ()
    cuts: tuple[int, ...] = ()

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """Where in ``ids`` the context before the draft ends, and the draft: forks go on from there."""
        end = len(self.ids) - len(self.added)
        if self.whole or end <= 0:
            return ()
        return (end,) if self.draft is None or self.draft.whole else (end - len(self.draft.ids), end)


def message_of(turn: Turn | Draft) -> Message:
    """The message that a template sees; in a turn's meta ``name`` is its name, and ``cuts`` where its parts end."""
    if isinstance(turn, Draft):
        return Message(turn.role, turn.content, turn.name, turn.cuts)
    return Message.kept(turn.role, turn.content, turn.meta)


class Segments:
    """Makes and keeps the segments of one ledger for one model. Any thread may call."""

    def __init__(self, ledger: Ledger, text: TextModel, space: ModelSpace, *, readonly: bool = False) -> None:
        self._ledger, self._text, self._space, self._readonly = ledger, text, space, readonly
        self._lock = threading.Lock()
        self._renders: OrderedDict[int, str | None] = OrderedDict()

    @property
    def space(self) -> bytes:
        """The digest under which segments are kept."""
        return self._space.digest

    def context(self, turns: Sequence[Turn]) -> Tokens:
        """Ids of the context after ``turns`` (root first), int32 [n]; missing segments are made and kept.

        A turn's id names its whole history, so a segment made once stays right. Raises StoreError from the ledger.
        """
        return self.outline(turns)[0]

    def outline(self, turns: Sequence[Turn]) -> tuple[Tokens, tuple[int, ...]]:
        """As `context`, and where in it turns and parts of their texts end."""
        segments = self._segments(turns)
        return _join(segments), _parts(turns, segments)[1]

    def _segments(self, turns: Sequence[Turn]) -> list[Segment]:
        found = [self._held(turn) for turn in turns]
        made: dict[int, bytes] = {}
        for i, segment in enumerate(found):
            if segment is None:
                segment = found[i] = self._make(turns[:i], turns[i])
                made[turns[i].id] = segment.pack()
        if made and not self._readonly:
            self._ledger.put_all_tokens(self.space, made)
        return [segment for segment in found if segment is not None]

    def prompt(self, turns: Sequence[Turn], draft: Draft | None = None) -> Prompt:
        """The context after ``turns`` and ``draft`` with the generation prompt behind it.

        Raises EngineError if the template refuses these turns.
        """
        segments = self._segments(turns)
        context = _join(segments)
        parts, cuts = _parts(turns, segments)
        segment = None
        path: list[Turn | Draft] = list(turns)
        if draft is not None:
            segment = self._make(turns, draft)
            if segment.whole:
                context, parts, cuts = as_tokens([]), (), ()
            cuts = (*cuts, *(len(context) + cut for cut in segment.cuts))
            context = np.concatenate([context, segment.ids])
            if len(context) > (parts[-1].end if parts else 0):
                parts, cuts = (*parts, Part(draft.role, len(context))), (*cuts, len(context))
            path.append(draft)
        base = self._base(path)
        try:
            text = self._text.render([message_of(turn) for turn in path], generate=True)
        except CtxReuseError as error:
            raise EngineError(
                f"the model's chat template refuses these turns: {error.what}",
                where=" ".join(turn.role for turn in path[-8:]),
                fix=error.fix,
            ) from error
        whole = not text.startswith(base)
        added = self._text.encode(text if whole else text[len(base) :])
        ids = added if whole else np.concatenate([context, added])
        if whole:
            parts, cuts = (), ()
        return Prompt(as_tokens(ids), as_tokens(added), segment, base, text, whole, parts, cuts)

    def answer(
        self, turns: Sequence[Turn], prompt: Prompt, content: str, sampled: Sequence[int], *, cut: bool
    ) -> Segment:
        """The segment of an answer to ``prompt``, which ends with ``turns``; ``sampled`` are its ids.

        ``cut``: the text ends before the last ids do (a stop string, a consumer that stopped early).
        """
        full = self._render([*turns, Draft("assistant", content)])
        if full is None:
            return Segment(as_tokens([]))
        if not full.startswith(prompt.text + content):
            # The template shows this answer otherwise than it was sampled (trimmed, without reasoning).
            return self._delta(prompt.base, full, [*turns, Draft("assistant", content)])
        body = list(sampled)
        while body and body[-1] in self._text.stop_ids:
            # The template's own closing follows, which begins with the model's end-of-turn token.
            body.pop()
        if cut:
            body = self._cut(body, content)
        closing = self._text.encode(full[len(prompt.text) + len(content) :])
        return Segment(np.concatenate([prompt.added, as_tokens(body), as_tokens(closing)]), prompt.whole)

    def _held(self, turn: Turn) -> Segment | None:
        raw = self._ledger.tokens(turn.id, self.space)
        return None if raw is None else unpack(raw, self._space.vocab_size)

    def _make(self, before: Sequence[Turn], turn: Turn | Draft) -> Segment:
        full = self._render([*before, turn])
        return Segment(as_tokens([])) if full is None else self._delta(self._base(before), full, [*before, turn])

    def _delta(self, base: str, full: str, path: Sequence[Turn | Draft]) -> Segment:
        whole, last = not full.startswith(base), message_of(path[-1])
        if not whole and (last.cuts or any(marker in last.content for marker in self._text.markers)):
            # A template may show a content with parts, or with markers, in a way of its own.
            disguise = Disguise(self._text, [last.content, full])
            for hidden in dict.fromkeys((disguise.sew(last.content, last.cuts), disguise.hide(last.content))):
                shown = self._render([*path[:-1], Draft(last.role, hidden, last.name)])
                if shown is not None and shown.startswith(base) and disguise.show(shown) == full:
                    ids, cuts = disguise.encode_parts(shown[len(base) :])
                    return Segment(ids, False, cuts)
        return Segment(as_tokens(self._text.encode(full if whole else full[len(base) :])), whole)

    def _base(self, path: Sequence[Turn | Draft]) -> str:
        """The text of the longest beginning of ``path`` that the template takes; the segments so far spell it."""
        for n in range(len(path), 0, -1):
            text = self._render(path[:n])
            if text is not None:
                return text
        return ""

    def _render(self, path: Sequence[Turn | Draft]) -> str | None:
        """The text of a history, or None if the template refuses to end there."""
        last = path[-1]
        key = last.id if isinstance(last, Turn) else 0
        with self._lock:
            if key and key in self._renders:
                self._renders.move_to_end(key)
                return self._renders[key]
        try:
            text = self._text.render([message_of(turn) for turn in path], generate=False)
        except CtxReuseError:
            text = None
        if key:
            with self._lock:
                self._renders[key] = text
                while len(self._renders) > _KEPT_RENDERS:
                    self._renders.popitem(last=False)
        return text

    def _cut(self, body: list[int], content: str) -> list[int]:
        for n in range(len(body), max(len(body) - _CUT_TOKENS, 0) - 1, -1):
            spelled = self._text.decode(body[:n])
            if content.startswith(spelled):
                rest = content[len(spelled) :]
                return [*body[:n], *(int(token) for token in self._text.encode(rest))]
        return [int(token) for token in self._text.encode(content)]


def _join(segments: Sequence[Segment]) -> Tokens:
    start = max((i for i, segment in enumerate(segments) if segment.whole), default=0)
    parts = [segment.ids for segment in segments[start:]]
    return as_tokens(np.concatenate(parts)) if parts else as_tokens([])


def _parts(turns: Sequence[Turn], segments: Sequence[Segment]) -> tuple[tuple[Part, ...], tuple[int, ...]]:
    """Where turns end in the joined segments, and where their parts do; a turn without ids of its own belongs to the
    next."""
    parts: list[Part] = []
    cuts: list[int] = []
    end = 0
    for turn, segment in zip(turns, segments):
        if segment.whole:
            parts, cuts, end = [], [], 0
        if len(segment.ids):
            cuts += [end + cut for cut in segment.cuts]
            end += len(segment.ids)
            parts.append(Part(turn.role, end))
            cuts.append(end)
    return tuple(parts), tuple(cuts)
