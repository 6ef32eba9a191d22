"""Events that operators and programs may want to know of, and webhooks: addresses that receive them. No I/O.

The database stores an event in the transaction of the change that it is about, and numbers events without gaps. So a
program that reads the events after the last number that it has seen misses none. Pure: no clock and no database.

Requests have the headers and the signature of the specification Standard Webhooks
(https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md).
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from urllib.parse import urlsplit

from fedplat.rounds import Change, HistoryRow
from fedplat.rounds.states import AttemptKind, AttemptPhase, JobStatus


class EventType(StrEnum):
    """The types of events: what the event is about, and what has happened to it."""

    JOB_CREATED = "job.created"
    JOB_STARTED = "job.started"
    JOB_PAUSED = "job.paused"
    JOB_RESUMED = "job.resumed"
    JOB_COMPLETED = "job.completed"
    JOB_FAILED = "job.failed"
    JOB_CANCELLED = "job.cancelled"
    JOB_ROLLED_BACK = "job.rolled_back"
    ROUND_COMMITTED = "round.committed"
    ROUND_ABANDONED = "round.abandoned"
    EVALUATION_COMPLETED = "evaluation.completed"
    EVALUATION_ABANDONED = "evaluation.abandoned"
    WARM_START_COMPLETED = "warm_start.completed"
    WARM_START_ABANDONED = "warm_start.abandoned"
    CLIENT_ENROLLED = "client.enrolled"
    CLIENT_REVOKED = "client.revoked"
    OPERATOR_ADDED = "operator.added"
    OPERATOR_REMOVED = "operator.removed"
    BUDGET_SET = "privacy_budget.set"
    BUDGET_REMOVED = "privacy_budget.removed"
    WEBHOOK_ADDED = "webhook.added"
    WEBHOOK_REMOVED = "webhook.removed"
    WEBHOOK_TEST = "webhook.test"
    ALERT_RAISED = "alert.raised"
    ALERT_ENDED = "alert.ended"


TYPE_NAMES = frozenset(EventType)


@dataclasses.dataclass(frozen=True, slots=True)
class EventEntry:
    """An event to store. Fields that do not apply are empty or 0.

    `subject` is the name of an operator or an alert, or the id of a webhook. `text` is a sentence for people.
    """

    type: EventType
    job_id: str = ""
    job_name: str = ""
    population: str = ""
    client_id: str = ""
    round: int = 0
    attempt: int = 0
    subject: str = ""
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class EventRow:
    """A stored event. The sequence number grows by 1 from event to event; `unix_s` is the time of the change.

    A newer version may have stored types that this one does not know, so `type` is a string.
    """

    sequence: int
    unix_s: float
    type: str
    job_id: str = ""
    job_name: str = ""
    population: str = ""
    client_id: str = ""
    round: int = 0
    attempt: int = 0
    subject: str = ""
    text: str = ""


class Severity(IntEnum):
    """How urgent an alert is."""

    WARNING = 1
    CRITICAL = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Alert:
    """A condition: a sentence about what is wrong, and one about what to do.

    `job_id` and `population` are empty if it is about the server itself.
    """

    name: str
    severity: Severity
    text: str
    remedy: str
    job_id: str = ""
    population: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """The identity of the alert: two with the same key are not raised at the same time."""
        return self.name, self.job_id, self.population


def alert_event(type_: EventType, alert: Alert) -> EventEntry:
    """Return the event of an alert that was raised or has ended."""
    return EventEntry(type_, job_id=alert.job_id, population=alert.population, subject=alert.name, text=alert.text)


_JOB_TYPES: Mapping[tuple[str, str], EventType] = {
    (JobStatus.DRAFT, JobStatus.RUNNING): EventType.JOB_STARTED,
    (JobStatus.PAUSED, JobStatus.RUNNING): EventType.JOB_RESUMED,
}
_JOB_TYPES_TO: Mapping[str, EventType] = {
    JobStatus.PAUSED: EventType.JOB_PAUSED,
    JobStatus.COMPLETED: EventType.JOB_COMPLETED,
    JobStatus.FAILED: EventType.JOB_FAILED,
    JobStatus.CANCELLED: EventType.JOB_CANCELLED,
}
_ATTEMPT_TYPES: Mapping[tuple[str, str], EventType] = {
    (AttemptKind.TRAIN, AttemptPhase.COMMITTED): EventType.ROUND_COMMITTED,
    (AttemptKind.TRAIN, AttemptPhase.ABANDONED): EventType.ROUND_ABANDONED,
    (AttemptKind.EVALUATE, AttemptPhase.COMMITTED): EventType.EVALUATION_COMPLETED,
    (AttemptKind.EVALUATE, AttemptPhase.ABANDONED): EventType.EVALUATION_ABANDONED,
    (AttemptKind.WARM_START, AttemptPhase.COMMITTED): EventType.WARM_START_COMPLETED,
    (AttemptKind.WARM_START, AttemptPhase.ABANDONED): EventType.WARM_START_ABANDONED,
}


def list_events(change: Change) -> list[EventEntry]:
    """Return the events of one step of a job, in the order of its history. Assignments have no events."""
    events: list[EventEntry] = []
    for row in change.history:
        type_ = _find_type(change, row)
        if type_ is not None:
            events.append(
                EventEntry(
                    type_,
                    job_id=change.job.job_id,
                    job_name=change.job.spec.name,
                    population=change.job.spec.population,
                    round=row.round,
                    attempt=row.attempt,
                    text=row.reason,
                )
            )
    return events


def _find_type(change: Change, row: HistoryRow) -> EventType | None:
    if row.entity == "job":
        return _JOB_TYPES.get((row.from_state, row.to_state)) or _JOB_TYPES_TO.get(row.to_state)
    if row.entity == "attempt":
        return _ATTEMPT_TYPES.get((row.kind, row.to_state))
    if row.entity == "version" and change.version is not None and change.version.restored_from is not None:
        return EventType.JOB_ROLLED_BACK
    return None


MAX_WEBHOOKS = 20
MAX_URL_BYTES = 2048
MAX_PENDING = 100_000
"""Maximum number of pending deliveries of one webhook; beyond it the oldest ones fail."""
RETRY_DELAYS_S = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0)
"""The delays before the retries of a delivery, as the specification recommends them: 32 hours in all."""
MAX_JITTER = 0.2
"""The largest random extension of a delay, as a fraction of it, so that retries of many deliveries are spread."""
MAX_RESULT_BYTES = 200
SECRET_PREFIX = "whsec_"
SECRET_BYTES = 32
WEBHOOK_ID = re.compile(r"w-[0-9a-f]{12}")
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}$)(?:{_LABEL})(?:\.{_LABEL})*|\[[0-9A-Fa-f:.]{{2,45}}\]")
_ALERTS = frozenset({EventType.ALERT_RAISED, EventType.ALERT_ENDED})


class DeliveryState(StrEnum):
    """The state of a delivery."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class WebhookRecord:
    """A stored webhook. Empty `types` mean all.

    `failing_since_unix_s` is the time of the first failed attempt since the last success; None if there was no failure.
    `num_pending` counts the events that are not delivered yet, and `oldest_unix_s` is the time of the oldest of them.
    """

    webhook_id: str
    url: str
    types: tuple[str, ...]
    secret: str = dataclasses.field(repr=False)
    created_unix_s: float
    last_result: str = ""
    last_unix_s: float | None = None
    failing_since_unix_s: float | None = None
    num_pending: int = 0
    oldest_unix_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class DeliveryRecord:
    """The delivery of an event to a webhook. `result` is that of the last attempt."""

    webhook_id: str
    event: EventRow
    state: DeliveryState = DeliveryState.PENDING
    num_attempts: int = 0
    result: str = ""
    last_unix_s: float | None = None
    next_unix_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SendResult:
    """The result of one request: whether the receiver accepted it, and a status code or the reason of the failure."""

    accepted: bool
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class WebhookTarget:
    """The parts of a webhook's URL. `path` includes the query; `host` of an IPv6 address is without brackets."""

    is_secure: bool
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """The header `Host`: without the port if it is the default of the scheme."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_secure else 80) else f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        """The URL without path and query, which may contain a secret."""
        return f"{'https' if self.is_secure else 'http'}://{self.authority}"


def parse_url(url: str) -> WebhookTarget:
    """Parse the URL of a webhook. Raises `ValueError` with the mistake."""
    if len(url.encode(errors="replace")) > MAX_URL_BYTES:
        raise ValueError(f"the URL is longer than {MAX_URL_BYTES} bytes")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("the URL has characters that are not allowed; expected ASCII, with others percent-encoded")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise ValueError("the URL cannot be read; expected one such as https://example.org/fedplat") from exc
    if parts.scheme not in ("https", "http"):
        raise ValueError(
            "the URL has another scheme; expected https://, or http:// in a network that the server allows"
        )
    if parts.username is not None or parts.password is not None:
        raise ValueError("the URL has a user name or a password; expected none: requests are signed")
    if parts.fragment:
        raise ValueError("the URL has a fragment (#...), which HTTP does not send; expected none")
    host = parts.hostname or ""
    if _HOST.fullmatch(f"[{host}]" if ":" in host else host) is None:
        raise ValueError("the URL has no valid host name; expected one such as example.org")
    if port == 0:
        raise ValueError("the URL has the port 0; expected 1 to 65535")
    is_secure = parts.scheme == "https"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return WebhookTarget(is_secure, host, port or (443 if is_secure else 80), path)


def new_secret() -> str:
    """Return a new secret, the key of the signatures: 256 random bits."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def sign_delivery(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the header `webhook-signature` of a request (version 1: HMAC-SHA256)."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def message_id(webhook_id: str, sequence: int) -> str:
    """Return the header `webhook-id`, which all attempts to deliver an event share."""
    return f"msg_{webhook_id.removeprefix('w-')}_{sequence}"


