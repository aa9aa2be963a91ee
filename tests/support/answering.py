"""A `DraftVerifier` over an engine of this process, in a thread of its own, which a test can end in mid-answer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

from ctxreuse.bus.protocol.messages import Verify
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace
from ctxreuse.peer.serve.checker import AnswerChecker
from ctxreuse.peer.serve.verify import VerdictSink


class _Answering:
    def __init__(self, owner: ThreadedVerifier, number: int) -> None:
        self._owner, self._number = owner, number

    def draft(self, start: int, tokens: Tokens) -> None:
        self._owner.call(lambda: self._owner.checker.draft(self._number, start, tokens))

    def cancel(self) -> None:
        self._owner.call(lambda: self._owner.checker.close(self._number))


class ThreadedVerifier:
    """``passes``: how many it runs before it dies (None: any)."""

    def __init__(self, engine: Any, store: Any = None, passes: int | None = None) -> None:
        self.engine, self.checker, self.passes = engine, AnswerChecker(engine, store), passes
        self._numbers = itertools.count(1)
        self._sinks: dict[int, VerdictSink] = {}
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def call(self, work: Any) -> None:
        with self._change:
            work()
            self._change.notify_all()

    def verifies(self) -> Sequence[ModelSpace]:
        return [self.engine.space]

    def verify(self, salt: bytes, request: Verify, audited: int, sink: VerdictSink) -> _Answering | None:
        number = next(self._numbers)
        self._sinks[number] = sink
        self.call(lambda: self.checker.open(number, salt, request, audited))
        return _Answering(self, number)

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or self.checker.busy)
                if self._closed:
                    return
                if self.passes is not None:
                    self.passes -= 1
                dead = self.passes is not None and self.passes < 0
                found = [] if dead else self.checker.step()
            if dead:
                for sink in self._sinks.values():
                    sink.end("the engine process died")
                return
            for number, verdict, ended, failed in found:
                if verdict is not None:
                    self._sinks[number].verdict(verdict)
                if ended:
                    self._sinks[number].end(failed)

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join()
