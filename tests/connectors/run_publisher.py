"""vLLM's own publisher of KV events: ``python run_publisher.py OPTIONS`` in the environment that has vLLM.

A line is a list of events, [type, fields]; each is published as one batch.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    from vllm.distributed import kv_events

    publisher = kv_events.ZmqEventPublisher(0, **json.loads(sys.argv[1]))
    config = publisher.get_publisher_config()
    print("READY", json.dumps([config.endpoint, config.replay_endpoint]), flush=True)
    for line in sys.stdin:
        events = [getattr(kv_events, kind)(**fields) for kind, fields in json.loads(line)]
        publisher.publish(kv_events.KVEventBatch(ts=time.time(), events=events))
    publisher.shutdown()


if __name__ == "__main__":
    main()
