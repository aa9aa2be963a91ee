"""The edge daemon: one process a device, sole owner of its store, with an OpenAI-compatible API for local programs."""
