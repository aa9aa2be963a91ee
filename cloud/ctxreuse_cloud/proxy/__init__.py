"""The OpenAI-compatible streaming proxy: who asks, which backend answers, and bytes that pass through as they come.

One event loop owns everything here. ``tenants`` says who asks, ``admission`` how much at once, ``routing`` and
``breaker`` which backend, ``retry`` when to try another, ``stream`` passes the answer on, ``health`` looks after the
backends, and ``proxy`` is the ASGI application that puts them together.
"""
