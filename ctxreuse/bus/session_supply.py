"""What a peer asks for, opened: as it is held, or encoded for it; and the models that it has described."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from ctxreuse.bus import wire
from ctxreuse.bus.base import Grant, Packs, Service, Supply
from ctxreuse.bus.transfer import SendOrder
from ctxreuse.errors import CtxReuseError
from ctxreuse.model import ModelSpace

__all__ = ["Opened", "described", "opened", "packer_of"]

_decoder = msgspec.msgpack.Decoder(ModelSpace)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, CtxReuseError, ValueError)


class Opened(NamedTuple):
    """Items and the order to send them in; the ``first`` so many go before all others, with ``state`` the last of those
    is a state."""

    supply: Supply
    order: SendOrder
    state: bool
    first: int


def packer_of(service: Service) -> Packs | None:
    """What encodes for the peers of ``service``, if it has something that does."""
    packer: Packs | None = getattr(service, "packer", None)
    return packer


def described(hello: wire.Hello) -> dict[bytes, ModelSpace]:
    """Spaces by digest. What cannot be read, or is none of the hello's spaces, is left out: its blocks go out exact.

    A description that hashes to the digest is that of the space, whoever says it.
    """
    found = {}
    for data in hello.models:
        try:
            space = _decoder.decode(data)
            digest = space.digest
        except _UNREADABLE:
            continue
        if digest in hello.spaces:
            found[digest] = space
    return found


def opened(
    service: Service,
    grant: Grant,
    models: Mapping[bytes, ModelSpace],
    message: wire.Fetch | wire.Prefill | wire.FetchCard,
) -> Opened:
    """Open what ``message`` asks for. Raises LookupError if it is not held, LinkRefusedError if it is not served."""
    model, packer = models.get(message.space), packer_of(service)
    if isinstance(message, wire.FetchCard):
        if model is None or packer is None:
            raise LookupError("no card")
        return Opened(packer.card(model, message.digest), "front", False, 1)
    order: SendOrder = "front"
    if isinstance(message, wire.Fetch):
        keys, order = wire.split(message.keys), message.order
        supply = service.supply(grant.tenant, message.space, keys, state=message.state)
    else:
        ids, first = np.frombuffer(message.tokens, "<i4"), message.first
        supply = service.prefill(grant.tenant, message.space, ids, first=first, state=message.state)
    count = supply.count
    if message.wish.levels and packer is not None and model is not None:
        try:
            supply = packer.supply(supply, model, message.wish, order=order, state=message.state, have=message.have)
        except BaseException:
            supply.close()
            raise
    return Opened(supply, order, message.state, count)
