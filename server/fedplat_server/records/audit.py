"""Operators, with a name, a role and a token, and the audit log: who did what, as a chain of hashes.

Each row's hash covers the row and the hash of the row before. The head (the number of rows, and the hash of the last)
is kept in its own row, which reveals a truncated log. An attacker who may write to the database can recompute the
whole chain: only a head that was recorded outside of the database reveals that, so the daemon logs the head when it
starts and when it stops. Pure: no clock and no database.

A token has 256 random bits and a prefix that scanners for leaked secrets recognize; the database keeps its hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

from fedplat_server.errors import ConfigError, LastAdminError

GENESIS = "0" * 64
"""The previous hash of the first row."""
SERVER = "server"
"""The actor of what the server does on its own initiative."""
HOST = "host"
"""The actor of commands that were run on the server's host."""


class AuditAction(StrEnum):
    """The actions in the log."""

    JOB_CREATED = "job created"
    JOB_STARTED = "job started"
    JOB_PAUSED = "job paused"
    JOB_RESUMED = "job resumed"
    JOB_CANCELLED = "job cancelled"
    JOB_ROLLED_BACK = "job rolled back"
    JOB_CHANGED = "job changed"
    JOB_DELETED = "job deleted"
    OPERATOR_ADDED = "operator added"
    OPERATOR_REMOVED = "operator removed"
    LOGIN_REFUSED = "login refused"
    ROLE_REFUSED = "call refused for the role"
    NOT_NOTED = "refusals were not noted"
    ENROLLMENT_CREATED = "enrollment token created"
    ENROLLMENT_REVOKED = "enrollment token revoked"
    CLIENT_ENROLLED = "client enrolled"
    CLIENT_REVOKED = "client revoked"
    CLIENT_FENCED = "client fenced"
    CERTIFICATE_ISSUED = "client certificate issued"
    MODEL_UPLOADED = "model uploaded"
    MODEL_EXPORTED = "model exported"
    CERTIFICATES_CHANGED = "certificates changed"
    REPORT_CONFLICT = "report with other content refused"
    WRONG_SHARES = "wrong shares in a secure aggregation"
    BUDGET_SET = "privacy budget set"
    BUDGET_REMOVED = "privacy budget removed"
    WEBHOOK_ADDED = "webhook added"
    WEBHOOK_REMOVED = "webhook removed"
    WEBHOOK_TESTED = "webhook tested"
    PRUNED = "old data removed"
    SERVER_STARTED = "server started"
    SERVER_STOPPED = "server stopped"


@dataclasses.dataclass(frozen=True, slots=True)
class AuditEntry:
    """An entry for the log: `actor` (an operator's name, a client's id, `SERVER` or `HOST`) did `action` to `subject`.

    `details` are for people, and never contain secrets.
    """

    actor: str
    action: AuditAction
    subject: str = ""
    details: Mapping[str, str | int | float | bool] = dataclasses.field(default_factory=dict[str, str])


@dataclasses.dataclass(frozen=True, slots=True)
class AuditHead:
    """The head of the log: its number of rows, and the hash of the last one."""

    num_rows: int = 0
    hash: str = GENESIS


@dataclasses.dataclass(frozen=True, slots=True)
class AuditRow:
    """A row of the log. `details` is JSON in a canonical form, since the hash covers its text."""

    sequence: int
    unix_s: float
    actor: str
    action: str
    subject: str
    details: str
    previous_hash: str
    hash: str


@dataclasses.dataclass(frozen=True, slots=True)
class AuditFilter:
    """The rows of a list: those of an actor, with an action, about a subject (if not empty), since a time, in order."""

    actor: str = ""
    action: str = ""
    since_unix_s: float = 0.0
    newest_first: bool = False
    subject: str = ""

    @property
    def is_total(self) -> bool:
        """True if every row satisfies it."""
        return not (self.actor or self.action or self.since_unix_s or self.subject)


ALL_ROWS = AuditFilter()
"""The filter that every row satisfies, oldest first."""


def next_row(entry: AuditEntry, unix_s: float, head: AuditHead) -> AuditRow:
    """Return the row that appends an entry to the log with this head."""
    details = json.dumps(dict(entry.details), sort_keys=True, separators=(",", ":"))
    row = AuditRow(
        sequence=head.num_rows + 1,
        unix_s=unix_s,
        actor=_storable(entry.actor),
        action=entry.action.value,
        subject=_storable(entry.subject),
        details=details,
        previous_hash=head.hash,
        hash="",
    )
    return dataclasses.replace(row, hash=hash_of(row))


def head_after(row: AuditRow) -> AuditHead:
    """Return the head of a log that ends with this row."""
    return AuditHead(row.sequence, row.hash)


def chain(entries: Iterable[AuditEntry], unix_s: float, head: AuditHead) -> tuple[list[AuditRow], AuditHead]:
    """Return the rows that append several entries to the log with this head, and the new head."""
    rows: list[AuditRow] = []
    for entry in entries:
        rows.append(next_row(entry, unix_s, head))
        head = head_after(rows[-1])
    return rows, head


def hash_of(row: AuditRow) -> str:
    """Return the SHA-256 of a row without its own hash, as a JSON array: different rows have different texts."""
    fields = dataclasses.astuple(row)[:-1]
    return hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode()).hexdigest()


def check_rows(rows: Iterable[AuditRow], at: AuditHead) -> Iterator[str]:
    """Yield the problems of rows that follow the head `at`."""
    for row in rows:
        if row.sequence != at.num_rows + 1:
            yield f"audit row {row.sequence} follows row {at.num_rows}: rows are missing or out of order"
        if row.previous_hash != at.hash:
            yield f"audit row {row.sequence} does not continue the row before it"
        if row.hash != hash_of(row):
            yield f"audit row {row.sequence} was changed after it was written"
        at = head_after(row)


def check_end(end: AuditHead, head: AuditHead) -> Iterator[str]:
    """Yield the problem of a log whose rows end with `end` but whose stored head is `head`, if these differ."""
    if end != head:
        yield (
            f"the audit log ends with row {end.num_rows} ({end.hash[:16]}), but its head names row {head.num_rows} "
            f"({head.hash[:16]}): rows at the end were removed, added or replaced"
        )


def _storable(text: str) -> str:
    """Return a text of at most 500 characters that every database stores and returns unchanged."""
    return text.encode(errors="replace").decode().replace("\x00", "\ufffd")[:500]


TOKEN_PREFIX = "fedplat_op_"
_TOKEN = re.compile(rf"{TOKEN_PREFIX}[A-Za-z0-9_-]{{43}}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,62}")


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
