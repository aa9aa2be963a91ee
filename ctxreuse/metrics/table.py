"""The table of all metrics: names, kinds, what they mean, and every value that a label may have.

Names start with ``ctxreuse_``, units are base units (seconds, bytes, tokens).
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["METRICS", "ROUTES", "SOURCES", "Label", "Metric"]

#: Where a prompt's tokens came from, nearest first; ``compute`` means that they were prefilled.
SOURCES = ("device", "host", "disk", "edge", "cloud", "compute")

#: What requests are counted by: never the path itself, which a client makes up.
ROUTES = ("chat", "completions", "models", "contexts", "api", "probes")


class Label(NamedTuple):
    """One label and the values that it takes; any other becomes ``other``."""

    name: str
    values: tuple[str, ...]


class Metric(NamedTuple):
    """One row: ``kind`` is counter, gauge or histogram."""

    name: str
    kind: str
    help: str
    labels: tuple[Label, ...] = ()


# The words that a store counts with: see StoreStats.
_MISSES = Label(
    "reason",
    (
        "absent",
        "corrupt",
        "truncated",
        "foreign",
        "older",
        "newer",
        "space",
        "tokens",
        "unreadable",
        "no store",
        "link",
        "audit",
        "slow",
        "level",
        "card",
        "state",
        "new",
        "evicted",
        "dropped",
        "refused",
        "lost",
        "running",
        "gate",
        "probe",
    ),
)
_REFUSALS = Label(
    "reason",
    ("queue_full", "orphan", "too_big", "no_room", "declined", "malformed", "disk", "backoff", "readonly", "closed"),
)
_KEPT = ("exact", "packed", "lossy", "approx")
_LEVEL = Label("level", _KEPT)
_FROM, _TO = Label("from", _KEPT), Label("to", _KEPT)
_POLICY = Label("policy", ("lru", "lfu", "s3fifo", "arc", "gdsf", "hazard", "pauses", "swift", "real"))
_TIER = Label("tier", ("device", "host", "disk"))
_SOURCE = Label("source", SOURCES)
_FINISH = Label("finish", ("stop", "length", "stop_string", "cancelled", "error"))
_ROUTE = Label("route", ROUTES)
_CLASS = Label("class", ("2xx", "3xx", "4xx", "5xx"))
_STATE = Label("state", ("down", "up", "refused"))
_VERDICT = Label("verdict", ("allowed", "exceeded", "refused"))
_DIRECTION = Label("direction", ("in", "out"))
_CHOICE = Label("choice", ("recompute", "load", "layers", "tail"))
_UNFIT = Label("reason", ("corrupt", "audit", "foreign", "full", "orphan", "unwanted"))
_CARD = Label("what", ("taken", "refused"))
_MADE = Label("how", ("computed", "shared"))

METRICS = (
    # requests
    Metric("ctxreuse_requests_total", "counter", "Requests that finished.", (_FINISH,)),
    Metric("ctxreuse_prompt_tokens_total", "counter", "Prompt tokens by where their KV came from.", (_SOURCE,)),
    Metric("ctxreuse_reused_tokens_total", "counter", "Prompt tokens reused, by how their KV was kept.", (_LEVEL,)),
    Metric("ctxreuse_moved_tokens_total", "counter", "Prompt tokens reused at another position."),
    Metric("ctxreuse_mended_tokens_total", "counter", "Moved tokens that were computed again."),
    Metric("ctxreuse_gated_requests_total", "counter", "Prompts with chunks to move, by verdict.", (_VERDICT,)),
    Metric("ctxreuse_completion_tokens_total", "counter", "Tokens generated."),
    Metric("ctxreuse_misses_total", "counter", "Requests whose reuse ended early, by reason.", (_MISSES,)),
    Metric("ctxreuse_missed_tokens_total", "counter", "Tokens of whole blocks computed, by reason.", (_MISSES,)),
    Metric("ctxreuse_load_seconds", "histogram", "Time to bring reused KV into the engine."),
    Metric("ctxreuse_prefill_seconds", "histogram", "Time to compute the rest of the prompt."),
    # stores
    Metric("ctxreuse_store_bytes", "gauge", "Bytes of KV held, by tier.", (_TIER,)),
    Metric("ctxreuse_store_capacity_bytes", "gauge", "Bytes of KV allowed, by tier.", (_TIER,)),
    Metric("ctxreuse_store_blocks", "gauge", "Blocks held, by tier.", (_TIER,)),
    Metric("ctxreuse_store_evicted_blocks_total", "counter", "Entries evicted to make room."),
    Metric("ctxreuse_store_level_blocks", "gauge", "Blocks held, by how they are encoded.", (_LEVEL,)),
    Metric("ctxreuse_store_demoted_blocks_total", "counter", "Entries encoded smaller to make room.", (_FROM, _TO)),
    Metric("ctxreuse_store_refused_puts_total", "counter", "Blocks offered and not kept.", (_REFUSALS,)),
    Metric("ctxreuse_policy_leading", "gauge", "1 for the eviction policy that the store follows.", (_POLICY,)),
    Metric("ctxreuse_policy_switches_total", "counter", "Times that the store followed another eviction policy."),
    Metric("ctxreuse_policy_asked_tokens_total", "counter", "Tokens of the prompts that the policies competed for."),
    Metric(
        "ctxreuse_policy_hit_tokens_total",
        "counter",
        "Tokens of them that each policy's shadow held, and the store itself (real).",
        (_POLICY,),
    ),
    Metric("ctxreuse_policy_weight", "gauge", "The guard's trust in each policy and in the free choice.", (_POLICY,)),
    Metric("ctxreuse_store_corrupt_blocks_total", "counter", "Entries dropped because a check failed."),
    # daemons
    Metric("ctxreuse_http_requests_total", "counter", "HTTP requests by route and class of status.", (_ROUTE, _CLASS)),
    Metric("ctxreuse_http_waiting_requests", "gauge", "Requests that wait or run."),
    Metric("ctxreuse_first_token_seconds", "histogram", "From a request's arrival to its first token."),
    # pauses
    Metric("ctxreuse_paused_contexts", "gauge", "Contexts known between requests."),
    Metric("ctxreuse_demoted_bytes_total", "counter", "KV let go of in memory while its context waits."),
    Metric("ctxreuse_prefetched_bytes_total", "counter", "KV read from the disk before its context returned."),
    Metric("ctxreuse_prefetched_returns_total", "counter", "Contexts that returned after they had been read ahead."),
    # the link
    Metric("ctxreuse_links", "gauge", "Links to other nodes, by state.", (_STATE,)),
    Metric("ctxreuse_link_rtt_seconds", "gauge", "Round trip of the best link that is up."),
    Metric("ctxreuse_link_bytes_per_second", "gauge", "Estimated bandwidth of the best link that is up."),
    Metric("ctxreuse_link_bytes_total", "counter", "Bytes on all links.", (_DIRECTION,)),
    Metric("ctxreuse_link_reconnects_total", "counter", "Times that a link came up again."),
    Metric("ctxreuse_transfer_resumes_total", "counter", "Transfers that went on after a cut."),
    Metric("ctxreuse_transfer_duplicate_bytes_total", "counter", "Bytes received that were here already."),
    Metric("ctxreuse_sent_blocks_total", "counter", "Blocks sent through the encoder, by level.", (_LEVEL,)),
    Metric("ctxreuse_link_saved_bytes_total", "counter", "Bytes that packed and lossy blocks spared the links."),
    Metric("ctxreuse_cards_total", "counter", "Cards that links brought, and that were refused.", (_CARD,)),
    Metric("ctxreuse_peers_quarantined", "gauge", "Peers that are shut out now for what they sent."),
    Metric("ctxreuse_served_blocks_total", "counter", "Blocks that peers were served with."),
    Metric("ctxreuse_taken_blocks_total", "counter", "Blocks that peers gave and that were taken."),
    Metric("ctxreuse_given_refused_blocks_total", "counter", "Blocks that peers gave and that were not.", (_UNFIT,)),
    Metric("ctxreuse_prefills_total", "counter", "Contexts that peers wanted computed, by how.", (_MADE,)),
    Metric("ctxreuse_sync_blocks_total", "counter", "Blocks given to clouds."),
    # decisions
    Metric("ctxreuse_decisions_total", "counter", "How spans of prompts were got.", (_CHOICE,)),
    Metric("ctxreuse_decision_predicted_seconds_total", "counter", "Time foretold for them.", (_CHOICE,)),
    Metric("ctxreuse_decision_real_seconds_total", "counter", "Time that they took.", (_CHOICE,)),
)
