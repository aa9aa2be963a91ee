"""Token streams: a session's context as the concatenation of one durable segment of token ids a turn.

::

    turns      system        user          assistant            user
    segment    |--encoded--| |--encoded--| |gen|sampled|close| |--encoded--|      -> concatenated: the context

The segment of a written turn is what ``render(turns up to it)`` adds to ``render(turns before it)``, encoded alone.
That of a generated turn is the generation prompt, the ids as sampled, and the template's closing of a turn. A
segment is stored in the ledger under the digest of the model space and never made twice, so the context after the next
turn begins with the same ids, and their KV is found again.

A template may rewrite earlier turns (strip them, merge them, drop reasoning). Then the turn's segment is *whole*: the
ids of everything up to it, encoded again and marked by a leading ``-1``; earlier segments are not used. A template may
also refuse a turn as the last one (a system prompt alone): its segment is empty and the next one carries both.

A turn whose text has parts (documents, then a question) says in its meta entry ``cuts`` after which characters they
end. Each part is encoded by itself, so that its ids are the same in any other prompt; a ``-2`` stands in the segment
where one ends.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.engines.prompt import Placeholders
from ctxreuse.engines.text import Message, TextModel
from ctxreuse.errors import CtxReuseError, EngineError
from ctxreuse.identity.keys import Tokens, as_tokens
from ctxreuse.identity.model import ModelSpace
from ctxreuse.store import Ledger, Turn
from ctxreuse.why import PromptPart

__all__ = ["Draft", "Segment", "Segments", "SessionPrompt", "message_of", "unpack"]

_WHOLE, _CUT = -1, -2
_MAX_RENDERS = 32
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
        """Return the stored form: int32 little-endian; -1 first if whole, -2 where a part ends."""
        marked = np.insert(self.ids, self.cuts, _CUT) if self.cuts else self.ids
        return (np.concatenate([[_WHOLE], marked]) if self.whole else marked).astype("<i4").tobytes()


def unpack(raw: bytes, vocab_size: int = 1 << 31) -> Segment | None:
    """Return the segment of stored bytes; None if they are not valid for a vocabulary of this size."""
    if len(raw) % 4:
        return None
    stored: npt.NDArray[np.int32] = np.frombuffer(raw, "<i4")
    whole = len(stored) > 0 and int(stored[0]) == _WHOLE
    stored = stored[1:] if whole else stored
    marks = np.flatnonzero(stored == _CUT)
    ids = stored[stored != _CUT] if len(marks) else stored
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


class SessionPrompt(NamedTuple):
    """The prompt of an answer: ``ids`` = context and generation prompt, which is ``added`` at its end.

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
    parts: tuple[PromptPart, ...] = ()
    cuts: tuple[int, ...] = ()

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """Where in ``ids`` the context before the draft ends, and the draft: forks continue from there."""
        end = len(self.ids) - len(self.added)
        if self.whole or end <= 0:
            return ()
        return (end,) if self.draft is None or self.draft.whole else (end - len(self.draft.ids), end)


def message_of(turn: Turn | Draft) -> Message:
    """Return the message for the template; the turn's meta has its ``name``, and ``cuts`` where its parts end."""
    if isinstance(turn, Draft):
        return Message(turn.role, turn.content, turn.name, turn.cuts)
    return Message.kept(turn.role, turn.content, turn.meta)


