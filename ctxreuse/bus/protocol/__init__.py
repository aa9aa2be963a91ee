"""The link's protocol without input or output: frames, messages, and the sessions of both ends."""
