"""The life of a request on one node.

1. A face turns messages into token ids and makes a `Request`: ids are checked, keys hashed once (`request.py`).
2. `Runtime.prefill` reports the prompt to the store's policy, waits for what another request is computing of the same
   prompt (`inflight/`), and asks other nodes for missing blocks (`runtime.py`, `fetch/fetch.py`).
3. `PromptPrefiller` takes the context that shares most from the engine's memory (`context_cache.py`), or decides from
   which stored prefix or state to continue (`checkpoints.py`), by predicted seconds.
4. The prefix is loaded (`load.py`), or fetched blocks are followed as they arrive: watched for speed (`fetch/watch.py`)
   and audited (`fetch/audit.py`).
5. Behind it, chunks that were computed at other positions are relocated if the quality gate admits them
   (`chunks/reuse.py`; chunks missing in the index: `chunks/backfill.py`). The rest is computed (`prefill.py`), in
   passes that requests share (`steps/`).
6. Reused tokens, and the reasons for misses, go into ``Usage`` and the request log; `Completion` generates the answer
   piece by piece (`completion.py`).
7. `Runtime.release` writes new blocks, states and the chunk index back (`writeback.py`, also refinements that arrive
   later) and leaves the context in the context cache.
8. Until the session's next request the context is paused: the learnt length of such pauses decides whose KV stays in
   memory and whose is read ahead (`paused.py`).

Faces use `RuntimeProtocol` (`protocol.py`); `RuntimeOptions` (`options.py`) has the settings.
"""

from ctxreuse.runtime.completion import Completion
from ctxreuse.runtime.options import RuntimeOptions
from ctxreuse.runtime.protocol import RuntimeProtocol
from ctxreuse.runtime.request import PrefillResult, PromptLike, Request
from ctxreuse.runtime.runtime import Runtime
from ctxreuse.usage import StepUsage, TokenUsage, Usage, UsageSeconds

__all__ = [
    "Completion",
    "PrefillResult",
    "PromptLike",
    "Request",
    "Runtime",
    "RuntimeOptions",
    "RuntimeProtocol",
    "StepUsage",
    "TokenUsage",
    "Usage",
    "UsageSeconds",
]
