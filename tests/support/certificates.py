"""An authority of one test, and certificates that it issues, made by ``openssl``."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["Authority"]


class Authority:
    """A private authority; ``file``: what clients trust."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.file, self._key, self._issued = folder / "ca.pem", folder / "ca.key", 0
        self._openssl("req", "-x509", *_EC, "-keyout", self._key, "-out", self.file, "-days", "2", "-subj", "/CN=Test")

    def issue(self, name: str, *alternatives: str) -> tuple[Path, Path]:
        """Issue a certificate for a name, such as ``first``, and hosts, such as ``IP:127.0.0.1``; its file and key."""
        self._issued += 1
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        request, more = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        more.write_text(f"subjectAltName={','.join(alternatives) or 'IP:127.0.0.1,DNS:localhost'}\n")
        self._openssl("req", *_EC, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        issuer = ["-CA", self.file, "-CAkey", self._key, "-set_serial", str(self._issued)]
        self._openssl("x509", "-req", "-in", request, *issuer, "-days", "2", "-extfile", more, "-out", certificate)
        key.chmod(0o600)
        return certificate, key

    def _openssl(self, *arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
