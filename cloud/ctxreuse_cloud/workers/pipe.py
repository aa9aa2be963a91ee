"""Messages between the node and its engine processes; payloads are token ids, keys, or a sealed block."""

from __future__ import annotations

import socket
from typing import TypeAlias

import msgspec

from ctxreuse.block.format import Kind
from ctxreuse.bus.protocol.messages import Verdict, Verify
from ctxreuse.config import EngineConfig, LogConfig
from ctxreuse.engines.process.pipe import FramePipe, Payload
from ctxreuse.identity.model import ModelSpace

__all__ = [
    "AuditDone",
    "AuditRequest",
    "Broken",
    "CancelJob",
    "DraftTokens",
    "Job",
    "JobEnded",
    "JobItem",
    "Message",
    "Open",
    "Payload",
    "Pipe",
    "Ready",
    "VerdictMade",
    "VerifyAnswer",
]


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Node: open this engine. ``store``: folder whose blocks need not be computed again; "": none."""

    engine: EngineConfig
    logs: LogConfig
    store: str = ""


class Job(msgspec.Struct, frozen=True, tag="job"):
    """Node: compute the complete blocks of these token ids (payload, int32) and send those from ``first`` on, then the
    state at their end where the model needs one. ``salt``: of their keys; the first ``audited`` may be read from
    the store."""

    job: int
    salt: bytes
    first: int
    audited: int


class CancelJob(msgspec.Struct, frozen=True, tag="cancel"):
    """Node: cancel this job."""

    job: int


class AuditRequest(msgspec.Struct, frozen=True, tag="audit"):
    """Node: audit a stored context from block ``first`` on, or the state at its end; see `audit_stored`.

    Payload: its ``count`` keys, then the sealed state if there is one.
    """

    number: int
    first: int
    count: int


class VerifyAnswer(msgspec.Struct, frozen=True, tag="verify"):
    """Node: decode this answer; payload: all tokens of its prompt, of which ``request`` has the first only. ``salt``
    and ``audited`` as in `Job`."""

    job: int
    salt: bytes
    audited: int
    request: Verify


class DraftTokens(msgspec.Struct, frozen=True, tag="draft"):
    """Node: an answer may go on so (payload, int32) after its first ``start`` tokens."""

    job: int
    start: int


class VerdictMade(msgspec.Struct, frozen=True, tag="verdict"):
    """Process: the next tokens of an answer. `JobEnded` follows the last."""

    job: int
    verdict: Verdict


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Process: the engine is open."""

    space: ModelSpace


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """Process: the engine cannot be opened; restarting does not help."""

    what: str


class JobItem(msgspec.Struct, frozen=True, tag="made"):
    """Process: block ``item`` of a job, or the state at its end; payload: sealed bytes."""

    job: int
    item: int
    kind: Kind


class JobEnded(msgspec.Struct, frozen=True, tag="ended"):
    """Process: a job ended; ``failed``: the reason, "" if it succeeded. ``tokens`` took ``seconds``."""

    job: int
    failed: str
    tokens: int
    seconds: float


class AuditDone(msgspec.Struct, frozen=True, tag="audited"):
    """Process: the result of an audit; None: nothing can be said. ``failed``: why it could not be run."""

    number: int
    sound: bool | None
    failed: str = ""


Message: TypeAlias = (
    Open | Job | CancelJob | AuditRequest | VerifyAnswer | DraftTokens | Ready | Broken | JobItem | JobEnded | AuditDone
    | VerdictMade
)  # fmt: skip

_decoder = msgspec.msgpack.Decoder(Message)


class Pipe(FramePipe[Message]):
    """One end of the socket pair. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end, _decoder)
