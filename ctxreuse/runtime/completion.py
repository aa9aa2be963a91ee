"""One answer being made: an iterator of pieces that keeps the KV when it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from ctxreuse.errors import EngineError
from ctxreuse.keys import Tokens
from ctxreuse.pauses import infer, tools_in
from ctxreuse.runtime.usage import Usage
from ctxreuse.why import Why

if TYPE_CHECKING:
    from ctxreuse.engines.base import Live
    from ctxreuse.engines.generate import Piece
    from ctxreuse.engines.sampling import Sampling
    from ctxreuse.pauses import Kind
    from ctxreuse.runtime.runtime import Runtime
    from ctxreuse.why import About

__all__ = ["Completion"]


class Completion:
    """Iterate to get the answer's pieces as they are made.

    Any thread may call; each piece goes to one caller, and ``close`` takes effect after the token in the making. When
    the iteration ends or is closed, the KV of what was processed is kept. ``text``, ``tokens`` (generated ids) and
    ``usage`` hold what there is so far; ``finish`` is None while more may come, then ``stop``, ``length``,
    ``stop_string``, ``cancelled`` or ``error``.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompt: Tokens,
        sampling: Sampling,
        branches: Sequence[int],
        lossy: str | None = None,
        about: About | None = None,
        was: Kind | None = None,
        parts: Sequence[int] = (),
    ) -> None:
        if runtime.text is None:
            raise EngineError("this engine has no tokenizer", fix="Give Runtime a TextModel as text=")
        self._runtime, self._prompt, self._sampling, self._branches = runtime, prompt, sampling, branches
        self._lossy, self._about, self._was, self._parts = lossy, about, was, parts
        self._text = runtime.text
        # Re-entrant, as the last piece closes. The context goes to the pool then: nobody may be inside it any more.
        self._lock = threading.RLock()
        self._closing = ""
        self._live: Live | None = None
        self._began, self._recorded = 0.0, -1
        self._pieces: Iterator[Piece] | None = None
        self._usage = Usage(len(prompt), 0, {})
        self.text = ""
        self.tokens: list[int] = []
        self.finish: str | None = None

    @property
    def usage(self) -> Usage:
        """What it cost so far; before the first piece only the prompt's length is known."""
        return msgspec.structs.replace(self._usage, completion_tokens=len(self.tokens))

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        with self._lock:
            return self._next()

    def _next(self) -> Piece:
        if self._closing:
            self.close(self._closing)
        if self.finish is not None:
            raise StopIteration
        try:
            if self._pieces is None:
                self._pieces = self._start()
            with self._runtime.compute:
                at = self._runtime.clock()
                piece = next(self._pieces, None)
                if self._runtime.cost is not None and self._live is not None and self.tokens:
                    # The first piece comes from the prompt's logits: nothing is computed for it.
                    self._runtime.cost.decode.observe(self._live.n, self._runtime.clock() - at)
        except BaseException:
            self.close("error")
            raise
        if piece is None:  # max_tokens is 0: the prompt was all that was wanted
            self.close("length")
            raise StopIteration
        self.tokens.append(piece.token)
        self.text += piece.text
        if piece.finish is not None:
            self.close(piece.finish)
        return piece

    def _start(self) -> Iterator[Piece]:
        from ctxreuse.engines.generate import generate

        runtime, sampling = self._runtime, self._sampling
        self._began = runtime.clock()
        runtime.waiting.begun(self._prompt, self._was)
        room = max(runtime.engine.space.max_tokens - len(self._prompt), 0)
        reserve = min(sampling.max_tokens, room)
        done = runtime.prefill(
            self._prompt,
            reserve=reserve,
            branches=self._branches,
            parts=self._parts,
            lossy=self._lossy,
            about=self._about,
        )
        self._live, self._usage, self._recorded = done.live, done.usage, done.recorded
        return generate(runtime.engine, self._text, done.live, done.logits, sampling)

    def why(self, *, others: bool = False) -> Why:
        """Why it reused what it did and no more: see `Runtime.why`. Raises SessionError before its first piece."""
        return self._runtime.why(self._usage.request or "-", others=others)

    def close(self, finish: str = "cancelled") -> None:
        """Stop here and keep the KV of what was processed; after an error nothing is kept. Idempotent."""
        # Said before the wait: a consumer in a tight loop would take the lock again and again.
        self._closing = self._closing or finish
        with self._lock:
            if self.finish is None:
                self._end(finish)

    def _end(self, finish: str) -> None:
        self.finish = finish
        live, self._live, self._pieces = self._live, None, None
        if live is not None and finish != "error":
            ids, nbytes = live.tokens.copy(), live.nbytes  # released, it may be another request's at once
            self._runtime.release(live, lossy=self._lossy)
            kind = infer(finish, tools_in(self.text), text=bool(self.text))
            self._runtime.waiting.paused(ids, kind, nbytes=nbytes, lossy=self._lossy)
        if self._runtime.recorder is not None and self._recorded >= 0:
            busy = self._runtime.clock() - self._began
            self._runtime.recorder.ended(self._recorded, output=len(self.tokens), busy=busy)
        if self._runtime.metrics is not None:
            self._runtime.metrics.record(self.usage, finish)
            for reason, tokens in self._runtime.requests.lacked(self._usage.request).items():
                self._runtime.metrics.add("ctxreuse_missed_tokens_total", tokens, reason)

    def drain(self) -> str:
        """Generate to the end and return the whole text."""
        for _ in self:
            pass
        return self.text
