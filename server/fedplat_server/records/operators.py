"""Operators: people and programs that may use the services of `admin.proto`, each with a name, a role and a token.

A token has 256 random bits and a prefix that scanners for leaked secrets recognize; the database keeps its hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import secrets
from collections.abc import Sequence
from enum import StrEnum

from fedplat_server.errors import ConfigError, LastAdminError

TOKEN_PREFIX = "fedplat_op_"
_TOKEN = re.compile(rf"{TOKEN_PREFIX}[A-Za-z0-9_-]{{43}}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,62}")
_DURATION = re.compile(r"([1-9][0-9]{0,5})([smhdw])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Role(StrEnum):
    """The permissions of an operator. Each role includes those before it."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def includes(self, needed: Role) -> bool:
        """Return whether this role has the permissions of another one."""
        return _RANKS[self] >= _RANKS[needed]


_RANKS = {role: rank for rank, role in enumerate(Role)}


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorRecord:
    """A stored operator; `expires_unix_s` is None if the token does not expire."""

    name: str
    role: Role
    created_unix_s: float
    expires_unix_s: float | None = None

    def is_valid(self, unix_s: float) -> bool:
        """Return whether the token is valid at this time."""
        return self.expires_unix_s is None or unix_s < self.expires_unix_s


def require_another_admin(operators: Sequence[OperatorRecord], name: str, unix_s: float) -> None:
    """Raise `LastAdminError` if this operator is the only one with the role admin and a valid token."""
    admins = {record.name for record in operators if record.role is Role.ADMIN and record.is_valid(unix_s)}
    if admins == {name}:
        raise LastAdminError(f"operator {name} is the last one with the role admin; add another one first")


def new_operator_token() -> tuple[str, bytes]:
    """Return a new token and its hash."""
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    return token, hash_token(token)


def hash_token(token: str) -> bytes:
    """Return the hash of a token that the database keeps. Tokens are random, so a plain hash is enough."""
    return hashlib.sha256(token.encode()).digest()


def looks_like_token(text: str) -> bool:
    """Return whether a text has the form of an operator's token."""
    return _TOKEN.fullmatch(text) is not None


def is_name(name: str) -> bool:
    """Return whether an operator may have this name."""
    return _NAME.fullmatch(name) is not None


def checked_name(name: str) -> str:
    """Return the name. Raises `ConfigError` if an operator may not have it."""
    if not is_name(name):
        raise ConfigError(f"operator name {name[:80]!r}: expected 1 to 63 letters, digits or _.@- (alphanumeric first)")
    return name


def parse_role(text: str) -> Role:
    """Return the role with this name. Raises `ConfigError` for an unknown name."""
    try:
        return Role(text)
    except ValueError as exc:
        raise ConfigError(f"role {text[:80]!r}: expected {', '.join(Role)}") from exc


def parse_duration_s(text: str) -> float:
    """Return a duration such as 90d, 12h or 30m in seconds. Raises `ConfigError` for another format."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(f"duration {text[:80]!r}: expected a number and s, m, h, d or w, such as 90d")
    return float(match[1]) * _UNITS_S[match[2]]
