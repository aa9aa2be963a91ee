"""A server in a thread, with the middleware of the daemons."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
from starlette.routing import Route, Router

from ctxreuse.daemon.access import Access
from ctxreuse.daemon.bodies import BodyBudget
from ctxreuse.daemon.client import Client
from ctxreuse.daemon.keys import Keys
from ctxreuse.daemon.lifecycle import Daemon
from ctxreuse.daemon.middleware import ApiMiddleware
from ctxreuse.metrics import Metrics
from support.waiting import patient


@pytest.fixture
def serve() -> Iterator[Callable[..., Client]]:
    """serve(*routes, keys=(), …) starts a server in a thread and gives a client for it."""
    started: list[tuple[Daemon, threading.Thread]] = []

    def start(
        *routes: Route,
        keys: tuple[str, ...] = (),
        key: str = "",
        access: Access | None = None,
        bodies: BodyBudget | None = None,
        receive: float = 30.0,
    ) -> Client:
        daemon = Daemon("test", drain=0, receive=receive)
        access = access or Access(keys=Keys.of(*keys) if keys else None)
        app = ApiMiddleware(Router(routes), metrics=Metrics(), route=str, access=access, bodies=bodies)
        url = daemon.bind()

        class Nothing(nullcontext[None]):
            pass

        thread = threading.Thread(target=daemon.run, args=(app, Nothing))
        thread.start()
        started.append((daemon, thread))
        return Client(url.replace("//", f"//{key}@") if key else url, timeout=patient(20))

    yield start
    for daemon, thread in started:
        daemon.stop()
        thread.join(patient(20))
        assert not thread.is_alive()
