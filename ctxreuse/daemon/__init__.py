"""What the daemons share: logs, the OpenAI API's words, probes, who may ask, and a life cycle that loses nothing."""
