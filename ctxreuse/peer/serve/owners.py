"""Ownership of blocks: tenants' salts, and an index of the tenant of each stored block."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ctxreuse.errors import ConfigError
from ctxreuse.identity.keys import ROOT, prefix_key, tenant_salt
from ctxreuse.store.base import Store
from ctxreuse.store.types import Entry

__all__ = ["Namespace", "OwnerIndex", "fair_level", "node_secret"]

_SECRET_BYTES = 32
#: Changes of one tenant that are remembered: more than happen between two announcements (100 bytes each).
_LOG = 1 << 14
#: Hints that may wait; beyond that the store is walked again.
_HINTS = 1 << 18


def node_secret(path: str | os.PathLike[str]) -> bytes:
    """Return the 32 bytes from which a node derives its tenants' salts; creates the file (0600) if there is none.

    Raises ConfigError if it cannot be read or created, has another size, or others may read it: with the secret, keys
    of any tenant can be computed.
    """
    place = Path(path)
    try:
        if not place.exists():
            _make_secret(place)
        with open(place, "rb") as opened:
            mode, secret = os.fstat(opened.fileno()).st_mode & 0o777, opened.read(_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"node.secret cannot be created or read: {error.strerror}", where=str(place)) from None
    if mode & 0o077:
        raise ConfigError("node.secret may be read by others", where=str(place), fix=f"chmod 600 {place}")
    if len(secret) != _SECRET_BYTES:
        fix = "Restore it from a backup; without it, blocks of peers are no longer found"
        raise ConfigError(f"node.secret must hold exactly {_SECRET_BYTES} bytes", where=str(place), fix=fix)
    return secret


def _make_secret(place: Path) -> None:
    """Write beside and link: the file is never seen incomplete, and the first of two writers wins."""
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = place.with_name(f"{place.name}.{os.getpid()}.new")
    try:
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(file, "wb") as opened:
            opened.write(secrets.token_bytes(_SECRET_BYTES))
            opened.flush()
            os.fsync(opened.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(beside, place)
    finally:
        beside.unlink(missing_ok=True)


class Namespace(NamedTuple):
    """Tenant and model space of a block and all its descendants."""

    tenant: str
    space: bytes


class _TenantKeys:
    """One tenant's keys, with the bytes of their blocks, and their changes since version ``floor``. Versions count only
    the tenant's own changes, so that they reveal nothing of others."""

    def __init__(self) -> None:
        self.keys: dict[bytes, int] = {}
        self.nbytes = 0
        self.log: deque[tuple[int, bytes]] = deque()
        self.floor = self.version = 1

    def resize(self, key: bytes, nbytes: int) -> None:
        self.nbytes += nbytes - self.keys.get(key, 0)
        self.keys[key] = nbytes

    def note(self, key: bytes) -> None:
        self.version += 1
        self.log.append((self.version, key))
        if len(self.log) > _LOG:
            self.floor = self.log.popleft()[0]


def fair_level(sizes: Iterable[int], need: int) -> float:
    """Return the size to which the largest are cut so that all together lose ``need``."""
    largest = sorted(sizes, reverse=True)
    total, level = 0, 0.0
    for count, (size, following) in enumerate(zip(largest, [*largest[1:], float("-inf")]), 1):
        total += size
        level = (total - need) / count
        if level >= following:
            break
    return level


