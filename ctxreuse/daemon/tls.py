"""TLS of the daemons: a certificate that may be replaced while answers run, and clients that trust just this one."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from ctxreuse.config import TlsConfig
from ctxreuse.errors import ConfigError
from ctxreuse.private import warn_if_shared

__all__ = ["ServerCertificate", "certificate_of", "pinned"]

_END = "-----END CERTIFICATE-----"


class ServerCertificate:
    """The certificate of a server, from PEM files; `refresh` reads them again if they have changed.

    Connections that stand keep what they began with, new ones get what was read last: a pair of files that is broken,
    or half replaced, is never in use. Raises ConfigError.
    """

    name = "TLS certificate"

    def __init__(self, certificate: str, key: str = "") -> None:
        """``certificate``: file of the certificate, then those that issued it; ``key``: "": its key is there, too."""
        self.file = Path(certificate).expanduser().absolute()
        self._key = Path(key).expanduser() if key else self.file
        warn_if_shared(self._key, "the TLS key in")
        self._seen = self._state()
        #: What the server listens with.
        self.context = self._newest = self._load()
        self.context.sni_callback = self._choose  # called in each handshake, whether the client names a host or not

    def refresh(self) -> bool:
        """Read the files again if they have changed; returns whether. On ConfigError the old certificate stays."""
        state = self._state()
        if state == self._seen:
            return False
        self._newest = self._load()
        self._seen = state
        return True

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._newest

    def _state(self) -> list[tuple[int, int, int]]:
        try:
            return [(s.st_mtime_ns, s.st_size, s.st_ino) for s in map(os.stat, (self.file, self._key))]
        except OSError as error:
            raise self._unusable(error) from None

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.file, self._key, password=lambda: b"")  # never asks on a terminal
        except (OSError, ValueError) as error:
            raise self._unusable(error) from None
        return context

    def _unusable(self, error: Exception) -> ConfigError:
        said = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        fix = "Both files are PEM, the key without a passphrase: openssl x509 -in FILE -noout -text"
        return ConfigError(f"the TLS certificate cannot be used: {said}", where=f"{self.file}, {self._key}", fix=fix)


def certificate_of(config: TlsConfig) -> ServerCertificate | None:
    """Return the certificate of a daemon's settings; None without one. Raises ConfigError."""
    if config.tls_certificate:
        return ServerCertificate(config.tls_certificate, config.tls_key)
    if config.tls_key:
        raise ConfigError("a TLS key is of no use without its certificate", where="tls_key", fix="Set tls_certificate")
    return None


def pinned(certificate: Path) -> ssl.SSLContext:
    """Return the context of a client that accepts only this certificate, under whatever host name.

    For programs that can read the daemon's own files. Raises ConfigError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        # The first only: behind it stand authorities, which also issue certificates to others.
        first, end, _ = certificate.read_text("utf-8").partition(_END)
        context.load_verify_locations(cadata=first + end)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the daemon's certificate cannot be read: {error}", where=str(certificate)) from None
    return context
