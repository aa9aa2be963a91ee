"""What a text model made of texts that come again: a chat sends all of its turns with each question."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from ctxreuse.identity.keys import Tokens

if TYPE_CHECKING:
    from ctxreuse.engines.text import Message, TextModel

__all__ = ["RememberedTexts", "TextMemory", "text_memory"]

T = TypeVar("T")

#: Bytes of ids, and of rendered texts, that are kept of a model: two million tokens.
_LIMIT: Final = 8 << 20
#: Bytes that an entry takes besides its result.
_ENTRY: Final = 256
#: What templates call the time by: their text is another one later.
_CLOCK: Final = "strftime_now"


class RememberedTexts(Generic[T]):
    """Results of one function of texts, found by a digest of the text; those not used for longest leave first.

    Any thread may call.
    """

    def __init__(self, size: Callable[[T], int], limit: int = _LIMIT) -> None:
        """``size``: bytes of a result; ``limit``: of all."""
        self._size, self._limit = size, limit
        self._lock, self._nbytes = threading.Lock(), 0
        self._found: OrderedDict[bytes, tuple[T, int]] = OrderedDict()

    def get(self, text: bytes, how: str, make: Callable[[], T]) -> T:
        """Return what ``make`` returns, or has returned for this text and ``how``; it is not to be changed."""
        key = hashlib.blake2b(text, digest_size=16, person=how.encode()).digest()
        with self._lock:
            known = self._found.get(key)
            if known is not None:
                self._found.move_to_end(key)
                return known[0]
        made = make()
        size = self._size(made) + _ENTRY
        with self._lock:
            if key not in self._found and size <= self._limit:
                self._found[key], self._nbytes = (made, size), self._nbytes + size
                while self._nbytes > self._limit:
                    self._nbytes -= self._found.popitem(last=False)[1][1]
        return made

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            self._found.clear()
            self._nbytes = 0


class TextMemory:
    """What one text model made of texts. Any thread may call."""

    def __init__(self, text: TextModel) -> None:
        template = getattr(text, "template", None)
        self._renders = isinstance(template, str) and _CLOCK not in template
        self._encoded, self._rendered = RememberedTexts[Tokens](_nbytes), RememberedTexts[str](sys.getsizeof)

    def encode(self, text: TextModel, given: str, *, markers: bool = True) -> Tokens:
        """See `TextModel.encode`; the ids are read-only."""
        raw = given.encode("utf-8", "surrogatepass")
        return self._encoded.get(raw, f"{markers}", lambda: _read_only(text.encode(given, markers=markers)))

    def render(self, text: TextModel, messages: Sequence[Message], *, generate: bool, tools: Sequence[str] = ()) -> str:
        """See `TextModel.render`."""

        def make() -> str:
            if not tools:  # which a model of somebody's may not know
                return text.render(messages, generate=generate)
            return text.render(messages, generate=generate, tools=tools)

        try:
            raw = msgspec.msgpack.encode((messages, tools)) if self._renders else b""
        except UnicodeError:  # lone surrogates; the model says what is wrong
            return make()
        return self._rendered.get(raw, f"{generate}", make) if self._renders else make()

    def forget(self) -> None:
        """Forget all texts."""
        self._encoded.clear()
        self._rendered.clear()


_memories: WeakKeyDictionary[TextModel, TextMemory] = WeakKeyDictionary()
_lock = threading.Lock()


def text_memory(text: TextModel) -> TextMemory:
    """Return the memory of a text model, which lives as long as the model does."""
    with _lock:
        try:
            found = _memories.get(text)
            if found is None:
                found = _memories[text] = TextMemory(text)
        except TypeError:  # a model of somebody's that has no hash, or cannot be referred to weakly
            found = TextMemory(text)
        return found


def _nbytes(ids: Tokens) -> int:
    return ids.nbytes


def _read_only(ids: Tokens) -> Tokens:
    ids = ids.view()
    ids.flags.writeable = False
    return ids