class OwnerIndex:
    """The tenant of each block in ``store``. One thread calls all methods; the store may change in others.

    A first block belongs to the tenant whose salt reproduces its key, all others to the owner of their parent. Blocks
    of unknown tenants are neither found nor counted.
    """

    def __init__(self, store: Store, secret: bytes, tenants: Iterable[str] = ()) -> None:
        self._store, self._secret = store, secret
        self._salts: dict[str, bytes] = {}
        self._namespaces: dict[bytes, Namespace] = {}
        self._tenants: dict[str, _TenantKeys] = {}
        self._unowned: dict[bytes, None] = {}  # stored, of an unknown tenant or below a withheld block
        self._withheld: dict[bytes, Namespace] = {}
        self._lock = threading.Lock()
        self._hints: set[bytes] = set()
        self._rescan = True
        self._unwatch = store.watch(self._hint)
        for tenant in tenants:
            self.salt(tenant)
        self.refresh()

    def close(self) -> None:
        """Stop following the store."""
        self._unwatch()

    def salt(self, tenant: str) -> bytes:
        """Return the salt of a tenant's keys; makes the tenant known."""
        salt = self._salts.get(tenant)
        if salt is None:
            salt = self._salts[tenant] = tenant_salt(tenant, self._secret)
            self._tenants[tenant] = _TenantKeys()
            if self._unowned:
                # Its blocks from an earlier process are found now.
                self._rescan = True
        return salt

    def _hint(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            if len(self._hints) + len(keys) > _HINTS:
                self._rescan = True
                self._hints.clear()
            elif not self._rescan:
                self._hints.update(keys)

    def refresh(self) -> None:
        """Follow the changes of the store since the last call; O(changes)."""
        if not self._hints and not self._rescan:
            return
        with self._lock:
            rescan, self._rescan = self._rescan, False
            hints, self._hints = list(self._hints), set()
        if rescan:
            entries: list[Entry] = list(self._store.walk())
            stored = {entry.key for entry in entries}
            removed = [key for key in (*self._namespaces, *self._unowned) if key not in stored]
        else:
            found = self._store.entries(hints)
            entries = sorted((entry for entry in found if entry is not None), key=lambda entry: entry.end)
            removed = [key for key, entry in zip(hints, found) if entry is None]
        for key in removed:
            self._removed(key)
        for entry in entries:
            if (namespace := self._namespaces.get(entry.key)) is None:
                self._added(entry)
            else:
                self._tenants[namespace.tenant].resize(entry.key, entry.nbytes)

    def _added(self, entry: Entry) -> None:
        if entry.key in self._withheld:
            return
        namespace = self._namespaces.get(entry.parent) if entry.parent != ROOT else self._proven_owner(entry.key)
        if namespace is None:
            self._unowned[entry.key] = None
            return
        self._unowned.pop(entry.key, None)
        self._namespaces[entry.key] = namespace
        tenant_keys = self._tenants[namespace.tenant]
        tenant_keys.resize(entry.key, entry.nbytes)
        tenant_keys.note(entry.key)

    def _removed(self, key: bytes) -> None:
        self._unowned.pop(key, None)
        namespace = self._namespaces.pop(key, None)
        if namespace is not None:
            tenant_keys = self._tenants[namespace.tenant]
            tenant_keys.nbytes -= tenant_keys.keys.pop(key, 0)
            tenant_keys.note(key)

    def _proven_owner(self, key: bytes) -> Namespace | None:
        with self._store.read() as reader:
            view = reader.peek(key)
            if view is None:
                return None
            space, tokens = view.header.space, view.tokens.copy()
            del view
        for tenant, salt in self._salts.items():
            if prefix_key(space, salt, ROOT, tokens) == key:
                return Namespace(tenant, space)
        return None

    def owner(self, key: bytes) -> Namespace | None:
        """Return owner and space of a stored block; None if unknown, not stored, or withheld."""
        return self._namespaces.get(key)

    def has_one_tenant(self) -> bool:
        """Return True while no second tenant is known. Any thread."""
        return len(self._salts) <= 1

    def sharers(self, tenant: str) -> int:
        """Return how many tenants have blocks, ``tenant`` included."""
        return 1 + sum(one.nbytes > 0 for name, one in self._tenants.items() if name != tenant)

    def over_share(self, need: int) -> Callable[[bytes], bool] | None:
        """Return which keys go first where ``need`` bytes must become free; None: any. Any thread.

        Those of the tenants that have most, until none has more than another (max-min fairness), and those of tenants
        that are unknown: what one tenant stores never evicts another's within its share.
        """
        sizes = {name: one.nbytes for name, one in list(self._tenants.items()) if one.nbytes}
        if len(sizes) < 2:
            return None
        level = fair_level(sizes.values(), need)
        over = {name for name, nbytes in sizes.items() if nbytes > level}
        namespaces, withheld, unowned = self._namespaces, self._withheld, self._unowned

        def goes_first(key: bytes) -> bool:
            namespace = namespaces.get(key) or withheld.get(key)
            return namespace.tenant in over if namespace is not None else key in unowned

        return goes_first

    @property
    def withheld_keys(self) -> list[bytes]:
        """All blocks that are withheld."""
        return list(self._withheld)

    def withheld(self, key: bytes) -> Namespace | None:
        """Return owner and space of a block if it is withheld."""
        return self._withheld.get(key)

    def withhold(self, key: bytes, namespace: Namespace) -> None:
        """Hide a block that is about to be stored until `release`."""
        self._withheld[key] = namespace

    def release(self, keys: Iterable[bytes]) -> None:
        """Show these blocks, if they are stored, from the next `refresh` on."""
        known = [key for key in keys if self._withheld.pop(key, None) is not None]
        self._hint([*known, *self._unowned] if known else [])

    def keys(self, tenant: str) -> tuple[int, Sequence[bytes]]:
        """Return the version and all keys of a tenant, parents before children."""
        tenant_keys = self._tenants.get(tenant)
        return (tenant_keys.version, list(tenant_keys.keys)) if tenant_keys is not None else (1, [])

    def changes(self, tenant: str, since: int) -> tuple[int, Sequence[bytes], Sequence[bytes]] | None:
        """Return the version and the keys added and removed since version ``since``; None if that is unknown."""
        tenant_keys = self._tenants.get(tenant)
        if tenant_keys is None or not tenant_keys.floor <= since <= tenant_keys.version:
            return None
        named: dict[bytes, None] = {}
        for version, key in reversed(tenant_keys.log):
            if version <= since:
                break
            named[key] = None
        came = [key for key in reversed(named) if key in tenant_keys.keys]
        return tenant_keys.version, came, [key for key in named if key not in tenant_keys.keys]

    def check(self) -> None:
        """Raise AssertionError where the index disagrees with the store. O(entries)."""
        self.refresh()
        stored = {entry.key: entry for entry in self._store.walk()}
        assert sum(len(tenant_keys.keys) for tenant_keys in self._tenants.values()) == len(self._namespaces)
        for tenant_keys in self._tenants.values():
            assert tenant_keys.nbytes == sum(stored[key].nbytes for key in tenant_keys.keys), "bytes are miscounted"
        for key, namespace in self._namespaces.items():
            assert key in self._tenants[namespace.tenant].keys, "a key is not among its tenant's"
            assert key in stored, "a key is in the index and not in the store"
            parent = stored[key].parent
            assert parent == ROOT or self._namespaces[parent] == namespace, "a block has another tenant than its parent"
        assert not any(key in self._namespaces for key in (*self._withheld, *self._unowned))
