"""What the page of a device's daemon shows: requests, sessions, contexts, the batch, links and decisions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import ctxreuse
from ctxreuse.daemon.page.feed import Feed, Panels, Rows
from ctxreuse.daemon.page.panels import KnownUse, StorePanels, block_id, shown_text
from ctxreuse.metrics import SOURCES
from ctxreuse_edge.contexts import RESPONSES

if TYPE_CHECKING:
    from ctxreuse.identity.keys import Tokens
    from ctxreuse.why.records import LoggedEntry
    from ctxreuse_edge.node import EdgeNode

__all__ = ["EdgePanels", "edge_feed"]

#: Rows of each panel, and requests whose contexts are named in the tree.
_REQUESTS, _SESSIONS, _ANSWERS, _CHATS, _DECISIONS, _USES, _RESIDENT = 64, 64, 16, 64, 200, 512, 64
#: Tokens and letters of a text that are shown where texts may be.
_TOKENS, _LETTERS = 64, 200
_FINISHES = ("stop", "length", "stop_string", "cancelled", "error")


def edge_feed(node: EdgeNode, ended: Callable[[], bool]) -> Feed:
    """Return the feed of a device's daemon, for one that may not be open yet."""
    panels = EdgePanels(node)
    return Feed(panels.all(), idle=panels.of_store.close, ended=ended)


