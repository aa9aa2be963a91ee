"""The passes of one engine, shared by all requests: who is in the next one, and how much of a prefill goes with it."""
