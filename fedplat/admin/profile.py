"""An operator's profile: the server's address, its certificates and the operator's token, in a private file.

```toml
server = "fed.example.org:7443"
token = "fedplat_op_..."
ca = '''
-----BEGIN CERTIFICATE-----
...
'''
```
`fedplat-server init` and `operator add` write it. Without `ca`, the certificate authorities of this machine are used.
With `transport = "http"`, `server` is an address of HTTP/1.1.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Literal

import msgspec

from fedplat import durable
from fedplat.config import decoding, toml
from fedplat.errors import ProfileError

DEFAULT_SERVER = "127.0.0.1:7443"
MAX_BYTES = 2**20
"""Maximum size of a profile's file."""
GRPC, HTTP = "grpc", "http"


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The address and credentials of a server.

    `ca`: trusted certificates as PEM. `insecure`: without TLS. `transport`: what the server speaks at the address.
    """

    server: str = DEFAULT_SERVER
    token: str = ""
    ca: str = ""
    insecure: bool = False
    transport: Literal["grpc", "http"] = GRPC

    def __repr__(self) -> str:
        return f"Profile(server={self.server!r}, insecure={self.insecure})"


def default_path() -> Path:
    """Return the path of the default profile. Raises `ProfileError` for a user without a home directory."""
    import platformdirs  # not required by programs that pass a path

    try:
        return platformdirs.user_config_path("fedplat") / "profile.toml"
    except RuntimeError as exc:  # neither HOME nor an entry in /etc/passwd, as in some containers
        raise ProfileError(
            "there is no place for a profile, since this user has no home directory: name a file with --profile or "
            "FEDPLAT_PROFILE, or set HOME"
        ) from exc


def load(path: Path, *, needs_server: bool = True) -> Profile:
    """Read a profile. Raises `ProfileError`, also if it names no server, unless the caller has another address."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise ProfileError(f"the profile {path} cannot be read: {exc.strerror}") from exc
    return loads(content, str(path), needs_server=needs_server)


def loads(content: bytes, where: str, *, needs_server: bool = True) -> Profile:
    """Read the bytes of a profile; `where` names it in messages. See `load`."""
    if len(content) > MAX_BYTES:
        raise ProfileError(f"the profile {where} is not valid: it is larger than {MAX_BYTES >> 20} MiB")
    try:
        stored = toml.loads(content.decode("utf-8"))
        found = msgspec.convert(stored, decoding.prepare_type(Profile))
    except (msgspec.ValidationError, ValueError) as exc:  # of TOML or UTF-8
        raise ProfileError(f"the profile {where} is not valid: {exc}") from exc
    if "server" not in stored and needs_server:
        raise ProfileError(
            f'the profile {where} names no server: add the line server = "HOST:PORT" to it, or give --server; '
            "fedplat-server init and operator add write complete profiles"
        )
    return found


def load_ca(path: Path) -> str:
    """Read a file of trusted certificates. Raises `ProfileError`."""
    try:
        text = path.read_text()
    except OSError as exc:
        raise ProfileError(f"the certificates {path} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError:
        text = ""
    if "-----BEGIN CERTIFICATE-----" not in text:
        raise ProfileError(f"{path} contains no PEM certificates; expected the server's ca.pem")
    return text


def dump(profile: Profile) -> str:
    """Return the text of a profile's file."""
    lines = [f"server = {json.dumps(profile.server)}"]
    if profile.token:
        lines.append(f"token = {json.dumps(profile.token)}")
    if profile.insecure:
        lines.append("insecure = true")
    if profile.transport != GRPC:
        lines.append(f"transport = {json.dumps(profile.transport)}")
    if profile.ca:
        lines.append(f"ca = '''\n{profile.ca.strip()}\n'''")
    return "\n".join(lines) + "\n"


def save(profile: Profile, path: Path, *, overwrite: bool = False) -> None:
    """Write a file that only its owner can read, in one atomic step. Raises `ProfileError`, also if it exists."""
    try:
        with contextlib.suppress(FileExistsError):  # the path of the folder is a file: the next line has a better error
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        durable.write_bytes(path, dump(profile).encode(), 0o600, overwrite=overwrite)
    except FileExistsError as exc:
        raise ProfileError(f"{path} exists already, and is not replaced") from exc
    except OSError as exc:
        raise ProfileError(f"the profile {path} cannot be written: {exc.strerror}") from exc