class EdgePanels:
    """The panels of a device's daemon; one thread at a time. All texts are those of callers."""

    def __init__(self, node: EdgeNode) -> None:
        self._node = node
        self.of_store = StorePanels(lambda: node.store, self._uses, self._resident)

    def all(self) -> Panels:
        """What makes each panel."""
        return {
            **self.of_store.all(),
            "daemon": self.daemon,
            "tokens": self.tokens,
            "running": self.running,
            "sessions": self.sessions,
            "chats": self.chats,
            "requests": self.requests,
            "links": lambda: Rows(self._node.links.rows()),
            "decisions": self.decisions,
        }

    def daemon(self) -> dict[str, Any]:
        """What it is, and what it serves."""
        node = self._node
        models = [
            [one.name.id, "up" if one.loaded else "unloaded", one.child.failing if one.child is not None else ""]
            for one in node.models.served
        ]
        return {
            "kind": "edge",
            "version": ctxreuse.__version__,
            "pid": os.getpid(),
            "since": round(node.since, 1),
            "models": models,
            "block": node.runtime.space.block_tokens,
            "texts": self._texts,
            "failing": node.failing,
        }

    @property
    def _texts(self) -> bool:
        return self._node.settings.edge.page_texts

    def tokens(self) -> dict[str, Any]:
        """Totals since the start: tokens by source, seconds, answers, and the gaps between tokens by their length."""
        read, buckets = self._node.metrics.read, self._node.metrics.buckets
        return {
            "sources": {source: int(read("ctxreuse_prompt_tokens_total", source)) for source in SOURCES},
            "generated": int(read("ctxreuse_completion_tokens_total")),
            "drafted": [int(read("ctxreuse_draft_tokens_total", verdict)) for verdict in ("accepted", "rejected")],
            "saved": round(read("ctxreuse_reuse_seconds_total", "saved"), 3),
            "lost": round(read("ctxreuse_reuse_seconds_total", "lost"), 3),
            "computing": round(read("ctxreuse_prefill_seconds"), 3),
            "requests": {finish: int(read("ctxreuse_requests_total", finish)) for finish in _FINISHES},
            "gaps": [[limit if limit < 1e9 else None, n] for limit, n in buckets("ctxreuse_inter_token_seconds")],
            "first": [[limit if limit < 1e9 else None, n] for limit, n in buckets("ctxreuse_first_token_seconds")],
        }

    def running(self) -> dict[str, Any]:
        """The answers that run, the queue, and the passes of the first model's engine."""
        node, runtime = self._node, self._node.runtime
        steps, cache = runtime.steps.stats(), runtime.context_cache
        answers = []
        for one in sorted(node.pool.answers, key=lambda one: one.since)[:_ANSWERS]:
            pieces = list(one.completions)
            usage = pieces[0].usage if pieces else None
            prompt, cached = (usage.tokens.prompt, usage.tokens.cached) if usage is not None else (0, 0)
            name = usage.request if usage is not None else ""
            answers.append([name, round(one.since, 1), prompt, cached, sum(len(piece.tokens) for piece in pieces)])
        return {
            "answers": answers,
            "active": node.pool.active,
            "queued": node.pool.waiting,
            "limit": node.settings.edge.max_waiting,
            "waiting": steps.waiting,
            "admission": runtime.admission.waiting if runtime.admission is not None else 0,
            "passes": [steps.passes, steps.contexts, steps.stalled],
            "resident": [len(cache), cache.nbytes, cache.capacity],
        }

    def _uses(self) -> Sequence[KnownUse]:
        entries = self._node.runtime.requests.entries()[-_USES:]
        return [KnownUse(one.at, one.session or one.request, one.keys) for one in reversed(entries)]

    def _resident(self) -> Iterable[Sequence[bytes]]:
        runtime = self._node.runtime
        return [runtime.keys(ids) for ids in runtime.context_cache.tokens()[-_RESIDENT:] if len(ids)]

    def requests(self) -> Rows:
        """The last requests: when, session, tokens, reused, by source, why the rest was not, the row of the contexts
        in which it ends, the id of its last block, and the end of the prompt if texts may be shown."""
        found = Rows()
        for one in self._node.runtime.requests.entries()[-_REQUESTS:]:
            sources = {name: count for name, count in one.by_source.items() if count}
            run, end = self.of_store.run_of(one.keys), block_id(one.keys[-8:]) if one.keys else ""
            row = [round(one.at, 2), shown_text(one.session), one.tokens, one.cached, sources, one.why, run, end]
            found[one.request] = [*row, self._prompt(one) if self._texts else ""]
        return found

    def _prompt(self, entry: LoggedEntry) -> str:
        """The end of a prompt's text, without its answer; "" where texts are not kept."""
        model = self._node.runtime.text
        if model is None or not entry.ids or entry.space != self._node.runtime.space.digest:
            return ""
        ids: Tokens = np.asarray(entry.numbers[: entry.tokens][-_TOKENS:], "<i4")
        return shown_text(model.decode(ids)[-_LETTERS:], _LETTERS)

    def sessions(self) -> Rows:
        """Named contexts, last changed first: name, turns, the session it was forked from and at which turn, when made
        and changed, whether pinned, namespace, and the last turn if texts may be shown."""
        ledger, pinned = self._node.ledger, self._node.contexts.pinned
        found = Rows()
        for one in ledger.sessions(_SESSIONS, beside=RESPONSES):
            turn = ledger.turn(one.head) if one.head else None
            text = shown_text(turn.content, _LETTERS) if turn is not None and self._texts else ""
            found[one.id] = [
                shown_text(one.name), turn.depth if turn is not None else 0, one.origin or "", one.forked_at,
                round(one.created, 1), round(one.updated, 1), one.id in pinned, shown_text(one.namespace), text,
            ]  # fmt: skip
        return found

    def chats(self) -> Rows:
        """Conversations that may go on: tokens, bytes in memory at their last pause, what they wait for, since when,
        and the id of their last block."""
        runtime = self._node.runtime
        offset = time.time() - runtime.clock()
        newest = sorted(runtime.paused.contexts(), key=lambda one: -one.since)[:_CHATS]
        found = Rows()
        for one in newest:
            since = round(one.since + offset)
            found[str(one.number)] = [one.tokens, one.nbytes, one.stop, one.tool, since, block_id(one.tip)]
        return found

    def decisions(self) -> Rows:
        """The last decisions: the way decided and taken, tokens, predicted and real seconds, and the peer."""
        return Rows(
            (str(number), [one.way, one.took, one.tokens, one.predicted, round(one.real, 6), shown_text(one.peer)])
            for number, one in self._node.links.cost.log.numbered()[-_DECISIONS:]
        )
