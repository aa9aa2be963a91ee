"""The OpenAI-compatible streaming proxy; one event loop owns all of it.

``tenants`` authenticates, ``admission`` limits, ``backends`` and ``breaker`` choose the backend, ``retry`` says when to
try another, ``stream`` passes the answer on, ``health`` checks the backends; ``proxy`` is the ASGI application.
"""
