"""Looking after the backends: is each well, and which models does it list?"""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import msgspec

from ctxreuse.errors import ConfigError
from ctxreuse_cloud.proxy.backends import Backend, Backends
from ctxreuse_cloud.proxy.stream import read_whole
from ctxreuse_cloud.proxy.tenants import Tenants

__all__ = ["Looking", "look"]

log = logging.getLogger(__name__)

_MODELS = 256


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


_models = msgspec.json.Decoder(_Models)


async def look(pool: aiohttp.ClientSession, backend: Backend, timeout: float) -> None:
    """Ask one backend how it is and what it serves; what it says changes ``healthy`` and ``models``. Never raises."""
    was = backend.healthy
    try:
        async with asyncio.timeout(timeout):
            backend.said = await _ask(pool, backend)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        backend.said = str(error) or type(error).__name__
    backend.healthy = not backend.said
    if backend.healthy != was:
        extra = {"backend": backend.name, "said": backend.said}
        level = logging.INFO if backend.healthy else logging.WARNING
        log.log(level, "a backend is %s", "well" if backend.healthy else "ill", extra=extra)


async def _ask(pool: aiohttp.ClientSession, backend: Backend) -> str:
    """Empty if it is well, else what is wrong."""
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
    # Without /health the list of models is the sign of life.
    return f"/v1/models answers {status}" if missing and status != 200 else ""


async def _get(pool: aiohttp.ClientSession, backend: Backend, path: str) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {backend.key}"} if backend.key else {}
    async with pool.get(backend.url + path, headers=headers, allow_redirects=False) as response:
        body, whole = await read_whole(response)
        return (response.status, body) if whole else (response.status, b"")


class Looking:
    """Looks at all backends every ``interval`` seconds, and at the key file every second, until cancelled."""

    def __init__(self, pool: aiohttp.ClientSession, backends: Backends, tenants: Tenants, interval: float) -> None:
        self._pool, self._backends, self._tenants, self._interval = pool, backends, tenants, interval

    async def once(self) -> None:
        """One look at all backends, together."""
        timeout = min(self._interval, 5.0)
        await asyncio.gather(*(look(self._pool, backend, timeout) for backend in self._backends.all))

    async def keys(self) -> None:
        """For ever: take in changes of the key file."""
        said = ""
        while True:
            await asyncio.sleep(1.0)
            try:
                if self._tenants.refresh():
                    log.info("the key file was read again")
                said = ""
            except ConfigError as error:
                if str(error) != said:
                    said = str(error)
                    log.error("the keys stay as they were: %s", said)

    async def run(self) -> None:
        """For ever: look again and again. The first look is at once."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.keys())
            while True:
                await self.once()
                await asyncio.sleep(self._interval)
