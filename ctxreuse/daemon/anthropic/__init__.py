"""Anthropic's Messages API: requests, answers, streamed events and errors, as structs."""