def encode_payload(event: EventRow) -> bytes:
    """Return the body of a request: the type, the time, and the ids of what the event is about.

    Metrics of clients are never part of it. Texts may quote errors of user code, so only those of alerts are included.
    """
    data = {
        name: value
        for name, value in dataclasses.asdict(event).items()
        if value and name not in ("type", "unix_s") and (name != "text" or event.type in _ALERTS)
    }
    when = datetime.datetime.fromtimestamp(event.unix_s, datetime.UTC).isoformat(timespec="milliseconds")
    payload = {"type": event.type, "timestamp": when.replace("+00:00", "Z"), "data": data}
    return json.dumps(payload, separators=(",", ":")).encode()


def after_attempt(delivery: DeliveryRecord, result: SendResult, unix_s: float, jitter: float) -> DeliveryRecord:
    """Return a delivery after an attempt that ended at `unix_s`; `jitter` is a random number from 0 to 1."""
    tried = dataclasses.replace(
        delivery, num_attempts=delivery.num_attempts + 1, result=result.text, last_unix_s=unix_s, next_unix_s=None
    )
    if result.accepted:
        return dataclasses.replace(tried, state=DeliveryState.DELIVERED)
    if tried.num_attempts > len(RETRY_DELAYS_S):
        return dataclasses.replace(tried, state=DeliveryState.FAILED)
    delay_s = RETRY_DELAYS_S[tried.num_attempts - 1] * (1.0 + MAX_JITTER * jitter)
    return dataclasses.replace(tried, next_unix_s=unix_s + delay_s)
