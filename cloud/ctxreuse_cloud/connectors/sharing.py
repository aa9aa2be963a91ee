"""The settings by which another engine's KV is kept as the torch engine's, so that devices use it and the reverse."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import msgspec

from ctxreuse.block.levels import check_limit
from ctxreuse.bus.auth.curve import LOCAL
from ctxreuse.bus.transport.sockets import check_endpoint
from ctxreuse.config import StoreConfig
from ctxreuse.config.schema import BusConfig
from ctxreuse.errors import ConfigError
from ctxreuse.peer.serve.owners import node_secret
from ctxreuse.store import TieredStore
from ctxreuse_cloud.serving import open_auth, serve_store

__all__ = ["SHARING_OPTIONS", "Sharing", "blocks_of_page", "read_sharing"]

log = logging.getLogger(__name__)

#: Settings of `read_sharing`, with their defaults.
SHARING_OPTIONS = {"share_with": "", "tenant": "", "max_kl": "", "bus": "", "bus_key": "", "bus_allow": ""}


class Sharing(msgspec.Struct, frozen=True):
    """What is shared.

    Args:
        tenant: whose the requests without a tenant are.
        max_kl: how lossy loaded KV may be, in nats; None: exact only.
        bus: where devices connect; None: the store is not served.
    """

    tenant: str
    max_kl: float | None = None
    bus: BusConfig | None = None

    def secret(self, config: StoreConfig) -> bytes:
        """Return the secret of a store that is served, made when it is first needed; b"" if it is not."""
        return node_secret(config.folder() / "node.secret") if self.bus is not None else b""

    def server(self, config: StoreConfig) -> Callable[[TieredStore], ExitStack] | None:
        """Return what serves the store, for `StoreAccess.serve`; None if it is not served.

        Raises ConfigError for an address or a key that cannot be used. A port that is taken is said in the log: an
        engine goes on without devices.
        """
        bus = self.bus
        if bus is None:
            return None
        check_endpoint(bus.bind, secured=open_auth(bus) is not None, insecure=bus.insecure)

        def serve(store: TieredStore) -> ExitStack:
            try:
                return serve_store(store, config.folder(), bus)
            except ConfigError as error:
                log.error("devices are not served: %s", error)
                return ExitStack()

        return serve


def read_sharing(options: Mapping[str, str], *, saves: bool) -> Sharing | None:
    """Return what `SHARING_OPTIONS` say; None where an engine keeps its KV to itself. Raises ConfigError.

    ``saves``: the engine saves what it computes.
    """
    engine = options["share_with"]
    if not engine:
        for name in SHARING_OPTIONS:
            if options[name]:
                raise ConfigError(f'{name} has no use without "share_with"', fix='Add "share_with": "torch"')
        return None
    if engine != "torch":
        raise ConfigError(f"KV cannot be shared with {engine!r}", where="share_with", fix='It can with "torch"')
    if not options["bus"]:
        for name in ("bus_key", "bus_allow"):
            if options[name]:
                raise ConfigError(f'"{name}" without "bus"', fix='Add "bus": "tcp://HOST:PORT", where devices connect')
    if options["bus"] and not saves:
        raise ConfigError("only an engine that saves can serve its store", where="bus", fix='Set "kv_role": "kv_both"')
    if options["bus"] and options["secret_file"]:
        raise ConfigError("a store that is served has its own secret", fix='Leave "secret_file" or "bus" out')
    bus = BusConfig(bind=options["bus"], key_file=options["bus_key"], allow_file=options["bus_allow"])
    return Sharing(options["tenant"] or LOCAL, _limit(options["max_kl"], saves), bus if options["bus"] else None)


def _limit(text: str, saves: bool) -> float | None:
    try:
        limit = check_limit(float(text)) if text else None
    except ValueError:
        raise ConfigError(f"max_kl is {text!r}", fix="Give nats a token, such as 0.01") from None
    if limit is not None and saves:
        # In an engine's own cache pages that were computed on lossy ones look like all others.
        raise ConfigError(
            "an engine that loads lossy KV cannot save: what it computes is not exact",
            where="max_kl",
            fix='Set "kv_role" to "kv_consumer"',
        )
    return limit


def blocks_of_page(page_tokens: int, block_tokens: int) -> int:
    """Return how many blocks a page holds. Raises ConfigError unless they fill it."""
    if page_tokens % block_tokens:
        raise ConfigError(
            f"pages of {page_tokens} tokens do not hold whole blocks of {block_tokens}",
            fix=f"Pass --block-size {block_tokens} or {2 * block_tokens}",
        )
    return page_tokens // block_tokens
