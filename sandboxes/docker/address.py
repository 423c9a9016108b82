"""Address of a Docker engine: a unix socket, or TCP with or without TLS."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from roll_flash.sandboxes.errors import SandboxPermissionDenied, SandboxUnavailable

DEFAULT_HOST = "unix:///var/run/docker.sock"
CERTIFICATE_FILES = ("ca.pem", "cert.pem", "key.pem")


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """`unix:///path`, `tcp://host:port`, or `tcp` with TLS (`certificates`: a folder like DOCKER_CERT_PATH)."""

    host: str
    certificates: str | None = None

    @classmethod
    def from_environment(cls, host: str | None = None) -> EngineAddress:
        """Return the address in `host`, else DOCKER_HOST, else the default socket.

        TLS is used for `tcp://host:port?certificates=FOLDER`, and for every tcp address with DOCKER_TLS_VERIFY. Raises
        SandboxUnavailable for an address that is neither `unix://` nor `tcp://`.
        """
        address, _, query = (host or os.environ.get("DOCKER_HOST") or DEFAULT_HOST).partition("?")
        named = parse_qs(query).get("certificates")
        if not address.startswith(("unix://", "tcp://")):
            raise SandboxUnavailable(f"{address}: a Docker engine's address is unix:///path or tcp://host:port")
        if address.startswith("unix://"):
            return cls(address)
        verify = os.environ.get("DOCKER_TLS_VERIFY", "") not in ("", "0")
        folder = os.environ.get("DOCKER_CERT_PATH") or str(Path.home() / ".docker")
        return cls(address, named[0] if named else folder if verify else None)

    @property
    def socket_path(self) -> str | None:
        return self.host.removeprefix("unix://") if self.host.startswith("unix://") else None

    @property
    def base_url(self) -> str:
        where = "docker" if self.socket_path else urlsplit(self.host).netloc
        return f"{'https' if self.certificates else 'http'}://{where}"

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context; None without TLS. Raises SandboxUnavailable for unusable certificates."""
        if self.certificates is None:
            return None
        authority, certificate, key = (str(Path(self.certificates) / name) for name in CERTIFICATE_FILES)
        try:
            context = ssl.create_default_context(cafile=authority)
            context.load_cert_chain(certificate, key)
        except OSError as error:  # ssl.SSLError is one
            raise SandboxUnavailable(
                f"{self.host}: the certificates in {self.certificates} cannot be used ({error}); "
                f"it must hold {', '.join(CERTIFICATE_FILES)}"
            ) from None
        return context

    def connection_error(self, error: Exception) -> SandboxUnavailable:
        """Return the error for a failed connection, with instructions for the user."""
        path = self.socket_path
        if path and os.path.exists(path) and not os.access(path, os.R_OK | os.W_OK, effective_ids=True):
            return SandboxPermissionDenied(
                f"no permission on the Docker socket {path}; add this user to the group `docker`, or run as root"
            )
        if "CERTIFICATE" in str(error).upper():
            return SandboxUnavailable(
                f"the Docker engine at {self.host} is not the one that {self.certificates}/ca.pem signed for ({error})"
            )
        return SandboxUnavailable(f"no Docker engine answers at {self.host} ({error}); start one or set DOCKER_HOST")
