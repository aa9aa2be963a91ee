"""All metrics: name, kind, meaning, labels and the values that each label may have.

Names start with ``ctxreuse_``, units are base units (seconds, bytes, tokens).
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LEVELS", "METRICS", "RENAMED", "ROUTES", "SOURCES", "Label", "Metric"]

#: Sources of prompt tokens, nearest first; ``compute``: prefilled.
SOURCES = ("device", "host", "disk", "edge", "cloud", "compute")

#: Routes that HTTP requests are counted by; never the path, which a client chooses.
ROUTES = ("chat", "completions", "models", "contexts", "api", "probes")


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAPS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_SPEEDS = (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 50.0, 75.0, 100.0, 150.0, 200.0, 300.0, 500.0, 1000.0)
_PREFILL_SPEEDS = (10.0, 30.0, 100.0, 200.0, 300.0, 500.0, 1e3, 2e3, 3e3, 5e3, 1e4, 2e4, 5e4)


class Label(NamedTuple):
    """One label and its values; any other value becomes ``other``."""

    name: str
    values: tuple[str, ...]


class Metric(NamedTuple):
    """One row: ``kind`` is counter, gauge or histogram, with these ``buckets``."""

    name: str
    kind: str
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = _SECONDS


# Reasons as counted by the store: see StoreStats.
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
        "unaudited",
        "slow",
        "level",
        "card",
        "state",
        "new",
        "evicted",
        "dropped",
        "refused",
        "disk",
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
#: Kinds of levels; see `level_label`.
LEVELS = ("exact", "packed", "lossy", "approx")
_LEVEL = Label("level", LEVELS)
_FROM, _TO = Label("from", LEVELS), Label("to", LEVELS)
_HEAP = Label("state", ("used", "kept"))
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
_REJECTION = Label("reason", ("corrupt", "audit", "foreign", "full", "orphan", "unwanted"))
_PROFILE = Label("what", ("taken", "refused"))
_PRIORITY = Label("priority", ("interactive", "normal", "background"))
_DRAFT = Label("verdict", ("accepted", "rejected"))
_DRAFT_SHORT = Label("reason", ("match", "cost", "lost", "unknown", "grammar", "end"))
_VERIFIED = Label(
    "verification",
    ("cloud", "steps", "cut", "stalled", "down", "busy", "drain", "failed", "tokens", "space", "judge", "cancelled"),
)
_STEP = Label("verdict", ("accepted", "rewritten", "unjudged"))
_EXIT = Label("verdict", ("agreed", "disagreed", "unverified"))
_EXIT_REFUSED = Label(
    "reason",
    ("unknown", "worthless", "spent", "score", "pending", "batch", "draft", "sampled", "grammar", "logprobs", "callers",
     "engine"),
)  # fmt: skip
_NET = Label("verdict", ("saved", "lost"))
_HINT = Label("outcome", ("accepted", "version", "type", "payload", "target"))
_PREFILL = Label("how", ("computed", "shared"))

_CURRENT = (
    # requests
    Metric("ctxreuse_requests_total", "counter", "Requests that finished.", (_FINISH,)),
    Metric("ctxreuse_prompt_tokens_total", "counter", "Prompt tokens by source of their KV.", (_SOURCE,)),
    Metric("ctxreuse_reused_tokens_total", "counter", "Prompt tokens reused, by encoding of their KV.", (_LEVEL,)),
    Metric("ctxreuse_relocated_tokens_total", "counter", "Prompt tokens whose KV was relocated from another position."),
    Metric("ctxreuse_recomputed_tokens_total", "counter", "Relocated tokens that were recomputed."),
    Metric(
        "ctxreuse_chunk_reuse_requests_total",
        "counter",
        "Prompts with chunks to relocate, by verdict of the quality gate.",
        (_VERDICT,),
    ),
    Metric("ctxreuse_completion_tokens_total", "counter", "Tokens generated."),
    Metric("ctxreuse_draft_tokens_total", "counter", "Tokens of drafts that were checked, by verdict.", (_DRAFT,)),
    Metric(
        "ctxreuse_model_draft_tokens_total",
        "counter",
        "Of these, tokens that a draft model drafted, by verdict.",
        (_DRAFT,),
    ),
    Metric(
        "ctxreuse_draft_seconds_total",
        "counter",
        "Seconds that drafts of answers saved, and those that they cost where they were wrong.",
        (_NET,),
    ),
    Metric(
        "ctxreuse_draft_short_passes_total",
        "counter",
        "Passes of an answer whose draft was short or missing, by reason.",
        (_DRAFT_SHORT,),
    ),
    Metric("ctxreuse_verified_tokens_total", "counter", "Tokens of answers that a cloud's model said."),
    Metric(
        "ctxreuse_verified_answers_total",
        "counter",
        "Answers that a cloud's model was to give: those it gave, and why others were decoded here in the end.",
        (_VERIFIED,),
    ),
    Metric(
        "ctxreuse_judged_steps_total", "counter", "Steps of answers, by what a cloud's model made of them.", (_STEP,)
    ),
    Metric("ctxreuse_draft_memory_bytes", "gauge", "Bytes of the texts that answers are drafted from."),
    Metric("ctxreuse_exit_tokens_total", "counter", "Tokens that left the model early, by verdict.", (_EXIT,)),
    Metric(
        "ctxreuse_exit_seconds_total", "counter", "Seconds that early exits saved, and those that they cost.", (_NET,)
    ),
    Metric(
        "ctxreuse_exit_refused_tokens_total",
        "counter",
        "Tokens, or whole answers, that could not leave the model early, by reason.",
        (_EXIT_REFUSED,),
    ),
    Metric("ctxreuse_misses_total", "counter", "Requests whose reuse ended early, by reason.", (_MISSES,)),
    Metric(
        "ctxreuse_missed_tokens_total",
        "counter",
        "Tokens of complete blocks that were computed, by reason of the miss.",
        (_MISSES,),
    ),
    Metric("ctxreuse_load_seconds", "histogram", "Seconds to load reused KV into the engine."),
    Metric("ctxreuse_prefill_seconds", "histogram", "Seconds to compute the rest of the prompt."),
    Metric(
        "ctxreuse_reuse_seconds_total",
        "counter",
        "Predicted seconds of computing what was reused, less those of loading and fetching it: saved, or lost.",
        (_NET,),
    ),
    Metric(
        "ctxreuse_inter_token_seconds",
        "histogram",
        "Seconds between two tokens of an answer; tokens of one pass share its time.",
        buckets=_GAPS,
    ),
    Metric(
        "ctxreuse_generation_tokens_per_second",
        "histogram",
        "Tokens a second of an answer, from its first to its last.",
        buckets=_SPEEDS,
    ),
    Metric(
        "ctxreuse_prefill_tokens_per_second",
        "histogram",
        "Prompt tokens computed a second, of requests that computed any.",
        buckets=_PREFILL_SPEEDS,
    ),
    # the scheduler
    Metric("ctxreuse_scheduler_waiting_contexts", "gauge", "Contexts that wait for a pass of the engine."),
    Metric("ctxreuse_scheduler_admission_requests", "gauge", "Requests that wait for memory for their context."),
    Metric("ctxreuse_scheduler_passes_total", "counter", "Passes of the engine."),
    Metric(
        "ctxreuse_scheduler_pass_contexts_total",
        "counter",
        "Contexts in these passes together; divided by the passes, the batch size.",
    ),
    Metric(
        "ctxreuse_scheduler_stalled_passes_total",
        "counter",
        "Passes in which a prefill made others' tokens wait for more than three of their steps.",
    ),
    Metric(
        "ctxreuse_scheduler_started_requests_total",
        "counter",
        "Requests that had their first pass, by priority.",
        (_PRIORITY,),
    ),
    Metric(
        "ctxreuse_scheduler_wait_seconds_total",
        "counter",
        "Seconds that these requests had waited, by priority.",
        (_PRIORITY,),
    ),
    Metric(
        "ctxreuse_inflight_followers_total",
        "counter",
        "Requests that took blocks of another one that was computing or answering.",
    ),
    Metric("ctxreuse_inflight_tokens_total", "counter", "Prompt tokens that they took, and did not compute."),
    # contexts in an engine's memory
    Metric(
        "ctxreuse_resident_contexts",
        "gauge",
        "Contexts kept between requests, by the worst level of their KV.",
        (_LEVEL,),
    ),
    Metric("ctxreuse_resident_tokens", "gauge", "Tokens of these contexts.", (_LEVEL,)),
    # stores
    Metric("ctxreuse_store_bytes", "gauge", "Bytes of KV stored, by tier.", (_TIER,)),
    Metric("ctxreuse_store_capacity_bytes", "gauge", "Capacity for KV in bytes, by tier.", (_TIER,)),
    Metric("ctxreuse_store_blocks", "gauge", "Blocks stored, by tier.", (_TIER,)),
    Metric("ctxreuse_store_evicted_blocks_total", "counter", "Entries evicted to make room."),
    Metric("ctxreuse_store_level_blocks", "gauge", "Blocks stored, by encoding.", (_LEVEL,)),
    Metric(
        "ctxreuse_store_recompressed_blocks_total",
        "counter",
        "Entries re-encoded at a smaller level to make room.",
        (_FROM, _TO),
    ),
    Metric(
        "ctxreuse_store_refused_puts_total", "counter", "Blocks that the store did not accept, by reason.", (_REFUSALS,)
    ),
    Metric(
        "ctxreuse_store_disk_refused_puts_total",
        "counter",
        "Blocks that the disk did not take, by reason; memory may have kept them.",
        (_REFUSALS,),
    ),
    Metric("ctxreuse_store_failing", "gauge", "1 while the disk is full or fails to write."),
    Metric("ctxreuse_store_unwritten_bytes", "gauge", "Bytes of KV in memory that the disk could not take yet."),
    Metric("ctxreuse_policy_leading", "gauge", "1 for the eviction policy in use.", (_POLICY,)),
    Metric("ctxreuse_policy_switches_total", "counter", "Changes of the eviction policy in use."),
    Metric("ctxreuse_policy_lookup_tokens_total", "counter", "Prompt tokens that eviction policies were compared on."),
    Metric(
        "ctxreuse_policy_hit_tokens_total",
        "counter",
        "Of these, the tokens that each simulated policy had cached, and the store itself (real).",
        (_POLICY,),
    ),
    Metric(
        "ctxreuse_policy_weight",
        "gauge",
        "Weight of each policy, and of following none, in the regret bound.",
        (_POLICY,),
    ),
    Metric("ctxreuse_store_corrupt_blocks_total", "counter", "Entries dropped because a check failed."),
    # daemons
    Metric("ctxreuse_http_requests_total", "counter", "HTTP requests, by route and status class.", (_ROUTE, _CLASS)),
    Metric("ctxreuse_http_waiting_requests", "gauge", "Requests queued or running."),
    Metric("ctxreuse_first_token_seconds", "histogram", "Seconds from a request's arrival to its first token."),
    Metric(
        "ctxreuse_heap_bytes",
        "gauge",
        "Bytes of native memory that are in use, and freed ones that the C library keeps for later.",
        (_HEAP,),
    ),
    Metric("ctxreuse_python_blocks", "gauge", "Pieces of memory that Python's objects are in."),
    # pauses
    Metric("ctxreuse_paused_contexts", "gauge", "Contexts between two requests."),
    Metric("ctxreuse_demoted_bytes_total", "counter", "Bytes of KV of paused contexts dropped from memory."),
    Metric("ctxreuse_prefetched_bytes_total", "counter", "Bytes of KV read from disk before their context resumed."),
    Metric("ctxreuse_prefetched_returns_total", "counter", "Contexts that resumed after their KV had been prefetched."),
    Metric("ctxreuse_kv_hints_total", "counter", "Actions of KV hints, taken or ignored and why.", (_HINT,)),
    # the link
    Metric("ctxreuse_links", "gauge", "Links to other nodes, by state.", (_STATE,)),
    Metric("ctxreuse_link_rtt_seconds", "gauge", "Round-trip time of the best link that is up."),
    Metric("ctxreuse_link_bytes_per_second", "gauge", "Estimated bandwidth of the best link that is up."),
    Metric("ctxreuse_link_bytes_total", "counter", "Bytes on all links.", (_DIRECTION,)),
    Metric("ctxreuse_link_reconnects_total", "counter", "Reconnections of links."),
    Metric("ctxreuse_transfer_resumes_total", "counter", "Transfers resumed after a lost connection."),
    Metric("ctxreuse_transfer_duplicate_bytes_total", "counter", "Bytes received more than once."),
    Metric("ctxreuse_sent_blocks_total", "counter", "Blocks sent through the encoder, by level.", (_LEVEL,)),
    Metric("ctxreuse_link_saved_bytes_total", "counter", "Bytes saved on links by compressed blocks."),
    Metric(
        "ctxreuse_calibration_profiles_total",
        "counter",
        "Calibration profiles received over links, and rejected ones.",
        (_PROFILE,),
    ),
    Metric("ctxreuse_peers_quarantined", "gauge", "Peers in quarantine."),
    Metric("ctxreuse_served_blocks_total", "counter", "Blocks sent to peers."),
    Metric("ctxreuse_received_blocks_total", "counter", "Blocks received from peers and stored."),
    Metric(
        "ctxreuse_received_rejected_blocks_total",
        "counter",
        "Blocks received from peers and rejected, by reason.",
        (_REJECTION,),
    ),
    Metric(
        "ctxreuse_prefills_total",
        "counter",
        "Prefills that peers requested: computed, or shared with one under way.",
        (_PREFILL,),
    ),
    Metric("ctxreuse_sync_blocks_total", "counter", "Blocks that sync sent to clouds."),
    # decisions
    Metric("ctxreuse_decisions_total", "counter", "Spans of prompts, by how their KV was obtained.", (_CHOICE,)),
    Metric("ctxreuse_decision_predicted_seconds_total", "counter", "Predicted seconds of these decisions.", (_CHOICE,)),
    Metric("ctxreuse_decision_real_seconds_total", "counter", "Measured seconds of these decisions.", (_CHOICE,)),
)

#: Metrics that had another name in version 0.1.0; both are exported for one version.
RENAMED = {
    "ctxreuse_calibration_profiles_total": "ctxreuse_cards_total",
    "ctxreuse_chunk_reuse_requests_total": "ctxreuse_gated_requests_total",
    "ctxreuse_policy_lookup_tokens_total": "ctxreuse_policy_asked_tokens_total",
    "ctxreuse_received_blocks_total": "ctxreuse_taken_blocks_total",
    "ctxreuse_received_rejected_blocks_total": "ctxreuse_given_refused_blocks_total",
    "ctxreuse_recomputed_tokens_total": "ctxreuse_mended_tokens_total",
    "ctxreuse_relocated_tokens_total": "ctxreuse_moved_tokens_total",
    "ctxreuse_store_recompressed_blocks_total": "ctxreuse_store_demoted_blocks_total",
}

METRICS = _CURRENT + tuple(
    row._replace(name=RENAMED[row.name], help=f"Deprecated: see {row.name}.") for row in _CURRENT if row.name in RENAMED
)
