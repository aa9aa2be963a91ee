"""The clouds of an edge as one `Verifier`: the first that decodes for a model with the edge's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from ctxreuse.bus.protocol.messages import Verdict, Verify
from ctxreuse.bus.protocol.verify import PendingVerify
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace

__all__ = ["CloudVerifiers", "VerifyingLink"]


class VerifyingLink(Protocol):
    """A link whose cloud may decode answers, such as `ctxreuse.bus.transport.BusClient`. Any thread may call."""

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def rtt(self) -> float | None: ...

    @property
    def verifies(self) -> Sequence[ModelSpace]:
        """The model spaces in which the cloud decodes answers."""

    def verify(self, request: Verify) -> PendingVerify:
        """Begin an answer; returns at once."""


class _Verification:
    """An answer over one link."""

    def __init__(self, link: VerifyingLink, answer: PendingVerify) -> None:
        self._link, self._answer, self.peer = link, answer, link.name

    @property
    def rtt(self) -> float:
        return self._link.rtt or 0.0

    @property
    def ended(self) -> str | None:
        return self._answer.ended

    @property
    def ready(self) -> bool:
        return self._answer.ready

    def take(self, timeout: float) -> Verdict | None:
        return self._answer.take(timeout)

    def draft(self, start: int, tokens: Tokens) -> None:
        self._answer.draft(start, tokens)

    def stop(self) -> None:
        self._answer.stop()


class CloudVerifiers:
    """A `Verifier` over links, the preferred one first. Any thread may call.

    ``trusted``: false for peers that are not to be asked any more, by name.
    """

    def __init__(self, links: Iterable[VerifyingLink], trusted: Callable[[str], bool] = lambda _: True) -> None:
        self._links, self._trusted = tuple(links), trusted

    def verify(self, space: ModelSpace, request: Verify) -> _Verification | None:
        """See `Verifier.verify`."""
        for link in self._links:
            if link.state != "up" or not self._trusted(link.name):
                continue
            for theirs in link.verifies:
                if (theirs.tokenizer, theirs.vocab_size) == (space.tokenizer, space.vocab_size):
                    message = msgspec.structs.replace(request, space=theirs.digest)
                    return _Verification(link, link.verify(message))
        return None
