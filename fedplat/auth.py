"""Who a client is, as both ends must agree on it: the ticket that lets it in, and the bytes that it signs.

A ticket is one printable line, `fpt1.` and base64url: all that a newcomer needs to find a server, to know it again and
to be let in. What is signed begins with a tag of its purpose and has its parts delimited by their lengths, so that
no signature fits anywhere else. Signatures are Ed25519 (RFC 8032); this module neither signs nor verifies.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import Final

import msgspec

from fedplat.errors import TicketError

METADATA_SIGNATURE: Final = "fedplat-signature-bin"
METADATA_NONCE: Final = "fedplat-nonce-bin"
METADATA_SESSION: Final = "fedplat-session"
METADATA_COUNTER: Final = "fedplat-counter"
METADATA_CODE: Final = "fedplat-code"
"""Trailing metadata of every refusal that the server itself made: its code of the catalogue."""

MAX_COUNTER: Final = 2**63 - 1
MAX_TICKET: Final = 32_768
"""Characters of the longest ticket: a chain of certificates fits."""

_PREFIX = "fpt1."
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an operator hands to a client; `secret` is its enrollment token.

    `ca` is the certificate (PEM) of the authority that the client shall trust. If it is empty, the client trusts the
    authorities that its platform trusts, or, when `tls` is false, talks without encryption.
    """

    server: str
    population: str
    secret: str
    tls: bool = False
    ca: str = ""

    def __repr__(self) -> str:
        return f"Ticket(server={self.server!r}, population={self.population!r}, tls={self.tls})"

    def to_text(self) -> str:
        """The printable line."""
        return _PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).rstrip(b"=").decode()

    @classmethod
    def from_text(cls, text: str) -> Ticket:
        """Reads the printable line. Raises `TicketError`, which does not show it."""
        line = text.strip()
        if len(line) > MAX_TICKET:
            raise TicketError(f"the ticket has {len(line)} characters; expected at most {MAX_TICKET}")
        if not line.startswith(_PREFIX):
            raise TicketError(
                f"this is no ticket of this version: expected one line that begins with {_PREFIX}; "
                "an operator makes one with: fedplat enrollment create"
            )
        ticket = _decode_body(line.removeprefix(_PREFIX))
        if ticket is None:  # without a cause: that would show what it stumbled over
            raise TicketError("the ticket is damaged: copy the whole line again, or ask for another one")
        if not (ticket.server and ticket.population and ticket.secret):
            raise TicketError("the ticket is incomplete: ask for another one")
        if not is_address(ticket.server):
            raise TicketError(f"the ticket names no server but {ticket.server[:80]!r}: ask for one with host:port")
        return ticket


def _decode_body(body: str) -> Ticket | None:
    try:
        content = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        return msgspec.msgpack.decode(content, type=Ticket)
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        return None


def is_address(text: str) -> bool:
    """Whether a text is `host:port`, as a server is reached by; an IPv6 address stands in brackets."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and text.isprintable() and 1 <= int(match["port"]) <= 65535


def proof_payload(method: str, nonce: bytes, request: bytes) -> bytes:
    """What proves the possession of a key: signed over a nonce of the server and the serialized request."""
    return _payload(b"fedplat proof 1", method.encode(), nonce, hashlib.sha256(request).digest())


def call_payload(method: str, session_id: str, counter: int, request: bytes) -> bytes:
    """What a call within a session signs: of a stream, `request` is the first message as it is serialized."""
    return _payload(
        b"fedplat call 1",
        method.encode(),
        session_id.encode(),
        counter.to_bytes(8, "big"),
        hashlib.sha256(request).digest(),
    )


def _payload(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)
