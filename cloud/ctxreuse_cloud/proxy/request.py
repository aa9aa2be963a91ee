"""The parts of a request that the proxy reads: model, context and salt; everything else passes through unchanged."""

from __future__ import annotations

import hashlib

import msgspec

from ctxreuse.errors import FormatError

__all__ = ["EMPTY_REQUEST", "ProxyRequest", "parse_request"]

# Bytes of a prompt that identify its context: enough to tell system prompts apart, few enough to hash in microseconds.
_PREFIX = 4096

#: Fields that become the prompt, in this order.
_READ = ("tools", "functions", "instructions", "messages", "prompt", "input")

_NULL = msgspec.Raw(b"null")

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str | None)


class _Role(msgspec.Struct):
    role: str = ""


_role = msgspec.json.Decoder(_Role)
_items = msgspec.json.Decoder(list[msgspec.Raw] | None)


class ProxyRequest:
    """One request body; ``model`` and ``context`` are empty where the body has none."""

    __slots__ = ("_body", "_fields", "context", "model")

    def __init__(self, body: bytes, fields: dict[str, msgspec.Raw] | None, model: str, context: bytes) -> None:
        self._body, self._fields = body, fields
        self.model, self.context = model, context

    def messages(self) -> list[tuple[str, bytes]]:
        """Return what the model reads, as (name, bytes) in order: tools, then each message by its role."""
        fields, found = self._fields or {}, []
        if "tools" in fields:
            found.append(("tools", bytes(fields["tools"])))
        try:
            for raw in _items.decode(fields.get("messages", _NULL)) or ():
                found.append((_role.decode(raw).role, bytes(raw)))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return []
        found += [(name, bytes(fields[name])) for name in ("prompt", "input") if name in fields]
        return found

    def body(self, salt: str) -> bytes:
        """Return the body for a backend, with ``salt`` in place of the caller's ``cache_salt`` (none if empty)."""
        if self._fields is None or (not salt and "cache_salt" not in self._fields):
            return self._body
        fields = {name: value for name, value in self._fields.items() if name != "cache_salt"}
        if salt:
            fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
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


def parse_request(body: bytes, tenant: str, *, opaque: bool = False) -> ProxyRequest:
    """Parse a body; one that is ``opaque`` (a form with a file) has neither model nor context. Raises FormatError.

    The context is a hash of tenant, model, and the first 4,096 bytes of ``prompt_cache_key``, else of the first
    message, prompt or input.
    """
    if opaque:
        return ProxyRequest(body, None, "", b"")
    try:
        fields = _object.decode(body)
        model = _text.decode(fields["model"]) or "" if "model" in fields else ""
        start = _beginning(fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"not a request of the API: {error}") from None
    if not start:
        return ProxyRequest(body, fields, model, b"")
    named = b"\0".join((tenant.encode(), model.encode("utf-8", "surrogatepass"), start))
    return ProxyRequest(body, fields, model, hashlib.blake2b(named, digest_size=16).digest())


def _beginning(fields: dict[str, msgspec.Raw]) -> bytes:
    for name in ("prompt_cache_key", "messages", "prompt", "input"):
        raw = fields.get(name, _NULL)
        if name == "messages":
            raw = next(iter(_items.decode(raw) or ()), _NULL)
        beginning = bytes(memoryview(raw)[:_PREFIX])
        if beginning not in (b"null", b"[]", b'""'):
            return beginning
    return b""
