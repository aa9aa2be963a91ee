"""What the daemons share: life cycle, middleware, the OpenAI API, probes, logs, and a client."""
