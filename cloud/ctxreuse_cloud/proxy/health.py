"""Health checks of the backends, which also read the models that each lists."""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import msgspec

from ctxreuse_cloud.proxy.backends import Backend, Backends
from ctxreuse_cloud.proxy.stream import read_whole

__all__ = ["HealthChecker", "check_backend"]

log = logging.getLogger(__name__)

_MODELS = 256


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


_models = msgspec.json.Decoder(_Models)


async def check_backend(pool: aiohttp.ClientSession, backend: Backend, timeout: float) -> None:
    """Check one backend and set its ``healthy``, ``error`` and ``models``. Raises nothing."""
    was = backend.healthy
    try:
        async with asyncio.timeout(timeout):
            backend.error = await _probe(pool, backend)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        backend.error = str(error) or type(error).__name__
    backend.healthy = not backend.error
    if backend.healthy != was:
        extra = {"backend": backend.name, "error": backend.error}
        level = logging.INFO if backend.healthy else logging.WARNING
        log.log(level, "a backend is %s", "healthy" if backend.healthy else "unhealthy", extra=extra)


async def _probe(pool: aiohttp.ClientSession, backend: Backend) -> str:
    """Return what is wrong; "": nothing."""
    path = backend.config.health or "/health"
    status, _ = await _get(pool, backend, path)
    missing = status == 404 and not backend.config.health
    if status != 200 and not missing:
        return f"{path} answers {status}"
    status, body = await _get(pool, backend, "/v1/models")
    if status == 200:
        try:
            backend.models = tuple(model.id for model in _models.decode(body).data[:_MODELS] if model.id)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return f"/v1/models cannot be read: {error}"
    # Without /health the list of models must answer.
    return f"/v1/models answers {status}" if missing and status != 200 else ""


async def _get(pool: aiohttp.ClientSession, backend: Backend, path: str) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {backend.key}"} if backend.key else {}
    async with pool.get(backend.url + path, headers=headers, allow_redirects=False) as response:
        body, whole = await read_whole(response)
        return (response.status, body) if whole else (response.status, b"")


class HealthChecker:
    """Checks all backends every ``interval`` seconds."""

    def __init__(self, pool: aiohttp.ClientSession, backends: Backends, interval: float) -> None:
        self._pool, self._backends, self._interval = pool, backends, interval

    async def once(self) -> None:
        """Check all backends at once."""
        timeout = min(self._interval, 5.0)
        await asyncio.gather(*(check_backend(self._pool, backend, timeout) for backend in self._backends.all))

    async def run(self) -> None:
        """Check until cancelled; the first check is at once."""
        while True:
            await self.once()
            await asyncio.sleep(self._interval)
