"""A context's KV in the engine's memory."""