class Segments:
    """Makes and stores the segments of one ledger for one model. Thread-safe."""

    def __init__(
        self, ledger: Ledger, text: TextModel, space: ModelSpace, *, readonly: bool = False, variant: bytes = b""
    ) -> None:
        """``variant``: what else than the model the text depends on, such as the tools that it shows."""
        self._ledger, self._text, self._space, self._readonly = ledger, text, space, readonly
        self._digest = hashlib.sha256(space.digest + variant).digest() if variant else space.digest
        self._lock = threading.Lock()
        self._renders: OrderedDict[int, str | None] = OrderedDict()

    @property
    def space(self) -> bytes:
        """Digest under which segments are stored."""
        return self._digest

    def context(self, turns: Sequence[Turn]) -> Tokens:
        """Return the ids of the context after ``turns`` (root first), int32 [n]; missing segments are made and stored.

        A turn's id identifies its whole history, so a segment never changes. Raises StoreError from the ledger.
        """
        return self.outline(turns)[0]

    def outline(self, turns: Sequence[Turn]) -> tuple[Tokens, tuple[int, ...]]:
        """As `context`, with the positions where turns and parts of their texts end."""
        segments = self._segments(turns)
        return _join(segments), _parts(turns, segments)[1]

    def _segments(self, turns: Sequence[Turn]) -> list[Segment]:
        found = [self._stored(turn) for turn in turns]
        made: dict[int, bytes] = {}
        for i, segment in enumerate(found):
            if segment is None:
                segment = found[i] = self._make(turns[:i], turns[i])
                made[turns[i].id] = segment.pack()
        if made and not self._readonly:
            self._ledger.put_tokens(self.space, made)
        return [segment for segment in found if segment is not None]

    def prompt(self, turns: Sequence[Turn], draft: Draft | None = None) -> SessionPrompt:
        """Return the prompt: the context after ``turns`` and ``draft``, then the generation prompt.

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
                parts, cuts = (*parts, PromptPart(draft.role, len(context))), (*cuts, len(context))
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
        return SessionPrompt(as_tokens(ids), as_tokens(added), segment, base, text, whole, parts, cuts)

    def answer(
        self, turns: Sequence[Turn], prompt: SessionPrompt, content: str, sampled: Sequence[int], *, cut: bool
    ) -> Segment:
        """Return the segment of an answer to ``prompt``, which ends with ``turns``; ``sampled``: its ids.

        ``cut``: the text ends before the last ids do (a stop string, a consumer that stopped early).
        """
        full = self._render([*turns, Draft("assistant", content)])
        if full is None:
            return Segment(as_tokens([]))
        if not full.startswith(prompt.text + content):
            # The template renders this answer differently from how it was sampled (trimmed, without reasoning).
            return self._delta(prompt.base, full, [*turns, Draft("assistant", content)])
        body = list(sampled)
        while body and body[-1] in self._text.stop_ids:
            # The template's own closing follows, which begins with the model's end-of-turn token.
            body.pop()
        if cut:
            body = self._cut(body, content)
        closing = self._text.encode(full[len(prompt.text) + len(content) :])
        return Segment(np.concatenate([prompt.added, as_tokens(body), as_tokens(closing)]), prompt.whole)

    def _stored(self, turn: Turn) -> Segment | None:
        raw = self._ledger.tokens(turn.id, self.space)
        return None if raw is None else unpack(raw, self._space.vocab_size)

    def _make(self, before: Sequence[Turn], turn: Turn | Draft) -> Segment:
        full = self._render([*before, turn])
        return Segment(as_tokens([])) if full is None else self._delta(self._base(before), full, [*before, turn])

    def _delta(self, base: str, full: str, path: Sequence[Turn | Draft]) -> Segment:
        whole, last = not full.startswith(base), message_of(path[-1])
        if not whole and (last.cuts or any(marker in last.content for marker in self._text.markers)):
            # A template may render content with parts, or with markers, differently.
            hidden_text = Placeholders(self._text, [last.content, full])
            for hidden in dict.fromkeys((hidden_text.sew(last.content, last.cuts), hidden_text.hide(last.content))):
                shown = self._render([*path[:-1], Draft(last.role, hidden, last.name)])
                if shown is not None and shown.startswith(base) and hidden_text.show(shown) == full:
                    ids, cuts = hidden_text.encode_parts(shown[len(base) :])
                    return Segment(ids, False, cuts)
        return Segment(as_tokens(self._text.encode(full if whole else full[len(base) :])), whole)

    def _base(self, path: Sequence[Turn | Draft]) -> str:
        """Return the text of the longest prefix of ``path`` that the template accepts; segments so far encode it."""
        for n in range(len(path), 0, -1):
            text = self._render(path[:n])
            if text is not None:
                return text
        return ""

    def _render(self, path: Sequence[Turn | Draft]) -> str | None:
        """Return the text of a history; None if the template refuses it."""
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
                while len(self._renders) > _MAX_RENDERS:
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


def _parts(turns: Sequence[Turn], segments: Sequence[Segment]) -> tuple[tuple[PromptPart, ...], tuple[int, ...]]:
    """Return where turns end in the joined segments, and where their parts do; a turn without ids of its own belongs to
    the next."""
    parts: list[PromptPart] = []
    cuts: list[int] = []
    end = 0
    for turn, segment in zip(turns, segments):
        if segment.whole:
            parts, cuts, end = [], [], 0
        if len(segment.ids):
            cuts += [end + cut for cut in segment.cuts]
            end += len(segment.ids)
            parts.append(PromptPart(turn.role, end))
            cuts.append(end)
    return tuple(parts), tuple(cuts)
