"""The folder DATA_DIR/pki: a private authority, a server certificate, and how they are made, renewed and replaced.

`ca.pem` has what clients shall trust: the authority, and while it is being replaced the one before, too. `server.pem`
has the server's certificate and, in that time, a certificate of the new authority that the old one has signed: so
those who know only the old one, and those who know only the new one, both find what they trust.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509

from fedplat import durable
from fedplat_server.auth import ca as pki
from fedplat_server.auth.ca import Authority, certificate_pem, key_pem
from fedplat_server.config import TlsFiles
from fedplat_server.errors import ConfigError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
MAX_HOSTS = 100
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")


@dataclasses.dataclass(frozen=True)
class PkiFolder:
    """The files of a private authority."""

    folder: Path

    @classmethod
    def of(cls, data_dir: Path) -> PkiFolder:
        """That of a data folder."""
        return cls(data_dir / "pki")

    @property
    def files(self) -> TlsFiles:
        """What the daemon reads."""
        return TlsFiles(self.folder / "server.pem", self.folder / "server.key", self.ca)

    @property
    def ca(self) -> Path:
        """The certificates to trust, the present authority's first."""
        return self.folder / "ca.pem"

    @property
    def ca_key(self) -> Path:
        """The present authority's key."""
        return self.folder / "ca.key"

    @property
    def _next_key(self) -> Path:
        return self.folder / "ca-next.key"

    def authority(self) -> Authority:
        """The present authority. Raises `ConfigError`."""
        try:
            return Authority.load(self.ca, self.ca_key)
        except ConfigError:
            if not self._next_key.exists():
                raise
            found = Authority.load(self.ca, self._next_key)  # a crash came before the last step of `rotate`
            self._next_key.replace(self.ca_key)
            return found

    def authority_in_use(self) -> Authority:
        """The present authority, for a server that runs while it may be replaced: changes nothing.

        Raises `ConfigError`.
        """
        with contextlib.suppress(ConfigError):
            return Authority.load(self.ca, self.ca_key)
        with contextlib.suppress(ConfigError):
            return Authority.load(self.ca, self._next_key)
        return Authority.load(self.ca, self.ca_key)  # the replacement has ended meanwhile, or something is wrong

    def make_authority(self, now: datetime.datetime) -> bool:
        """Makes the authority if there is none; whether it did."""
        if self.ca.exists():
            return False
        authority = Authority.new(now)
        # The certificate comes last and says that both are there; a key without one was left by a crash.
        replace(self.ca_key, authority.key_pem, 0o600)
        replace(self.ca, certificate_pem(authority.certificate), 0o644)
        return True

    def make_server(self, hosts: Sequence[str], now: datetime.datetime) -> bool:
        """Makes the server's key and certificate unless both are there; whether it did."""
        if self.files.certificate.exists() and self.files.key.exists():
            return False
        self._sign(self.authority(), hosts, now)
        return True

    def hosts(self) -> list[str]:
        """The names and addresses of the server's certificate. Raises `ConfigError`."""
        return hosts_of(read(self.files.certificate)[0])

    def renew(self, hosts: Sequence[str], now: datetime.datetime) -> None:
        """Makes a new key and certificate for the server; what it had to say of an authority's change stays."""
        chain = read(self.files.certificate)
        self._sign(self.authority(), hosts, now, chain[1:])

    def rotate(self, now: datetime.datetime) -> None:
        """Makes a new authority, which those who trust the old one trust too. Raises `ConfigError`."""
        hosts, old = self.hosts(), self.authority()
        if len(read(self.ca)) > 1:
            raise ConfigError("the authority is being replaced already; end that with: certificates rotate-ca --finish")
        new = Authority.new(now)
        both = certificate_pem(new.certificate) + certificate_pem(old.certificate)
        # In this order: wherever a crash comes, the server's certificate is trusted, and an authority can be loaded.
        replace(self._next_key, new.key_pem, 0o600)
        self._sign(new, hosts, now, [old.cross_sign(new, now)])
        replace(self.ca, both, 0o644)
        self._next_key.replace(self.ca_key)

    def finish_rotation(self, now: datetime.datetime) -> None:
        """Forgets the old authority: who trusts only that one is shut out. Raises `ConfigError`."""
        trusted = read(self.ca)
        if len(trusted) < 2:
            raise ConfigError("there is no old authority to forget; begin with: certificates rotate-ca")
        self._sign(self.authority(), self.hosts(), now)
        replace(self.ca, certificate_pem(trusted[0]), 0o644)

    def _sign(
        self, authority: Authority, hosts: Sequence[str], now: datetime.datetime, rest: Sequence[x509.Certificate] = ()
    ) -> None:
        key = pki.new_key()
        certificate = authority.for_server(hosts, key.public_key(), now)
        replace(self.files.key, key_pem(key), 0o600)
        replace(self.files.certificate, b"".join(map(certificate_pem, [certificate, *rest])), 0o644)


def all_hosts(given: Sequence[str]) -> list[str]:
    """The names for a certificate: those that were given, and this machine by itself. Raises `ConfigError`."""
    for host in given:
        if not (_NAME.fullmatch(host) or _is_address(host)):
            raise ConfigError(f"--host {host[:80]!r}: expected a host name or an address, without a port")
    if len(given) > MAX_HOSTS:
        raise ConfigError(f"{len(given)} times --host; at most {MAX_HOSTS}")
    return list(dict.fromkeys([*given, *LOOPBACK]))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """The names and addresses of a certificate."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return [*names.get_values_for_type(x509.DNSName), *addresses]


def read(path: Path) -> list[x509.Certificate]:
    """The certificates of a file. Raises `ConfigError`."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}; fedplat-server init makes it") from exc
    except ValueError as exc:
        raise ConfigError(f"{path} holds no certificates in PEM: {exc}") from exc


def replace(path: Path, content: bytes, mode: int) -> None:
    """Write a file, whole or not at all, whether it exists or not. Raises `ConfigError`."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        durable.write_bytes(path, content, mode)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc
