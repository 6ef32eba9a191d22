"""Client authentication as both ends implement it: the enrollment ticket, names in certificates, and signed bytes.

A ticket is one printable line, `fpt1.` or `fpt2.` and base64url. It holds everything that a new client needs to find a
server, to authenticate it and to enroll. Signed bytes begin with a tag of their purpose, and each part is preceded by
its length, so no signature is valid for another purpose. Signatures are Ed25519 (RFC 8032); this module neither signs
nor verifies.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import Final

import msgspec

from fedplat.config.decoding import prepare_type
from fedplat.errors import TicketError

METADATA_SIGNATURE: Final = "fedplat-signature-bin"
METADATA_NONCE: Final = "fedplat-nonce-bin"
METADATA_SESSION: Final = "fedplat-session"
METADATA_COUNTER: Final = "fedplat-counter"
METADATA_CODE: Final = "fedplat-code"
"""Key in the trailing metadata of every refusal that the server itself made; the value is its error code."""

MAX_COUNTER: Final = 2**63 - 1
MAX_TICKET: Final = 32_768
"""Maximum length of a ticket in characters: a chain of certificates fits."""

PEER_DOMAIN: Final = "peer.fedplat.invalid"
"""The domain of clients' DNS names in certificates. No host has such a name (RFC 6761, section 6.4)."""

_PREFIX, _PREFIX_TWO = "fpt1.", "fpt2."
_CLIENT_URI = re.compile(r"fedplat:client:([^/]+/[0-9]{1,18})")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")


class _TicketOne(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of version 1: an array, which cannot have more fields."""

    server: str
    population: str
    secret: str
    tls: bool = False
    ca: str = ""


class Ticket(msgspec.Struct, frozen=True, omit_defaults=True):
    """A ticket that an operator issues to a client; `secret` is the enrollment token.

    `ca` is the certificate (PEM) of the authority that the client must trust. If it is empty, the client trusts the
    authorities that its platform trusts or, if `tls` is false, connects without encryption. `http` is the address for
    HTTP/1.1; if it is empty, a client that needs it tries `server`.

    With `http`, the line is of version 2: a map, of which later releases may add entries. Clients before 0.2 refuse it.
    """

    server: str
    population: str
    secret: str
    tls: bool = False
    ca: str = ""
    http: str = ""

    def __repr__(self) -> str:
        return f"Ticket(server={self.server!r}, population={self.population!r}, tls={self.tls})"

    def to_text(self) -> str:
        """Return the printable line."""
        content: msgspec.Struct = self
        if not self.http:
            content = _TicketOne(self.server, self.population, self.secret, self.tls, self.ca)
        prefix = _PREFIX_TWO if self.http else _PREFIX
        return prefix + base64.urlsafe_b64encode(msgspec.msgpack.encode(content)).rstrip(b"=").decode()

    @classmethod
    def from_text(cls, text: str) -> Ticket:
        """Parse the printable line. Raises `TicketError`; its message does not show the line."""
        line = text.strip()
        if len(line) > MAX_TICKET:
            raise TicketError(f"the ticket has {len(line)} characters; expected at most {MAX_TICKET}")
        if not line.startswith((_PREFIX, _PREFIX_TWO)):
            raise TicketError(
                f"this is not a ticket of this version: expected one line that begins with {_PREFIX} or {_PREFIX_TWO}; "
                "an operator makes one with: fedplat enrollment create"
            )
        ticket = _decode_body(line)
        if ticket is None:  # no cause: it would show the part that could not be decoded
            raise TicketError("the ticket is damaged: copy the whole line again, or ask for another one")
        if not (ticket.server and ticket.population and ticket.secret):
            raise TicketError("the ticket is incomplete: ask for another one")
        if not is_address(ticket.server):
            raise TicketError(f"the ticket's server is {ticket.server[:80]!r}; ask for a ticket with host:port")
        if ticket.http and not is_address(ticket.http):
            raise TicketError(f"the ticket's address for HTTP is {ticket.http[:80]!r}; ask for a ticket with host:port")
        return ticket


def _decode_body(line: str) -> Ticket | None:
    prefix, body = line[: len(_PREFIX)], line[len(_PREFIX) :]
    try:
        content = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        if prefix == _PREFIX_TWO:
            return msgspec.msgpack.decode(content, type=prepare_type(Ticket))
        one = msgspec.msgpack.decode(content, type=prepare_type(_TicketOne))
        return Ticket(one.server, one.population, one.secret, one.tls, one.ca)
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        return None


def is_address(text: str) -> bool:
    """Return whether the text is a server address, `host:port`; an IPv6 address is in brackets."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and text.isprintable() and 1 <= int(match["port"]) <= 65535


def client_uri(name: str) -> str:
    """Return the URI in the certificate of a client; `name` is `<id>/<number>`."""
    return f"fedplat:client:{name}"


def parse_client_uri(uri: str) -> str | None:
    """Return the `<id>/<number>` of a certificate's URI; None for a URI of another kind.

    >>> parse_client_uri(client_uri("c-1/2"))
    'c-1/2'
    """
    match = _CLIENT_URI.fullmatch(uri)
    return match[1] if match is not None else None


def peer_host(client_id: str) -> str:
    """Return the DNS name in the certificate of a client that has a listener.

    Peers verify this name, whatever the address is.

    >>> peer_host("c-0123456789abcdef")
    'c-0123456789abcdef.peer.fedplat.invalid'
    """
    return f"{client_id}.{PEER_DOMAIN}"


def proof_payload(method: str, nonce: bytes, request: bytes) -> bytes:
    """Return the bytes to sign to prove possession of a key: over a nonce of the server and the serialized request."""
    return _payload(b"fedplat proof 1", method.encode(), nonce, hashlib.sha256(request).digest())


def call_payload(method: str, session_id: str, counter: int, request: bytes) -> bytes:
    """Return the bytes that a call within a session signs.

    `request` is the serialized request; for a stream, the serialized first message.
    """
    return _payload(
        b"fedplat call 1",
        method.encode(),
        session_id.encode(),
        counter.to_bytes(8, "big"),
        hashlib.sha256(request).digest(),
    )


def _payload(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)
