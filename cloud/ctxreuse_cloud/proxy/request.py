"""The parts of a request that the proxy reads: model, context and salt; everything else passes through unchanged."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import xxhash

from ctxreuse.errors import FormatError

__all__ = ["EMPTY_REQUEST", "ProxyRequest", "parse_request"]

# Bytes of a prompt that identify its context: enough to tell system prompts apart, few enough to hash in microseconds.
_PREFIX = 4096

#: Fields that become the prompt, in this order.
_READ = ("tools", "functions", "instructions", "system", "messages", "prompt", "input")

#: Fields that a caller does not set at a backend.
_REPLACED = frozenset(("cache_salt", "kv_hints"))

_NULL = msgspec.Raw(b"null")

#: A message that is a text, as most clients write it: reading no further than this saves as much as parsing it took.
_PLAIN = re.compile(rb'\{\s*"role"\s*:\s*"([a-z]+)"\s*,\s*"content"\s*:\s*"')

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str | None)


class _Part(msgspec.Struct):
    type: str = ""


class _Role(msgspec.Struct):
    """A message, or an item of ``/v1/responses``; of parts only the type is read."""

    role: str = ""
    type: str = ""
    content: msgspec.Raw = _NULL


class _Conversation(msgspec.Struct):
    id: str = ""


_role, _conversation = msgspec.json.Decoder(_Role), msgspec.json.Decoder(_Conversation)
_parts = msgspec.json.Decoder(list[_Part])
_items = msgspec.json.Decoder(list[msgspec.Raw] | None)


class ProxyRequest:
    """One request body; ``model`` and ``context`` are empty where the body has none."""

    __slots__ = ("_body", "_fields", "_items", "_messages", "context", "model")

    def __init__(
        self,
        body: bytes,
        fields: dict[str, msgspec.Raw] | None,
        model: str,
        context: bytes,
        items: Sequence[msgspec.Raw] | None = None,
    ) -> None:
        """``items``: those of ``messages`` if they have been read."""
        self._body, self._fields, self._items = body, fields, items
        self.model, self.context = model, context
        self._messages: list[tuple[str, bytes]] | None = None

    def messages(self) -> list[tuple[str, bytes]]:
        """Return what the model reads, as (name, bytes) in order: tools, then each message by its role."""
        if self._messages is None:
            self._messages = self._read_messages()
        return self._messages

    def _read_messages(self) -> list[tuple[str, bytes]]:
        fields = self._fields or {}
        found: list[tuple[str, bytes]] = []
        for name in ("tools", "instructions", "system"):
            if name in fields:
                found.append((name, bytes(fields[name])))
        try:
            for raw in self._items or _items.decode(fields.get("messages", _NULL)) or ():
                found.append((_name(raw), bytes(raw)))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return []
        for name in ("prompt", "input"):
            raw = fields.get(name, _NULL)
            if name == "input" and _starts(raw, b"["):
                try:
                    found += [(_name(item), bytes(item)) for item in _items.decode(raw) or ()]
                    continue
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    pass  # texts or token ids
            if name in fields:
                found.append((name, bytes(raw)))
        return found

    def field(self, name: str) -> bytes:
        """Return a field of the body as JSON; ``null`` if there is none."""
        return bytes((self._fields or {}).get(name, _NULL))

    def only(self, names: Sequence[str], needed: str) -> bytes | None:
        """Return a body of these fields; None if there is no ``needed`` one."""
        fields = self._fields or {}
        if needed not in fields:
            return None
        return msgspec.json.encode({name: fields[name] for name in names if name in fields})

    @property
    def stores(self) -> bool:
        """True unless the body says that nothing is to be stored."""
        return bytes((self._fields or {}).get("store", _NULL)) != b"false"

    @property
    def streams(self) -> bool:
        """True if the body asks for a streamed answer."""
        return bytes((self._fields or {}).get("stream", _NULL)) == b"true"

    def continues(self) -> list[tuple[str, str]]:
        """Return the stored objects that the request builds on, as collections and ids."""
        found = []
        for name, collection in (("previous_response_id", "responses"), ("conversation", "conversations")):
            raw = (self._fields or {}).get(name)
            if raw is None:
                continue
            try:
                identity = _conversation.decode(raw).id if _starts(raw, b"{") else _text.decode(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                identity = None
            if identity:
                found.append((collection, identity))
        return found

    def body(self, salt: str, hints: bytes = b"") -> bytes:
        """Return the body for a backend, with ``salt`` and ``hints`` in place of the caller's ``cache_salt`` and
        ``kv_hints`` (none if empty)."""
        if self._fields is None or not (salt or hints or _REPLACED & self._fields.keys()):
            return self._body
        fields = {name: value for name, value in self._fields.items() if name not in _REPLACED}
        if salt:
            fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
        if hints:
            fields["kv_hints"] = msgspec.Raw(hints)
        return msgspec.json.encode(fields)

    def parts(self) -> list[msgspec.Raw]:
        """Return what the model reads, as JSON values in order: tools, then messages, prompt or input."""
        found: list[msgspec.Raw] = []
        for name in _READ:
            raw = (self._fields or {}).get(name, _NULL)
            try:
                found += _items.decode(raw) or ()
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                found.append(raw)
        return found


#: A request without a body.
EMPTY_REQUEST = ProxyRequest(b"", None, "", b"")


def parse_request(body: bytes, tenant: str, *, opaque: bool = False, lenient: bool = False) -> ProxyRequest:
    """Parse a body; one that is ``opaque`` (a form with a file) has neither model nor context. Raises FormatError;
    ``lenient``: what is no request of the API is opaque.

    The context is a hash of tenant, model, and the first 4,096 bytes of ``prompt_cache_key``, else of the instructions,
    the first message, prompt or input.
    """
    if opaque:
        return ProxyRequest(body, None, "", b"")
    try:
        fields = _object.decode(body)
        model = _text.decode(fields["model"]) or "" if "model" in fields else ""
        start, items = _beginning(fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if lenient:
            return ProxyRequest(body, None, "", b"")
        raise FormatError(f"not a request of the API: {error}") from None
    if not start:
        return ProxyRequest(body, fields, model, b"", items)
    named = b"\0".join((tenant.encode(), model.encode("utf-8", "surrogatepass"), start))
    return ProxyRequest(body, fields, model, xxhash.xxh3_128_digest(named), items)


def _name(raw: msgspec.Raw) -> str:
    """Return the role of a message; results of tools are of the role ``tool``, whatever their API calls them."""
    if (plain := _PLAIN.match(raw)) is not None:
        return plain[1].decode()
    found = _role.decode(raw)
    parts: list[_Part] = []
    if _starts(found.content, b"["):
        try:
            parts = _parts.decode(found.content)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass  # of another form
    if found.type.endswith("_call_output") or any(part.type == "tool_result" for part in parts):
        return "tool"
    return found.role or found.type


def _starts(raw: msgspec.Raw, with_: bytes) -> bool:
    return bytes(memoryview(raw)[:1]) == with_


def _beginning(fields: dict[str, msgspec.Raw]) -> tuple[bytes, Sequence[msgspec.Raw] | None]:
    """Return the beginning of what names the context, and the messages if they were read for it."""
    items: Sequence[msgspec.Raw] | None = None
    for name in ("prompt_cache_key", "instructions", "system", "messages", "prompt", "input"):
        raw = fields.get(name, _NULL)
        if name == "messages":
            items = _items.decode(raw)
            raw = next(iter(items or ()), _NULL)
        beginning = bytes(memoryview(raw)[:_PREFIX])
        if beginning not in (b"null", b"[]", b'""'):
            return beginning, items
    return b"", items
